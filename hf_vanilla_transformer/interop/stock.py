"""Exports models as transformers' own classes: a folder that opens without this package and without remote code.

A post-norm model with sinusoids is a Marian but for the order of its width: the paper's table has sine and cosine in
turn, Marian's has all sines first. Pre-norm models with final norms are a Pegasus, a Blenderbot or an M2M100.
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    MarianTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as NAMES_OF_CLASSES

from ..checkpoints.kinds import TOKENIZER, TOKENIZER_CONFIG
from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..plan_vanilla_transformer import ENGINE_OPTIONS, OPTIONS, GNMTLengthPenalty, Plan
from .interface import (
    LIMITS,
    ConversionError,
    check_distance,
    check_plain,
    check_savable,
    distance,
    in_float32,
    table_of,
)
from .layout import POSITIONS
from .marian import FIXED_FIELDS, SAME_FIELDS
from .spm_file import plain

MAX_LENGTH = 512  # tokens of an output, for models whose limit grows with the source
TYPICAL_LENGTH = 20  # tokens, where the two formulas of the length penalty rank alike
EPSILON = 1e-5  # of LayerNorm in all of these classes
# norm_position and position_encoding -> the class, by its model_type; "pre" is with final norms, "post" without.
CLASSES = {
    ("post", "paper"): "marian",
    ("post", "marian"): "marian",
    ("post", "fairseq"): "fsmt",
    ("pre", "paper"): "pegasus",
    ("pre", "marian"): "pegasus",
    ("pre", "fairseq"): "m2m_100",
    ("pre", "tensor2tensor"): "blenderbot",
    ("pre", "learned"): "blenderbot",
}
WITH_TWO_VOCABULARIES = "marian"  # or with embeddings that aren't shared
WITH_TABLE = "blenderbot"  # a trainable table of positions


@torch.no_grad()
def write_stock(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    classes: Mapping[tuple[str, str], str] = CLASSES,
) -> list[str]:
    """Writes a model as one of transformers' own, with a tokenizer that transformers 5 and 4.57 open, for `export`."""
    check_plain(model)
    check_savable(model.generation_config)
    kind = _class_of(model.config, classes)
    ends_sources, tokenizer = getattr(tokenizer, "source_eos", True), plain(tokenizer)
    _check_tokenizer(tokenizer)
    stock = _converted(model, kind)
    name = type(stock).__name__
    stock.generation_config, notes = _generation_config(model)
    _write_tokenizer(tokenizer, folder, model.config.max_position_embeddings)
    stock.save_pretrained(folder)
    difference = _difference(model, AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32))
    config = model.config
    found = {
        f"it is a {name}: AutoModelForSeq2SeqLM and AutoTokenizer open it without this package; logits "
        f"differ by at most {difference:.0e} of the largest (of random tokens), as LayerNorm's epsilon is {EPSILON} in "
        f"place of {config.layer_norm_eps}": True,
        f"its weights are {model.dtype}, as the model's; logits are compared in float32": model.dtype != torch.float32,
        f"positions end at {config.max_position_embeddings:,}; batches have to be padded on the right": True,
        "transformers 5.24 trains its sinusoids and doesn't save them: before a training there, set `requires_grad` of "
        "the weights of both `embed_positions` to False": kind == "marian",
        "sinusoids are trainable there": kind == WITH_TABLE and config.position_encoding != "learned",
        "it needs transformers 5: 4.57 fails with FSMT, and with two vocabularies": (
            kind == "fsmt" or config.decoder_vocab_size not in (None, config.vocab_size)
        ),
        "label smoothing is the Trainer's there: label_smoothing_factor": config.label_smoothing > 0,
        "its tokenizer ends no text, as the model reads sources so: before a training there, append eos_token_id to "
        "labels": not ends_sources,
    }
    return [*(note for note, is_so in found.items() if is_so), *notes]


def _class_of(config: VanillaTransformerConfig, classes: Mapping[tuple[str, str], str]) -> str:
    """Returns the model_type of the class that computes the same; raises `ConversionError` if there is none."""
    kind = classes.get((config.norm_position, config.position_encoding))
    if kind is None or config.final_layer_norm != (config.norm_position == "pre"):
        norms = "with" if config.final_layer_norm else "without"
        raise ConversionError(
            f"no class of transformers has norm_position {config.norm_position!r} {norms} final norms and "
            f'position_encoding {config.position_encoding!r}; "post" without them goes with paper, marian or fairseq, '
            '"pre" with them with any'
        )
    usual = {config.d_model / heads for heads in (config.encoder_attention_heads, config.decoder_attention_heads)}
    problems = {
        "an odd d_model": config.d_model % 2 == 1,
        "head_dim or value_head_dim other than d_model / heads": (
            any(size is not None and {size} != usual for size in (config.head_dim, config.value_head_dim))
        ),
        "output_bias": config.output_bias and not FIXED_FIELDS[kind]["output_bias"],
        "two vocabularies": config.decoder_vocab_size is not None and kind != WITH_TWO_VOCABULARIES,
        "share_encoder_decoder_embeddings false": (
            not config.share_encoder_decoder_embeddings and kind != WITH_TWO_VOCABULARIES
        ),
        "a decoder that starts with padding, as its positions leave that out": (
            config.position_encoding == "fairseq" and config.decoder_start_token_id == config.pad_token_id
        ),
    }
    if found := [what for what, is_there in problems.items() if is_there]:
        raise ConversionError(f"{NAMES_OF_CLASSES[kind]} has no place for {', '.join(found)}")
    return kind


def _converted(model: VanillaTransformerForConditionalGeneration, kind: str) -> PreTrainedModel:
    config = model.config
    fields = {name: getattr(config, name) for name in SAME_FIELDS}
    fields["forced_eos_token_id"] = None
    fields |= {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}  # M2M100's defaults aren't 0
    target, shares = config.target_vocab_size, fields.pop("share_encoder_decoder_embeddings")
    if kind == "marian":
        fields |= {"share_encoder_decoder_embeddings": shares, "decoder_vocab_size": target}
    if kind == "fsmt":
        del fields["vocab_size"]
        fields |= {"src_vocab_size": config.vocab_size, "tgt_vocab_size": target, "langs": ["source", "target"]}
    stock: PreTrainedModel = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(kind, **fields))
    stock = stock.to(model.dtype).eval()
    stock.load_state_dict(_tensors(model, kind, stock.state_dict()))
    stock.tie_weights()
    return stock


def _tensors(
    model: VanillaTransformerForConditionalGeneration, kind: str, there: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the tensors of a stock model, whose own are `there`: ours by their names, zeros for missing biases."""
    config, own = model.config, model.state_dict()
    if config.position_encoding == "paper" and kind != WITH_TABLE:
        own = {name: _sines_first(name, value) for name, value in own.items()}
    own = {name.replace(".feed_forward.", "."): value for name, value in own.items()}
    own["model.shared.weight"] = own["model.encoder.embed_tokens.weight"]
    own["model.decoder.output_projection.weight"] = own["lm_head.weight"]
    if config.output_bias:
        own["final_logits_bias"] = own["lm_head.bias"][None]
    tensors = {}
    for name, value in there.items():
        if name.removeprefix("model.") in POSITIONS:
            stack = model.model.encoder if ".encoder." in name else model.model.decoder
            tensors[name] = table_of(stack, len(value)).to(value) if kind == WITH_TABLE else value
        elif name in own:
            tensors[name] = own[name]
        elif name.endswith("bias"):
            tensors[name] = torch.zeros_like(value)
        else:
            raise ConversionError(f"{NAMES_OF_CLASSES[kind]} has {name}, and the model doesn't")
    return tensors


def _sines_first(name: str, value: Tensor) -> Tensor:
    """A tensor with the model's width in the order of Marian's table: even dimensions, then odd ones."""
    last = name.split(".")[-2]
    if last in ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "fc1"):  # which read the width, or are as wide
        return torch.cat([value[:, ::2], value[:, 1::2]], dim=1) if value.dim() == 2 else value
    return torch.cat([value[::2], value[1::2]])  # what writes it: out_proj, fc2 and LayerNorms


def _generation_config(model: VanillaTransformerForConditionalGeneration) -> tuple[GenerationConfig, list[str]]:
    settings, plan = copy.deepcopy(model.generation_config), Plan.of({}, model.generation_config)
    notes = []
    for name in (*OPTIONS, *ENGINE_OPTIONS):
        if hasattr(settings, name):
            delattr(settings, name)
    if plan.coverage_penalty:
        notes.append(f"coverage_penalty {plan.coverage_penalty} is left out, as transformers has none")
    if isinstance(plan.length_penalty, GNMTLengthPenalty):
        alpha = float(plan.length_penalty)
        settings.length_penalty = round(alpha * TYPICAL_LENGTH / (TYPICAL_LENGTH + 5), 2)
        notes.append(
            f"length_penalty {settings.length_penalty} in place of gnmt_length_penalty {alpha}: another formula, which "
            f"ranks alike near {TYPICAL_LENGTH} tokens"
        )
    if plan.limit[0] not in ("max_new_tokens", "max_length"):
        settings.max_length = min(MAX_LENGTH, model.config.max_position_embeddings)
        notes.append(f"outputs end at {settings.max_length} tokens, however long the source is")
    return settings, notes


def _difference(model: VanillaTransformerForConditionalGeneration, stock: PreTrainedModel) -> float:
    copies, inputs = [in_float32(model)], _example(model.config)
    if model.dtype != torch.float32:  # some classes save sinusoids, which this type rounds
        copies.append(copy.deepcopy(model).cpu().float().eval())

    def nearest() -> float:
        # With a cache, FSMT has no causal mask.
        theirs, *ours = (one(**inputs, use_cache=False).logits for one in (stock.eval(), *copies))
        return min(distance(theirs, one) for one in ours)

    found, cause = nearest(), "; report this"
    for module in (module for one in copies for module in one.modules() if isinstance(module, nn.LayerNorm)):
        module.eps = EPSILON
    if nearest() <= LIMITS["stock"][0]:
        cause = f", as layer_norm_eps is {model.config.layer_norm_eps} and a {type(stock).__name__}'s {EPSILON}"
    return check_distance(found, "stock", cause)


def _example(config: VanillaTransformerConfig) -> dict[str, Tensor]:
    """Random tokens but padding, whose positions differ; the target begins as translations do."""
    generator = torch.Generator().manual_seed(0)
    length, padding = min(40, config.max_position_embeddings), config.pad_token_id
    inputs = {}
    for name, size in {"input_ids": config.vocab_size, "decoder_input_ids": config.target_vocab_size}.items():
        numbers = torch.randint(size - 1, (4, length), generator=generator)
        inputs[name] = numbers + (numbers >= (size if padding is None else padding))
    if config.decoder_start_token_id is not None:
        inputs["decoder_input_ids"][:, 0] = config.decoder_start_token_id
    inputs["attention_mask"] = (torch.arange(length) < torch.tensor([[length], [1], [length // 2], [3]])).long()
    return inputs


# ---- Tokenizer ----
def _check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a tokenizer that is more than a tokenizer.json and isn't Marian's."""
    is_file = isinstance(tokenizer, PreTrainedTokenizerFast) and not getattr(tokenizer, "separate_vocabs", False)
    if type(tokenizer) is not MarianTokenizer and not is_file:
        raise ConversionError(
            f"its tokenizer, {type(tokenizer).__name__}, is code of this package that plain transformers doesn't have; "
            "publish the checkpoint as it is"
        )


def _write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, longest: int) -> None:
    """Writes a tokenizer by the names that transformers 5 and 4.57 know."""
    if type(tokenizer) is MarianTokenizer:
        tokenizer.save_pretrained(folder)
        return
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # without padding and truncation of a last call
    backend.no_padding()
    backend.no_truncation()
    backend.save(str(folder / TOKENIZER))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)},
        "model_input_names": ["input_ids", "attention_mask"],
        "split_special_tokens": tokenizer.split_special_tokens,
        "clean_up_tokenization_spaces": False,
        "model_max_length": min(tokenizer.model_max_length, longest),
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / TOKENIZER_CONFIG).write_text(text, encoding="utf-8")
