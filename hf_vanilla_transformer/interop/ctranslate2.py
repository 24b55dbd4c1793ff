"""Exports models to CTranslate2's format, by `write_ctranslate2` or by its own TransformersConverter.

Importing this module registers a loader there: `TransformersConverter("outputs/quickstart/model").convert("ct2")`.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import ctranslate2
import torch
from ctranslate2.converters.transformers import _MODEL_LOADERS, ModelLoader, register_loader
from ctranslate2.specs import common_spec, model_spec, transformer_spec
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.loading import as_list
from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import first_line
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerStack
from ..plan_vanilla_transformer import GNMTLengthPenalty, Plan
from .ctranslate2_folder import NAMES
from .ctranslate2_settings import never_chosen, other_settings, patience
from .interface import ConversionError, check_plain, check_savable, table_of
from .layout import POSITIONS, Layout, rules_of

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
# What loaders read, and transformers 5 no longer writes.
LOST_FIELDS: dict[str, dict[str, bool]] = {
    "MBartConfig": {"normalize_before": True, "normalize_embedding": True},
    "PegasusConfig": {"normalize_before": True, "normalize_embedding": False},
    "BartConfig": {"normalize_before": False, "normalize_embedding": True},
}
NO_END = 10_000  # positions of a model without a table of them
# Rows of a table of sinusoids: twice of what CTranslate2 cuts sources to by itself (max_input_length).
ROWS = 2048
OF_NORMS = {"weight": "gamma", "bias": "beta"}


# ---- Files ----
def write_ctranslate2(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    quantization: str | None = None,
) -> list[str]:
    """Writes a model for `ctranslate2.Translator`, with its tokenizer's files: a writer of `export`.

    `quantization` is a type of CTranslate2's, such as "int8" or "float16"; None: the weights stay as they are.
    """
    write_model(model, tokenizer, folder, quantization=quantization)
    tokenizer.save_pretrained(folder)
    target = VanillaTransformerLoader().get_vocabulary(model, tokenizer)[1]
    found = notes(model, target)
    if quantization not in (None, *ctranslate2.get_supported_compute_types("cpu")):
        used = ctranslate2.Translator(str(folder)).compute_type
        found.append(f"this machine's processor has no {quantization}: CTranslate2 computes in {used} here")
    if getattr(tokenizer, "separate_vocabs", False):
        found.append(
            "source_vocabulary.json names the source's ids; the tokenizer's convert_ids_to_tokens the target's"
        )
    return found


def write_model(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    quantization: str | None = None,
) -> None:
    """Writes what `write_ctranslate2` does without the tokenizer: weights, vocabularies, and how the model decodes."""
    check_savable(model.generation_config)
    spec = VanillaTransformerLoader()(model, tokenizer)
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(folder))
    model.generation_config.save_pretrained(folder)


def write_other_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a model of another architecture, by CTranslate2's own loader, as `write_model` does."""
    own = model.config
    if (loader := _MODEL_LOADERS.get(name := type(own).__name__)) is None:
        raise ConversionError(f"CTranslate2 has no loader for a {type(model).__name__}")
    model.config = copy.deepcopy(own)  # loaders write into it
    model.config.tokenizer_class = type(tokenizer).__name__
    for field, value in LOST_FIELDS.get(name, {}).items():
        setattr(model.config, field, getattr(own, field, value))
    try:
        spec = loader(model, tokenizer)
        if spec.config.decoder_start_token is None:
            raise ConversionError("its decoder starts with a language, and CTranslate2's with one token")
        for field, other in {"unk_token": tokenizer.pad_token, "bos_token": tokenizer.eos_token}.items():
            setattr(spec.config, field, getattr(spec.config, field) or other)  # a token without a name can't be read
        spec.config.add_attribute("num_parameters", model.num_parameters())
        spec.config.add_attribute("max_position_embeddings", getattr(own, "max_position_embeddings", NO_END))
        spec.validate()
        spec.optimize()
        spec.save(str(folder))
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConversionError(f"CTranslate2's loader for {name}: {first_line(error)}") from error
    finally:
        model.config = own
    model.generation_config.save_pretrained(folder)


def notes(model: VanillaTransformerForConditionalGeneration, target: Sequence[str]) -> list[str]:
    """Returns notes on an exported model: its longest sentences, and settings; `target` is the vocabulary."""
    plan = Plan.of({}, model.generation_config)
    name, value = plan.limit
    # CTranslate2's own defaults are 2 beams, and no empty translation.
    given = {
        "beam_size": plan.num_beams,
        "length_penalty": None if isinstance(plan.length_penalty, GNMTLengthPenalty) else plan.length_penalty,
        "patience": patience(plan) if patience(plan) > 1 else None,
        # Without the start token.
        "max_decoding_length": {"max_new_tokens": value, "max_length": value - 1}.get(name),
        "min_decoding_length": plan.min_new_tokens or 0,
        "suppress_sequences": never_chosen(plan, target) or None,
    }
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    found = [
        f"the tables of positions have {len(_table(model.model.encoder)):,} rows: longer sentences are "
        "an error. translate_batch cuts sources to 1,024 tokens unless max_input_length says otherwise",
        "Translator reads the generation settings in generation_config.json; CTranslate2 itself doesn't, so give them "
        f"to translate_batch: {arguments}",
    ]
    if others := other_settings(plan):
        found.append(
            f"not carried over, as CTranslate2 has other names or formulas for them, or none: {', '.join(others)}"
        )
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
        """Describes the weights."""
        check_plain(model)
        config = model.config
        if model.dtype == torch.float64:
            raise ConversionError("CTranslate2 has no float64: save the model in float32 first")
        if config.activation_function not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ConversionError(
                f"CTranslate2 has no activation_function {config.activation_function!r}; it has {known}"
            )
        for heads in (config.encoder_attention_heads, config.decoder_attention_heads):
            width, of_values = (size or config.d_model // heads for size in (config.head_dim, config.value_head_dim))
            if width != of_values:
                raise ConversionError(
                    f"CTranslate2 has one width for queries, keys and values; here it is {width} and {of_values}"
                )
        encoder = transformer_spec.TransformerEncoderSpec(
            config.encoder_layers, config.encoder_attention_heads, **_options(config, config.encoder_attention_heads)
        )
        decoder = transformer_spec.TransformerDecoderSpec(
            config.decoder_layers,
            config.decoder_attention_heads,
            alignment_heads=config.decoder_attention_heads,  # return_attention: their mean
            **_options(config, config.decoder_attention_heads),
        )
        weights = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
        weights |= zip(POSITIONS, map(_table, (model.model.encoder, model.model.decoder)), strict=True)
        for stack in (encoder, decoder):
            stack.scale_embeddings = config.scale_embedding
            if config.final_layer_norm:  # also behind post-norm layers, whose spec has no such attribute and is frozen
                vars(stack)["layer_norm"] = common_spec.LayerNormSpec()
        spec = transformer_spec.TransformerSpec(encoder, decoder)
        layers = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
        for rule in rules_of(Layout(NAMES), layers):
            if rule.ours[0] in weights:
                *path, kind = rule.theirs[0].split(".")
                kind = OF_NORMS[kind] if path[-1] == "layer_norm" else kind
                value = torch.cat([weights[one] for one in rule.ours])  # a copy, as CTranslate2 quantizes in place
                setattr(model_spec.index_spec(spec, "/".join(path)), kind, value)
        return spec

    def get_vocabulary(
        self, model: VanillaTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[list[str], list[str]]:
        """Returns the tokens of source and target, by their ids."""
        source = {number: token for token, number in tokenizer.get_vocab().items()}
        target = source
        if getattr(tokenizer, "separate_vocabs", False):
            target = {number: token for token, number in tokenizer.target_encoder.items()}
        return _filled(source, model.config.vocab_size), _filled(target, model.config.target_vocab_size)

    def set_vocabulary(self, spec: transformer_spec.TransformerSpec, tokens: tuple[list[str], list[str]]) -> None:
        """Registers the tokens."""
        spec.register_source_vocabulary(tokens[0])
        spec.register_target_vocabulary(tokens[1])

    def set_config(
        self,
        config: model_spec.SequenceToSequenceModelConfig,
        model: VanillaTransformerForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Sets the special tokens by their names in the target's vocabulary."""
        settings, target = model.generation_config, self.get_vocabulary(model, tokenizer)[1]
        for field in ("decoder_start_token", "eos_token"):
            number = next(iter(as_list(getattr(settings, f"{field}_id"))), None)
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
        config.add_attribute("max_position_embeddings", len(_table(model.model.decoder)))


def _options(config: VanillaTransformerConfig, heads: int) -> dict[str, object]:
    return {
        "pre_norm": config.norm_position == "pre",
        "no_final_norm": True,
        "activation": ACTIVATIONS[config.activation_function],
        "head_dim": config.head_dim or config.d_model // heads,
    }


def _table(stack: VanillaTransformerStack) -> Tensor:
    return table_of(stack, max(stack.config.max_position_embeddings, ROWS))


def _filled(tokens: dict[int, str | None], rows: int) -> list[str]:
    """Returns the tokens of a vocabulary's rows; a row that no text has, or that repeats a token, gets a name."""
    first = {token: number for number, token in sorted(tokens.items(), reverse=True) if token is not None}
    own = {number: token for token, number in first.items()}
    names = [own.get(number, f"<unused {number}>") for number in range(rows)]
    if len(set(names)) < rows:
        raise ConversionError("several tokens of the vocabulary have the same name; CTranslate2 knows them by it")
    return names
