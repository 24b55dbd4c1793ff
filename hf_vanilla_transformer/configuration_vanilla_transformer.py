# SPDX-License-Identifier: Apache-2.0
"""Configuration of the Transformer of "Attention Is All You Need" (Vaswani et al. 2017, arXiv:1706.03762)."""

import copy
import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

POSITION_ENCODINGS = ("paper", "tensor2tensor", "fairseq", "marian", "learned")
NORM_POSITIONS = ("post", "pre")
PROBABILITIES = ("dropout", "attention_dropout", "activation_dropout", "label_smoothing")
MOST_LAYERS = 1_000
# What transformers calls keys and values of earlier positions: up to 5.23, and from 5.24 on.
CACHE_NAMES = ("past_key_values", "cache")
PIPELINE = "vanilla-translation"  # transformers' own for translation is gone


@strict
class VanillaTransformerConfig(PreTrainedConfig):
    r"""The numbers that fix one Transformer; the defaults are the paper's base model.

    Args:
        vocab_size (`int`, defaults to 37000): Tokens in the source vocabulary (5.1), the target's too unless
            `decoder_vocab_size` is given.
        decoder_vocab_size (`int`, *optional*): Tokens in a target vocabulary of its own. Needs
            `share_encoder_decoder_embeddings=False`.
        d_model (`int`, defaults to 512): $d_{model}$, the width of every layer's output (3.1).
        encoder_layers (`int`, defaults to 6): $N$ of the encoder (3.1).
        decoder_layers (`int`, defaults to 6): $N$ of the decoder (3.1).
        encoder_attention_heads (`int`, defaults to 8): $h$ of the encoder (3.2.2).
        decoder_attention_heads (`int`, defaults to 8): $h$ of the decoder (3.2.2).
        encoder_ffn_dim (`int`, defaults to 2048): $d_{ff}$ of the encoder (3.3).
        decoder_ffn_dim (`int`, defaults to 2048): $d_{ff}$ of the decoder (3.3).
        head_dim (`int`, *optional*): $d_k$, the width of one head's queries and keys (3.2.2); None: $d_{model} / h$.
        value_head_dim (`int`, *optional*): $d_v$, the width of one head's values (3.2.2); None: $d_{model} / h$.
        dropout (`float`, defaults to 0.1): $P_{drop}$ on each sub-layer's output and on the sum of embeddings and
            positions (5.4).
        attention_dropout (`float`, defaults to 0.0): Dropout on attention weights; the paper has none.
        activation_dropout (`float`, defaults to 0.0): Dropout between the two feed-forward maps; the paper has none.
        label_smoothing (`float`, defaults to 0.0): $\epsilon_{ls}$ (5.4) of the model's own loss while it trains,
            spread over all of the vocabulary; in evaluation the loss is the plain cross-entropy. 0.0 as everywhere in
            transformers; the presets carry the paper's 0.1. Leave it at 0.0 with the Trainer's
            `label_smoothing_factor`: that computes the loss outside of the model.
        activation_function (`str`, defaults to `"relu"`): The function between the two feed-forward maps (eq. 2).
        max_position_embeddings (`int`, defaults to 1024): Rows of the positional table. Longer input is no error with
            sinusoids: they are computed when needed (3.5); with `"learned"` positions it is.
        position_encoding (`str`, defaults to `"paper"`): `"paper"`: sin and cos interleaved, exponent $2i/d_{model}$
            (3.5); `"tensor2tensor"`: sin half and cos half, exponent $i/(d_{model}/2-1)$; `"fairseq"`: the same, first
            position `pad_token_id + 1`; `"marian"` (Hugging Face's Marian): halves with the paper's exponent;
            `"learned"`: a trained table (Table 3, row E).
        scale_embedding (`bool`, defaults to True): Multiply embeddings by $\sqrt{d_{model}}$ (3.4).
        norm_position (`str`, defaults to `"post"`): `"post"`: LayerNorm(x + Sublayer(x)) (3.1); `"pre"`:
            x + Sublayer(LayerNorm(x)), as later checkpoints have it.
        final_layer_norm (`bool`, defaults to False): One more LayerNorm at the end of both stacks, as pre-norm models
            and `torch.nn.Transformer` have.
        layer_norm_eps (`float`, defaults to 1e-6): $\epsilon$ of LayerNorm (tensor2tensor's value).
        attention_bias (`bool`, defaults to False): Biases on $W^Q, W^K, W^V, W^O$; the paper writes none.
        attention_init_gain (`float`, defaults to 1.0): Gain of the Glorot initialisation of $W^Q, W^K, W^V$. 1 is
            tensor2tensor's, $2^{-0.5}$ fairseq's and `torch.nn.MultiheadAttention`'s; with much dropout, a narrow
            model learns sooner with less.
        output_bias (`bool`, defaults to False): A bias on the pre-softmax projection.
        share_encoder_decoder_embeddings (`bool`, defaults to True): One matrix for source and target embeddings (3.4).
        tie_word_embeddings (`bool`, defaults to True): The same matrix for target embeddings and the pre-softmax
            projection (3.4).
        tokenizer_fingerprint (`str`, *optional*): A digest of the vocabulary that the model was trained with, by which
            another model's tokenizer is recognised.
        use_cache (`bool`, defaults to True): Keep keys and values between decoding steps.
        pad_token_id (`int`, defaults to 0): Padding.
        bos_token_id (`int`, defaults to 1): Start of sequence.
        eos_token_id (`int`, defaults to 2): End of sequence.
        decoder_start_token_id (`int`, defaults to 1): First decoder input: the target shifted right starts with it.

    Raises:
        StrictDataclassFieldValidationError: A field has the wrong type.
        StrictDataclassClassValidationError: A value, or two fields together, make no model; it names the field and
            the fix.

    Example:
        >>> config = VanillaTransformerConfig.from_preset("base")
        >>> config.d_model
        512
    """

    model_type = "vanilla_transformer"
    keys_to_ignore_at_inference = [*CACHE_NAMES]
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }
    base_model_fsdp_plan: ClassVar[dict[Any, str]] = {}  # the stacks bring their own plans

    vocab_size: int = 37000
    decoder_vocab_size: int | None = None
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    encoder_ffn_dim: int = 2048
    decoder_ffn_dim: int = 2048
    head_dim: int | None = None
    value_head_dim: int | None = None
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    label_smoothing: float | int = 0.0
    activation_function: str = "relu"
    max_position_embeddings: int = 1024
    position_encoding: str = "paper"
    scale_embedding: bool = True
    norm_position: str = "post"
    final_layer_norm: bool = False
    layer_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_init_gain: float | int = 1.0
    output_bias: bool = False
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    tokenizer_fingerprint: str | None = None
    use_cache: bool = True
    is_encoder_decoder: bool = True
    is_decoder: bool = False
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1

    def __post_init__(self, **kwargs: Any) -> None:
        if not __name__.startswith("transformers_modules."):  # the package has a pipeline of its own
            (kwargs.get("custom_pipelines") or {}).pop(PIPELINE, None)
        super().__post_init__(**kwargs)  # first, as it takes d_model and the heads by other models' names for them
        if self.share_encoder_decoder_embeddings and self.decoder_vocab_size == self.vocab_size:
            self.decoder_vocab_size = None  # so that None tells that there is one vocabulary
        heads = self.encoder_attention_heads
        # As in other models of transformers; stacks of different heads have each their own d_model / h.
        if heads == self.decoder_attention_heads and heads > 0 and self.d_model % heads == 0:
            self.head_dim = self.d_model // heads if self.head_dim is None else self.head_dim
            self.value_head_dim = self.d_model // heads if self.value_head_dim is None else self.value_head_dim

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "VanillaTransformerConfig":
        """Builds a configuration of the paper's Tables 2 and 3.

        Args:
            name: "base", "big", "tiny" (small, for a CPU) or a row of Table 3: "A-h1", "A-h4", "A-h16",
                "A-h32", "B-dk16", "B-dk32", "C-N2", "C-N4", "C-N8", "C-dmodel256", "C-dmodel1024", "C-dff1024",
                "C-dff4096", "D-dropout0.0", "D-dropout0.2", "D-ls0.0", "D-ls0.2", "E".
            **overrides: Fields that replace the preset's, for instance `vocab_size=32000`.

        Returns:
            The configuration; its vocabulary is 37,000 unless overridden.

        Raises:
            ValueError: There is no preset of that name, or no field of an override's name.
        """
        if name not in PRESETS:
            raise ValueError(f"There is no preset {name!r}. Choose one of: {', '.join(PRESETS)}.")
        known = {field.name for field in dataclasses.fields(cls)} | {*cls.attribute_map, "attn_implementation"}
        if unknown := overrides.keys() - known:
            raise ValueError(f"{cls.__name__} has no field {', '.join(sorted(unknown))}; check the spelling.")
        return cls(**{"label_smoothing": 0.1, **PRESETS[name], **overrides})

    @property
    def target_vocab_size(self) -> int:
        """Tokens in the target vocabulary: `decoder_vocab_size`, or `vocab_size` where the two are one."""
        return self.vocab_size if self.decoder_vocab_size is None else self.decoder_vocab_size

    @property
    def embedding_scale(self) -> float:
        """What embeddings are multiplied by (3.4)."""
        return math.sqrt(self.d_model) if self.scale_embedding else 1.0

    @property
    def decoding_tokens(self) -> dict[str, Any]:
        """Fields that a `GenerationConfig` takes over: the special tokens and `use_cache`."""
        names = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "use_cache")
        return {name: getattr(self, name) for name in names}

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> "VanillaTransformerConfig":
        """The configuration as transformers reads one stack of it, where `decoder_` names lose their prefix."""
        if not decoder or encoder:
            return super().get_text_config(decoder=decoder, encoder=encoder)
        config = copy.copy(self)
        config.decoder_vocab_size = self.target_vocab_size  # `vocab_size` there can't be None
        return super(VanillaTransformerConfig, config).get_text_config(decoder=True)

    def to_dict(self) -> dict[str, Any]:
        """What config.json says."""
        fields: dict[str, Any] = super().to_dict()
        if "auto_map" in fields:  # transformers names the Auto class of the model that is saved, and no other
            models = {"AutoModel": "Model", "AutoModelForSeq2SeqLM": "ForConditionalGeneration"}
            prefix = f"{__name__.rpartition('.')[2].replace('configuration', 'modeling')}.VanillaTransformer"
            fields["auto_map"] = fields["auto_map"] | {auto: prefix + model for auto, model in models.items()}
            own = {"impl": prefix.replace("modeling", "integration") + "Pipeline", "pt": [*models][1:], "type": "text"}
            fields["custom_pipelines"] = fields.get("custom_pipelines", {}) | {PIPELINE: own}
        return fields

    def to_json_file(self, json_file_path: Any, use_diff: bool = True) -> None:
        """Writes config.json, and beside code that is saved with it this code's licence."""
        super().to_json_file(json_file_path, use_diff)
        licence, copy = Path(__file__).with_name("LICENSE"), Path(json_file_path).with_name("LICENSE-CODE")
        if self._auto_class is not None and licence.is_file() and not copy.exists():
            shutil.copyfile(licence, copy)

    def validate_architecture(self) -> None:
        """Checks every field's range, and the fields together; called by `@strict`."""
        self._validate_numbers()
        self._validate_names()
        self._validate_heads()
        self._validate_vocabularies()

    def _validate_numbers(self) -> None:
        for field in VanillaTransformerConfig.__annotations__:
            value = getattr(self, field)
            if field in PROBABILITIES:
                if not 0 <= value < 1:
                    raise ValueError(f"`{field}` is {value}; it has to lie in [0, 1), such as 0.1 as in the paper.")
            elif type(value) in (int, float) and not field.endswith("_token_id") and not 0 < value < math.inf:  # or NaN
                raise ValueError(f"`{field}` is {value}; it has to be positive, and finite.")
            elif field.endswith("_layers") and value > MOST_LAYERS:  # building them would take hours before it fails
                raise ValueError(f"`{field}` is {value}; at most {MOST_LAYERS:,} layers are supported.")

    def _validate_names(self) -> None:
        for field, known in (
            ("position_encoding", POSITION_ENCODINGS),
            ("norm_position", NORM_POSITIONS),
            ("activation_function", tuple(ACT2FN)),
        ):
            if getattr(self, field) not in known:
                raise ValueError(f"`{field}` is {getattr(self, field)!r}; choose one of: {', '.join(known)}.")

    def _validate_heads(self) -> None:
        for field in ("encoder_attention_heads", "decoder_attention_heads"):
            heads = getattr(self, field)
            if self.d_model % heads and (self.head_dim is None or self.value_head_dim is None):
                raise ValueError(
                    f"`{field}` is {heads}, which doesn't divide `d_model` {self.d_model}; choose a divisor, or set "
                    "`head_dim` (d_k) and `value_head_dim` (d_v)."
                )

    def _validate_vocabularies(self) -> None:
        if self.share_encoder_decoder_embeddings and self.target_vocab_size != self.vocab_size:
            raise ValueError(
                f"`decoder_vocab_size` is {self.decoder_vocab_size} and `vocab_size` {self.vocab_size}: two "
                "vocabularies can't share one embedding matrix. Set `share_encoder_decoder_embeddings=False`, or leave "
                "`decoder_vocab_size` None."
            )
        for field in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            value = getattr(self, field)
            ids = value if isinstance(value, list) else [value]
            if any(one is not None and one < 0 for one in ids):
                raise ValueError(f"`{field}` is {value}; a token id is 0 or more. Use None for a token that is absent.")
        smallest = min(self.vocab_size, self.target_vocab_size)
        if self.pad_token_id is not None and self.pad_token_id >= smallest:
            raise ValueError(
                f"`pad_token_id` is {self.pad_token_id}, and the vocabulary has {smallest} tokens, from 0 up."
            )


def _both(**values: int) -> dict[str, int]:
    """The same numbers for the encoder and the decoder, as all of the paper's models have."""
    return {f"{stack}_{name}": value for name, value in values.items() for stack in ("encoder", "decoder")}


# Tables 2 and 3 of the paper, each row as its difference from the base model.
PRESETS: dict[str, dict[str, Any]] = {
    "base": {},
    "big": {"d_model": 1024, "dropout": 0.3, **_both(attention_heads=16, ffn_dim=4096)},
    "A-h1": _both(attention_heads=1),
    "A-h4": _both(attention_heads=4),
    "A-h16": _both(attention_heads=16),
    "A-h32": _both(attention_heads=32),
    "B-dk16": {"head_dim": 16},
    "B-dk32": {"head_dim": 32},
    "C-N2": _both(layers=2),
    "C-N4": _both(layers=4),
    "C-N8": _both(layers=8),
    "C-dmodel256": {"d_model": 256},
    "C-dmodel1024": {"d_model": 1024},
    "C-dff1024": _both(ffn_dim=1024),
    "C-dff4096": _both(ffn_dim=4096),
    "D-dropout0.0": {"dropout": 0.0},
    "D-dropout0.2": {"dropout": 0.2},
    "D-ls0.0": {"label_smoothing": 0.0},
    "D-ls0.2": {"label_smoothing": 0.2},
    "E": {"position_encoding": "learned"},
    "tiny": {"d_model": 128, **_both(attention_heads=4, layers=2, ffn_dim=512)},
}


__all__ = ["PRESETS", "VanillaTransformerConfig"]
