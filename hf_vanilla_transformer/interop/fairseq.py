"""fairseq's `transformer` and its architectures (base, big, iwslt_de_en ...): post- or pre-norm, sinusoids or a table.

SOURCE is a checkpoint, or a folder with checkpoint_best.pt, checkpoint_last.pt or one .pt file; dict.*.txt beside it
are the vocabularies. The sinusoids of fairseq begin after the padding's index, and its decoder starts from `</s>`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .base import ConversionError, Converted, Options
from .layout import POSITIONS, SOURCE, TARGET, Layout, from_tensors
from .pickles import fields_of, read, tensors_of

CHECKPOINTS = ("checkpoint_best.pt", "checkpoint_last.pt")
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # what every dictionary begins with, before the lines of its file
PAD, END = 1, 2
FIXED_FIELDS: dict[str, Any] = {
    "layer_norm_eps": 1e-5,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": END,
    "decoder_start_token_id": END,
}
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_accurate": "gelu_new", "swish": "silu", "tanh": "tanh"}
# Settings that change what is computed into something that ours doesn't have, if they are anything but off.
REFUSED = {
    "adaptive_input": "factored embeddings",
    "adaptive_softmax_cutoff": "an adaptive softmax",
    "cross_self_attention": "attention to source and target at once",
    "decoder_layerdrop": "layer drop",
    "encoder_layerdrop": "layer drop",
    "layernorm_embedding": "a LayerNorm on embeddings",
    "no_cross_attention": "a decoder that doesn't see the source",
    "no_decoder_final_norm": "a pre-norm decoder without a last LayerNorm",
    "no_token_positional_embeddings": "no positions",
    "quant_noise_pq": "quantization noise",
    "quant_noise_scalar": "quantization noise",
    "tie_adaptive_weights": "an adaptive softmax",
}
SUBLAYERS = {
    "encoder": {"self_attn_layer_norm": "self_attn_layer_norm", "final_layer_norm": "final_layer_norm"},
    "decoder": {
        "self_attn_layer_norm": "self_attn_layer_norm",
        "encoder_attn_layer_norm": "encoder_attn_layer_norm",
        "final_layer_norm": "final_layer_norm",
    },
}
OVERWRITE = " #fairseq:overwrite"  # behind a token that takes the place of an earlier one of the same name
IGNORED = ("*.version", "*._float_tensor", "*.embed_positions.weights")


def recognises(source: Path) -> bool:
    """Tells by names whether a folder has a checkpoint of fairseq, and by its entries whether a file is one."""
    if source.is_dir():
        return any((source / name).is_file() for name in CHECKPOINTS) or any(source.glob("dict.*.txt"))
    if source.suffix != ".pt":
        return False
    try:
        return _is_checkpoint(read(source))
    except ConversionError:
        return False


def load(source: str | Path, options: Options) -> Converted:
    """Opens a model.

    Raises:
        ConversionError: A file is missing or damaged, tensors are missing, unknown or of another shape, or a setting
            makes another model than ours.
    """
    file = _checkpoint(Path(source))
    value = read(file)
    if not _is_checkpoint(value):
        raise ConversionError(f"{file} is no checkpoint of fairseq, which has `model` and `args` or `cfg`")
    settings = settings_of(value)
    tensors = tensors_of(value["model"], file)
    model = from_tensors(tensors, layout_of(settings, tensors))
    dictionaries = _dictionaries(file.parent, settings)
    notes = []
    for side, words, size in zip(
        ("source", "target"), dictionaries, (model.config.vocab_size, model.config.target_vocab_size), strict=True
    ):
        if words is not None and len(words) != size:
            raise ConversionError(f"the {side} dictionary has {len(words):,} entries and the embeddings {size:,} rows")
    if options.with_tokenizer:
        notes.append("there is no tokenizer in it: save yours beside the model")
    return Converted(model, notes=tuple(notes))


def _checkpoint(source: Path) -> Path:
    if source.is_file():
        return source
    found = [source / name for name in CHECKPOINTS if (source / name).is_file()] or sorted(source.glob("*.pt"))
    if not found or (found[0].name not in CHECKPOINTS and len(found) > 1):
        raise ConversionError(f"{source} has none of {', '.join(CHECKPOINTS)}; give the checkpoint itself")
    return found[0]


def _is_checkpoint(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("model"), Mapping) and bool({"args", "cfg"} & set(value))


# ---- Settings ----
def settings_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the model's settings under the names of the command line, from `args` or, since 0.10, from `cfg`."""
    config = checkpoint.get("cfg")
    model = fields_of(config.get("model")) if isinstance(config, Mapping) else {}
    task = fields_of(config.get("task")) if isinstance(config, Mapping) else {}
    settings = {**fields_of(checkpoint.get("args")), **task}
    for name, value in model.items():  # its newest form has one table for each stack
        nested = fields_of(value) if name in ("encoder", "decoder", "quant_noise") else None
        settings |= {name: value} if nested is None else {f"{name}_{key}": one for key, one in nested.items()}
    return settings


def layout_of(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Layout:
    """Returns the layout of a checkpoint.

    Raises:
        ConversionError: A setting makes another model than ours.
    """
    if reasons := [f"{name} ({what})" for name, what in REFUSED.items() if settings.get(name)]:
        raise ConversionError(f"it has what ours doesn't: {', '.join(reasons)}")
    activation = settings.get("activation_fn") or "relu"
    if activation not in ACTIVATIONS:
        raise ConversionError(f"activation_fn is {activation!r}; ours can be {', '.join(ACTIVATIONS)}")
    is_learned, is_pre = (
        _of_both(settings, "encoder_learned_pos", "decoder_learned_pos"),
        _of_both(settings, "encoder_normalize_before", "decoder_normalize_before"),
    )
    fields = {
        **FIXED_FIELDS,
        **{f"{stack}_attention_heads": _heads(settings, stack) for stack in SUBLAYERS},
        "norm_position": "pre" if is_pre else "post",
        "activation_function": ACTIVATIONS[activation],
        "scale_embedding": not settings.get("no_scale_embedding"),
        "position_encoding": "learned" if is_learned else "fairseq",
    }
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        if isinstance(settings.get(name), (int, float)):
            fields[name] = settings[name]
    return Layout(_names(tensors, is_learned), fields, IGNORED, first_position=PAD + 1 if is_learned else 0)


def _of_both(settings: Mapping[str, Any], one: str, other: str) -> bool:
    if bool(settings.get(one)) != bool(settings.get(other)):
        raise ConversionError(f"{one} is {settings.get(one)} and {other} {settings.get(other)}; ours has one for both")
    return bool(settings.get(one))


def _heads(settings: Mapping[str, Any], stack: str) -> int:
    heads = settings.get(f"{stack}_attention_heads")
    if not isinstance(heads, int):
        raise ConversionError(f"its settings have no {stack}_attention_heads")
    return heads


def _names(tensors: Mapping[str, Tensor], is_learned: bool) -> dict[str, str]:
    """Returns our names -> fairseq's, of its present versions or of those with older names."""
    names = {
        SOURCE: SOURCE,
        TARGET: TARGET,
        "encoder.layer_norm": "encoder.layer_norm",
        "decoder.layer_norm": "decoder.layer_norm",
        "lm_head.weight": "decoder.embed_out" if "decoder.embed_out" in tensors else "decoder.output_projection.weight",
    }
    if is_learned:
        names |= {name: name for name in POSITIONS}
    is_stacked = "encoder.layers.0.self_attn.in_proj_weight" in tensors  # until 0.8
    is_numbered = "encoder.layers.0.layer_norms.0.weight" in tensors  # until 0.6
    for stack, norms in SUBLAYERS.items():
        layer = f"{stack}.layers.*."
        for attention in ("self_attn", "encoder_attn")[: len(norms) - 1]:
            own = f"{layer}{attention}."
            if is_stacked:
                names |= {f"{own}{{q,k,v}}_proj.{kind}": f"{own}in_proj_{kind}" for kind in ("weight", "bias")}
            else:
                names |= {f"{own}{part}_proj": f"{own}{part}_proj" for part in "qkv"}
            names[f"{own}out_proj"] = f"{own}out_proj"
        names |= {f"{layer}feed_forward.{part}": f"{layer}{part}" for part in ("fc1", "fc2")}
        for number, norm in enumerate(norms):
            names[layer + norm] = f"{layer}layer_norms.{number}" if is_numbered else layer + norm
    return names


# ---- Dictionaries ----
def _dictionaries(folder: Path, settings: Mapping[str, Any]) -> tuple[list[str] | None, list[str] | None]:
    """Returns the tokens of source and target in the order of their ids; None: there is no file."""
    found = []
    for side in ("source", "target"):
        language = settings.get(f"{side}_lang")
        file = folder / f"dict.{language}.txt"
        found.append(dictionary(file) if language and file.is_file() else None)
    return found[0], found[1]


def dictionary(file: Path) -> list[str]:
    """Reads a dict.*.txt: a token and its count per line, after the special tokens.

    Raises:
        ConversionError: A line isn't one of a dictionary, or a token occurs twice.
    """
    tokens = list(SPECIAL)
    known = set(tokens)
    for number, line in enumerate(file.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
        entry = line.removesuffix(OVERWRITE)
        token, _, count = entry.rpartition(" ")
        if not count.lstrip("-").isdigit():
            raise ConversionError(f"{file}, line {number}: {line!r} isn't a token and its count")
        if token in known and entry == line:
            raise ConversionError(f"{file}, line {number}: the token {token!r} has been there before")
        known.add(token)
        tokens.append(token)
    return tokens
