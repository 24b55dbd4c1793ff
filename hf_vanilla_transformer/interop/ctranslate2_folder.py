"""Models in CTranslate2's format, from any of its converters: OPUS-MT and NLLB, Argos packages, OpenNMT, quickmt.

A decoder that starts from a vector of zeros, Marian's, gets <pad> for it, as in `marian_npz`. Numbers of 8 and 16 bits
become what they stand for.
"""

import json
import math
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    M2M100Tokenizer,
    MarianTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ..checkpoints.kinds import TOKENIZER, TOKENIZER_CONFIG, Kind, kind_of
from ..checkpoints.loading import load_tokenizer, without_advice
from ..errors import CheckpointError
from ..modeling_vanilla_transformer import sinusoidal_table
from .ctranslate2_files import CODES, EMBEDDINGS, Folder, unpacked
from .interface import ConversionError, ConversionOptions, Converted, check_alike
from .layout import POSITIONS, SOURCE, STACKS, TARGET, Layout, from_tensors
from .marian_npz import PAD, add_pad, with_pad
from .segmentation import TOKENIZED_TEXT, tokenizer_of

# The numbers of CTranslate2's activations.
ACTIVATIONS = ("relu", "gelu_new", "silu", "gelu", "quick_gelu", "tanh", "sigmoid")
# Names as they are here, with dots and without gamma and beta; an encoder has no `attention`.
LAYERS = {
    "self_attn.{q,k,v}_proj": "self_attention.linear_0",
    "self_attn.out_proj": "self_attention.linear_1",
    "self_attn_layer_norm": "self_attention.layer_norm",
    "encoder_attn.q_proj": "attention.linear_0",
    "encoder_attn.{k,v}_proj": "attention.linear_1",
    "encoder_attn.out_proj": "attention.linear_2",
    "encoder_attn_layer_norm": "attention.layer_norm",
    "feed_forward.fc1": "ffn.linear_0",
    "feed_forward.fc2": "ffn.linear_1",
    "final_layer_norm": "ffn.layer_norm",
}
MATRICES = (*(name.replace("/", ".") for name in EMBEDDINGS), "decoder.projection.weight")
NAMES: dict[str, str | float] = {
    **dict(zip((SOURCE, TARGET), MATRICES, strict=False)),
    **{f"{stack}.layers.*.{ours}": f"{stack}.layer_*.{theirs}" for stack in STACKS for ours, theirs in LAYERS.items()},
    **{f"{stack}.layer_norm": f"{stack}.layer_norm" for stack in STACKS},
    **{table: f"{stack}.position_encodings.encodings" for stack, table in zip(STACKS, POSITIONS, strict=True)},
    "lm_head": "decoder.projection",
}
BIAS = "decoder.projection.bias"
# Numbers that are read here, or mean nothing to this model; any other is refused unless it is 0.
KNOWN = {"num_heads", "pre_norm", "activation", "scale_embeddings", "multiply_by_sqrt_depth", "head_dim"}
KNOWN |= {"weight_scale", "start_from_zero_embedding", "embeddings_merge", "alignment_layer", "alignment_heads"}
KNOWN |= {"with_source_bos", "with_source_eos", "with_target_bos", "user_decoder_start_tokens"}
# How far a number may be from what it was.
ROUNDING = {"int8": "1/254 of the largest in its row", "int16": "1/2048 of the largest in its matrix"}
COMPUTED = 1_024  # rows of a table of positions that the file leaves to be computed


def recognises(source: Path) -> bool:
    """Tells whether a folder is in CTranslate2's format, or a file an Argos package."""
    return kind_of(source) is Kind.CTRANSLATE2


def load(source: str | Path, options: ConversionOptions) -> Converted:
    """Reads a model."""
    try:
        with unpacked(Path(source)) as place:
            return _load(Folder.read(place), options)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error


def _load(folder: Folder, options: ConversionOptions) -> Converted:
    source, target = folder.vocabularies
    if folder.settings["add_source_bos"]:
        raise ConversionError("add_source_bos is true in its config.json, and no tokenizer here begins sources so")
    tensors = _tensors(folder)
    if folder.starts_from_zeros:
        pad = add_pad(tensors, MATRICES, BIAS)
    elif shared := [n for n, one in enumerate(target) if one in ("<pad>", "<blank>") and source[n : n + 1] == [one]]:
        pad = shared[0]
    else:
        raise ConversionError("its vocabularies have no <pad> or <blank> of one id, and batches need padding")
    model = from_tensors(tensors, _layout(folder, tensors, pad))
    notes = tuple(
        f"its weights were stored as {kind}: each is off by up to {what}, and that can't be brought back"
        for kind, what in ROUNDING.items()
        if any(one.dtype == kind and one.shape for one in folder.variables.values())
    )
    settings = {"gnmt_length_penalty": None, **folder.decoding, **model.config.decoding_tokens}
    model.generation_config = GenerationConfig.from_dict(settings)
    tokenizer: PreTrainedTokenizerBase | None = None
    if options.with_tokenizer:
        files = folder.tokenizer_files()
        is_theirs = folder.is_of_transformers(files[0])
        tokenizer = of_transformers(folder, files[0]) if is_theirs else _of_vocabularies(folder, files, pad)
        notes += (TOKENIZED_TEXT,) * (files[0].name in CODES)
    return Converted(model, tokenizer, {"language": [*folder.pair]} if folder.pair else {}, notes=notes)


# ---- Tensors ----
def _tensors(folder: Folder) -> dict[str, Tensor]:
    """Reads what has dimensions; a variable with two names is one tensor."""
    _check(folder)
    content = torch.from_file(str(folder.weights), size=folder.weights.stat().st_size, dtype=torch.uint8)

    def stored(name: str) -> Tensor:
        one = folder.variables[name]
        dtype = getattr(torch, one.dtype)
        size = math.prod(one.shape) * dtype.itemsize
        return content[one.offset : one.offset + size].clone().view(dtype).reshape(one.shape)

    made: dict[int, Tensor] = {}
    for name, one in folder.variables.items():
        if one.value is None and not name.endswith("_scale") and one.offset not in made:
            value = stored(name)
            if one.dtype in ROUNDING:
                if f"{name}_scale" not in folder.variables:
                    raise ConversionError(f"{folder.weights} is damaged: there is no {name}_scale")
                scale = stored(f"{name}_scale").float()
                value = value.float() / scale.reshape(-1, *[1] * (value.ndim - 1))
            made[one.offset] = value
    named = {name.replace("/", "."): made[one.offset] for name, one in folder.variables.items() if one.offset in made}
    return {re.sub("gamma$", "weight", re.sub("beta$", "bias", name)): value for name, value in named.items()}


def _check(folder: Folder) -> None:
    """Refuses what this model doesn't have, beside tensors that `from_tensors` doesn't know."""
    for name, one in folder.variables.items():
        if one.value and name.rpartition("/")[2] not in KNOWN:
            raise ConversionError(f"the model can't be converted: {name} is {one.value:g}, not 0")
        if name.endswith("/gamma") and name.replace("gamma", "beta") not in folder.variables:
            raise ConversionError(f"the model can't be converted: it has RMSNorm ({name})")


def _layout(folder: Folder, tensors: dict[str, Tensor], pad: int) -> Layout:
    """Returns the layout; positions that aren't in the file are computed."""
    settings, ids = folder.settings, {token: number for number, token in enumerate(folder.vocabularies[1])}
    width = tensors[MATRICES[1]].shape[1]
    tables = [str(NAMES[name]) for name in POSITIONS]
    for name in tables:  # CTranslate2 counts them from 1
        tensors.setdefault(name, sinusoidal_table(COMPUTED, width, "tensor2tensor", 1))
    tokens: dict[str, Any] = {f"{name}_token_id": settings.get(f"{name}_token") for name in ("eos", "decoder_start")}
    if folder.starts_from_zeros:
        ids[PAD], tokens["decoder_start_token_id"] = pad, PAD
    if absent := [name for name, token in tokens.items() if token not in ids]:
        raise ConversionError(
            f"{absent[0].removesuffix('_id')} of its config.json is {tokens[absent[0]]!r}, no token of its target"
        )
    encoder, decoder = (_fields(folder, stack, width) for stack in STACKS)
    check_alike(encoder, decoder, [*encoder])
    fields = {
        **encoder,
        **{f"{stack}_attention_heads": int(folder.value(f"{stack}/num_heads", 8)) for stack in STACKS},
        "layer_norm_eps": settings.get("layer_norm_epsilon") or 1e-5,
        "max_position_embeddings": len(tensors[tables[1]]),
        "pad_token_id": pad,
        "bos_token_id": ids.get(settings["bos_token"]),
        **{name: ids[token] for name, token in tokens.items()},
    }
    return Layout(NAMES, fields, first_position=0)


def _fields(folder: Folder, stack: str, width: int) -> dict[str, Any]:
    """Returns what is of one stack there, and here of both; embeddings are scaled by a flag or by the factor itself."""
    scale = folder.variables.get(f"{stack}/scale_embeddings")
    factor = folder.value(f"{stack}/scale_embeddings", folder.value(f"{stack}/embeddings/multiply_by_sqrt_depth", 1))
    if scale is None or scale.dtype == "int8":
        factor = math.sqrt(width) if factor else 1
    if not any(math.isclose(factor, one, rel_tol=1e-3) for one in (1, math.sqrt(width))):
        raise ConversionError(f"the model can't be converted: its embeddings are multiplied by {factor}")
    return {
        "norm_position": "pre" if folder.value(f"{stack}/pre_norm", 1) else "post",
        "activation_function": ACTIVATIONS[int(folder.value(f"{stack}/activation", 0))],
        "scale_embedding": not math.isclose(factor, 1),
    }


# ---- Tokenizer ----
def of_transformers(folder: Folder, file: Path) -> PreTrainedTokenizerBase:
    """Opens a tokenizer.json, or M2M100's SentencePiece model."""
    settings, tokens = folder.settings, folder.vocabularies[1]
    if file.name == TOKENIZER:
        if file.with_name(TOKENIZER_CONFIG).is_file():
            return load_tokenizer(file.parent)
        special = {f"{name}_token": settings[f"{name}_token"] for name in ("bos", "eos", "unk")}
        return PreTrainedTokenizerFast(tokenizer_file=str(file), **special)
    if not folder.languages[0].startswith("__"):  # transformers would read languages as <unk>
        raise CheckpointError(
            f"{file} isn't enough for NLLB: add the original model's {TOKENIZER}; or --tokenizer NAME"
        )
    with tempfile.TemporaryDirectory() as place:
        (vocabulary,) = _written(Path(place), [tokens[: tokens.index(folder.languages[0])]])
        return M2M100Tokenizer(vocabulary, str(file), additional_special_tokens=folder.languages)


def _of_vocabularies(folder: Folder, files: tuple[Path, Path], pad: int) -> PreTrainedTokenizerBase:
    """Makes the tokenizer of SentencePiece models or codes: Marian's, whose sources end, or a dictionary's."""
    source, target = (with_pad(own, pad) if folder.starts_from_zeros else own for own in folder.vocabularies)
    special = {f"{one}_token": folder.settings[f"{one}_token"] for one in ("eos", "unk")} | {"pad_token": target[pad]}
    special |= {"bos_token": folder.prefix} if folder.prefix else {}
    with tempfile.TemporaryDirectory() as place:
        if folder.source_ends and files[0].name not in CODES:
            names = _written(Path(place), [source] if source == target else [source, target])
            others: dict[str, Any] = {"separate_vocabs": True, "target_vocab_file": names[1]} if names[1:] else {}
            with without_advice():
                return MarianTokenizer(*map(str, files), names[0], **special, **others)
        if files[0].name in CODES:  # a name that SentencePiece's models have, too
            files = (Path(shutil.copyfile(files[0], Path(place, "bpe.codes"))),) * 2
        own = (files[0].name, files[1].name)
        return tokenizer_of(files[0].parent, (source, target), special, files=own, source_eos=folder.source_ends)


def _written(place: Path, vocabularies: list[list[str]]) -> list[str]:
    """Writes vocabularies as transformers' tokenizers read them, and returns the files."""
    files = [place / name for name in ("vocab.json", "target_vocab.json")[: len(vocabularies)]]
    for file, tokens in zip(files, vocabularies, strict=True):
        file.write_text(json.dumps({token: number for number, token in enumerate(tokens)}), encoding="utf-8")
    return [*map(str, files)]
