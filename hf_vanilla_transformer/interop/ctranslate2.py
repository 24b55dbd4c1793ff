"""Exports models to CTranslate2's format, by `export` or by its own TransformersConverter.

Importing this module registers a loader there: `TransformersConverter("outputs/quickstart/model").convert("ct2")`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from ctranslate2.converters.transformers import ModelLoader, register_loader
from ctranslate2.specs import common_spec, transformer_spec
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, sinusoidal_table
from .conversion import ConversionError, check_plain

Activation = common_spec.Activation
ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_fast": Activation.GELUTanh,
    "gelu_new": Activation.GELUTanh,
    "gelu_pytorch_tanh": Activation.GELUTanh,
    "quick_gelu": Activation.GELUSigmoid,
    "silu": Activation.SWISH,
    "swish": Activation.SWISH,
    "sigmoid": Activation.Sigmoid,
    "tanh": Activation.Tanh,
}
# Rows of a table of sinusoids: twice of what CTranslate2 cuts sources to by itself (max_input_length).
POSITIONS = 2048
# A token of this logit is never chosen; half precision has larger numbers.
NEVER = -1e4
# Settings of decoding -> names of the same in `Translator.translate_batch`.
SAME_SETTINGS = {
    "num_beams": "beam_size",
    "length_penalty": "length_penalty",
    "max_new_tokens": "max_decoding_length",
    "min_new_tokens": "min_decoding_length",
}
# Settings without an equal there -> what to say.
OTHER_SETTINGS = {
    "gnmt_length_penalty": "its penalty is length^alpha, so beam search may choose other translations (greedy search "
    "doesn't)",
    "max_extra_length": "give max_decoding_length, one number for all sentences of a call (its default is 256)",
    "coverage_penalty": "its formula is another one",
    "repetition_penalty": "translate_batch has an option of that name; the two weren't compared",
    "no_repeat_ngram_size": "translate_batch has an option of that name; the two weren't compared",
    "forced_bos_token_id": "give target_prefix",
    "forced_eos_token_id": "a translation that is cut at the maximum length has no end token",
}
# Settings that the export holds, that change no translation, or of which `notes` says more.
LOOKED_AT = {
    *SAME_SETTINGS, *OTHER_SETTINGS, "max_length", "early_stopping", "bad_words_ids", "suppress_tokens", "use_cache",
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "transformers_version",
    "_from_model_config",
}  # fmt: skip


# ---- Files ----
def export(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    quantization: str | None = None,
) -> list[str]:
    """Writes a model for `ctranslate2.Translator`, with its tokenizer's files.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        folder: An empty folder.
        quantization: A type of CTranslate2's, such as "int8" or "float16"; None: the weights stay as they are.

    Returns:
        Notes for the user.

    Raises:
        ConversionError: CTranslate2 can't express the model.
        OSError: The folder can't be written.
    """
    write(model, tokenizer, folder, quantization=quantization)
    tokenizer.save_pretrained(folder)
    found = notes(model)
    if getattr(tokenizer, "separate_vocabs", False):
        found.append(
            "source_vocabulary.json names the source's ids; the tokenizer's convert_ids_to_tokens the target's"
        )
    return found


def write(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    quantization: str | None = None,
) -> None:
    """Writes what `export` does without the tokenizer: weights, vocabularies, and how the model decodes."""
    spec = VanillaTransformerLoader()(model, tokenizer)
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(folder))
    model.generation_config.save_pretrained(folder)


def notes(model: VanillaTransformerForConditionalGeneration) -> list[str]:
    """Returns notes on an exported model: its longest sentences, and generation settings."""
    config, settings = model.config, model.generation_config
    given = {name: getattr(settings, name, None) for name in (*SAME_SETTINGS, *OTHER_SETTINGS)}
    beams = settings.num_beams or 1
    same = {SAME_SETTINGS[name]: given[name] for name in SAME_SETTINGS if given[name] is not None}
    if settings.max_length is not None:  # it counts the start token
        same.setdefault("max_decoding_length", settings.max_length - 1)
    # CTranslate2's own defaults are 2 beams, and no empty translation.
    arguments = ", ".join(f"{n}={v!r}" for n, v in ({"beam_size": beams, "min_decoding_length": 0} | same).items())
    found = [
        f"the tables of positions have {len(_table(model.model.encoder, config)):,} rows: longer sentences are an "
        "error. translate_batch cuts sources to 1,024 tokens unless max_input_length says otherwise",
        "Translator reads the generation settings in generation_config.json; CTranslate2 itself doesn't, so give them "
        f"to translate_batch: {arguments}",
    ]
    found += [
        f"CTranslate2 has no {name} ({given[name]} here): {what}"
        for name, what in OTHER_SETTINGS.items()
        if given[name] or (given[name] == 0 and name.endswith("_id"))
    ]
    if beams > 1 and settings.early_stopping is not True:
        found.append("its beam search ends as with early_stopping=True; the model has another setting")
    if never := never_chosen(settings):
        found.append(f"tokens {', '.join(map(str, never))} are never chosen: their output bias is {NEVER:g}")
    if sequences := [one for one in settings.bad_words_ids or [] if len(one) > 1]:
        found.append(f"bad_words_ids of several tokens have to be given as suppress_sequences: {sequences}")
    set_here = settings.to_diff_dict()
    if others := {name: set_here[name] for name in set_here.keys() - LOOKED_AT if set_here[name]}:
        found.append(f"not carried over: {', '.join(f'{name}={others[name]!r}' for name in sorted(others))}")
    if len(ends := _as_list(settings.eos_token_id)) > 1:
        found.append(f"the model ends at any of the tokens {ends}; give them as end_token")
    return found


# ---- The model ----
@register_loader("VanillaTransformerConfig")
class VanillaTransformerLoader(ModelLoader):
    """Makes CTranslate2's description of a model; its TransformersConverter finds it by the configuration's name."""

    @property
    def architecture_name(self) -> str:
        """The Auto class that loads a model."""
        return "AutoModelForSeq2SeqLM"

    @torch.no_grad()
    def get_model_spec(self, model: VanillaTransformerForConditionalGeneration) -> transformer_spec.TransformerSpec:
        """Describes the weights.

        Raises:
            ConversionError: CTranslate2 can't express the model.
        """
        check_plain(model)
        config = model.config
        if model.dtype == torch.float64:
            raise ConversionError("CTranslate2 has no float64: save the model in float32 first")
        if config.activation_function not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ConversionError(
                f"CTranslate2 has no activation_function {config.activation_function!r}; it has {known}"
            )
        encoder = transformer_spec.TransformerEncoderSpec(
            config.encoder_layers, config.encoder_attention_heads, **_options(model.model.encoder)
        )
        decoder = transformer_spec.TransformerDecoderSpec(
            config.decoder_layers,
            config.decoder_attention_heads,
            alignment_heads=config.decoder_attention_heads,  # return_attention: their mean
            **_options(model.model.decoder),
        )
        self._set_stack(encoder, encoder.embeddings[0], model.model.encoder)
        self._set_stack(decoder, decoder.embeddings, model.model.decoder)
        self.set_linear(decoder.projection, model.lm_head)
        if never := never_chosen(model.generation_config):
            own: Tensor | None = model.lm_head.bias
            bias = model.lm_head.weight.new_zeros(config.target_vocab_size) if own is None else own.clone()
            bias[never] = NEVER
            decoder.projection.bias = bias
        return transformer_spec.TransformerSpec(encoder, decoder)

    def _set_stack(self, spec: Any, embeddings: Any, stack: Any) -> None:
        config = stack.config
        spec.scale_embeddings = config.scale_embedding
        spec.position_encodings.encodings = _table(stack, config)
        self.set_embeddings(embeddings, stack.embed_tokens)
        if config.final_layer_norm:  # also behind post-norm layers, whose spec has no such attribute and is frozen
            vars(spec)["layer_norm"] = common_spec.LayerNormSpec()
            self.set_layer_norm(spec.layer_norm, stack.layer_norm)
        for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
            attentions = {"self_attention": "self_attn", "attention": "encoder_attn"}
            for theirs, ours in attentions.items():
                if hasattr(layer, ours):
                    _set_attention(getattr(layer_spec, theirs), getattr(layer, ours))
                    self.set_layer_norm(getattr(layer_spec, theirs).layer_norm, getattr(layer, f"{ours}_layer_norm"))
            self.set_linear(layer_spec.ffn.linear_0, layer.feed_forward.fc1)
            self.set_linear(layer_spec.ffn.linear_1, layer.feed_forward.fc2)
            self.set_layer_norm(layer_spec.ffn.layer_norm, layer.final_layer_norm)

    def set_linear(self, spec: Any, module: Any, *args: Any) -> None:
        """Copies a linear map, as CTranslate2 quantizes in place."""
        spec.weight = module.weight.clone()
        if module.bias is not None:
            spec.bias = module.bias

    def set_embeddings(self, spec: Any, module: Any) -> None:
        """Copies embeddings, for the same reason."""
        spec.weight = module.weight.clone()

    def get_vocabulary(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[str]]:
        """Returns the tokens of source and target, by their ids."""
        source = {number: token for token, number in tokenizer.get_vocab().items()}
        target = source
        if getattr(tokenizer, "separate_vocabs", False):
            target = {number: token for token, number in tokenizer.target_encoder.items()}
        return _filled(source, model.config.vocab_size), _filled(target, model.config.target_vocab_size)

    def set_vocabulary(self, spec: Any, tokens: tuple[list[str], list[str]]) -> None:
        """Registers the tokens."""
        spec.register_source_vocabulary(tokens[0])
        spec.register_target_vocabulary(tokens[1])

    def set_config(self, config: Any, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Sets the special tokens by their names in the target's vocabulary.

        Raises:
            ConversionError: There is none to start or to end with.
        """
        settings, target = model.generation_config, self.get_vocabulary(model, tokenizer)[1]
        for field in ("decoder_start_token", "eos_token"):
            number = next(iter(_as_list(getattr(settings, f"{field}_id"))), None)
            if number is None or number >= len(target):
                raise ConversionError(
                    f"{field}_id is {number} in the generation config, and the target has no such token"
                )
            setattr(config, field, target[number])
        # CTranslate2 would add those that a vocabulary lacks, and there are no embeddings for them.
        config.unk_token = tokenizer.unk_token or tokenizer.pad_token or config.eos_token
        config.bos_token = tokenizer.bos_token or config.eos_token
        config.add_attribute("layer_norm_epsilon", model.config.layer_norm_eps)
        config.add_attribute("num_parameters", model.num_parameters())  # this and the next for Translator
        config.add_attribute("max_position_embeddings", len(_table(model.model.decoder, model.config)))


def _options(stack: Any) -> dict[str, Any]:
    config: VanillaTransformerConfig = stack.config
    return {
        "pre_norm": config.norm_position == "pre",
        "no_final_norm": True,
        "activation": ACTIVATIONS[config.activation_function],
        "head_dim": _head_dim(stack.layers[0].self_attn),
    }


def _head_dim(attention: Any) -> int:
    """Returns the width of all heads, as CTranslate2 has one for queries, keys and values: zeros fill narrower ones."""
    return max(attention.head_dim, attention.value_head_dim)


def _set_attention(spec: Any, attention: Any) -> None:
    width, num_heads = _head_dim(attention), attention.q_proj.out_features // attention.head_dim
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    *inner, out = spec.linear  # of self-attention one for all three
    for linear, group in zip(inner, [parts] if len(inner) == 1 else [parts[:1], parts[1:]], strict=True):
        linear.weight = torch.cat([_widened(one.weight, num_heads, width) for one in group])
        if attention.q_proj.bias is not None:
            linear.bias = torch.cat([_widened(one.bias, num_heads, width) for one in group])
    out.weight = _widened(attention.out_proj.weight.T, num_heads, width).T.contiguous()
    if attention.out_proj.bias is not None:
        out.bias = attention.out_proj.bias
    if width != attention.head_dim:
        spec.queries_scale = np.float32(attention.scaling)


def _widened(value: Tensor, num_heads: int, width: int) -> Tensor:
    """Fills each head's rows of (h * d, ...) with zeros up to (h * width, ...)."""
    heads = value.reshape(num_heads, -1, *value.shape[1:])
    return F.pad(heads, (0, 0) * (value.ndim - 1) + (0, width - heads.shape[1])).flatten(0, 1)


def _table(stack: Any, config: VanillaTransformerConfig) -> Tensor:
    """Returns the table of positions, from the first token's on, (positions, d_model)."""
    positions: nn.Module = stack.embed_positions
    if isinstance(positions, nn.Embedding):
        return positions.weight
    return sinusoidal_table(max(config.max_position_embeddings, POSITIONS), *stack.embed_positions.layout)


def _filled(tokens: dict[int, str | None], rows: int) -> list[str]:
    """Returns the tokens of a vocabulary's rows; a row that no text has, or that repeats a token, gets a name."""
    first = {token: number for number, token in sorted(tokens.items(), reverse=True) if token is not None}
    own = {number: token for token, number in first.items()}
    names = [own.get(number, f"<unused {number}>") for number in range(rows)]
    if len(set(names)) < rows:
        raise ConversionError("several tokens of the vocabulary have the same name; CTranslate2 knows them by it")
    return names


def never_chosen(settings: GenerationConfig) -> list[int]:
    """Returns the tokens that are never to be chosen."""
    single: Sequence[Any] = [one[0] for one in settings.bad_words_ids or [] if len(one) == 1]
    return sorted({*single, *(settings.suppress_tokens or [])})


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
