"""Any other encoder-decoder of `torch.nn.Module`s: its layout is a YAML file, the user's own or one of mappings/.

docs/interop.md describes the file's entries.
"""

import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from ..errors import first_line
from .base import ConversionError, Converted, Options
from .layout import POSITIONS, Layout, from_tensors
from .pickles import read, tensors_of

SHIPPED = resources.files("hf_vanilla_transformer.interop") / "mappings"
ENTRIES: dict[str, Any] = {  # entry -> type
    "extends": str,
    "prefix": str,
    "names": dict,
    "config": dict,
    "ignored": list,
    "causal_mask": bool,
    "head_split": str,
    "attention_scale": (int, float, str),
    "layer_norm": str,
    "first_position": int,
    "refused": str,
}
HEAD_SPLITS = {
    "transpose": None,  # (B, T, h, d_k) -> (B, h, T, d_k)
    "view": "its heads are cut by view(B, h, T, d_k) without a transpose, which mixes the positions: that isn't "
    "multi-head attention (3.2.2), and no weights of this model compute it",
}
LAYER_NORMS = ("biased", "unbiased")
STACKS = ("encoder.", "decoder.", "lm_head")  # what our names begin with
# Fields of our configuration that are in no tensor, and without which a wrong model would be made silently.
NEEDED = (
    "encoder_attention_heads", "decoder_attention_heads", "norm_position", "layer_norm_eps", "activation_function",
    "scale_embedding", "pad_token_id", "eos_token_id", "decoder_start_token_id",
)  # fmt: skip
# Where frameworks put the state dict in what they save.
PLACES = ("state_dict", "model_state_dict", "model_state", "model")


def recognises(source: Path) -> bool:
    """Tells that no model is recognised as one of a mapping: only its owner knows its layout."""
    return False


def load(source: str | Path, options: Options) -> Converted:
    """Reads a state dict by its mapping.

    Raises:
        ConversionError: The file can't be read, or its tensors aren't those of the mapping.
    """
    if options.mapping is None:
        known = ", ".join(shipped_mappings())
        raise ConversionError(f"give --mapping, a YAML file with the layout of {source} or one of {known}")
    layout = read_mapping(options.mapping, assume_causal=options.assume_causal)
    file = Path(source)
    value = read(file)
    place = next((one for one in PLACES if isinstance(value, Mapping) and isinstance(value.get(one), Mapping)), None)
    model = from_tensors(tensors_of(value if place is None else value[place], file), layout)
    return Converted(model, notes=tuple(_norm_note(layout, model.config.layer_norm_eps)))


def _norm_note(layout: Layout, eps: float) -> tuple[str, ...]:
    if not layout.unbiased_norm:
        return ()
    return (
        f"its LayerNorm adds epsilon to the standard deviation s, ours adds {eps:g} to the variance: an output differs "
        f"by the fraction {eps / 2:.1g} |1/s - 1/s^2|, that is 0 at s = 1 and {eps / 2 * 90:.1g} at s = 0.1",
    )


def shipped_mappings() -> list[str]:
    """Returns the names of the mappings that come with the package."""
    return sorted(one.name.removesuffix(".yaml") for one in SHIPPED.iterdir() if one.name.endswith(".yaml"))


def read_mapping(source: str | Path, *, assume_causal: bool = False) -> Layout:
    """Reads a mapping.

    Args:
        source: A YAML file, or the name of a mapping that comes with the package.
        assume_causal: Whether a model that may have been trained without a causal mask is taken for one
            that was.

    Raises:
        ConversionError: There is no such mapping, it has unknown entries or wrong values, or it says that the model
            isn't in this model.
    """
    entries = _entries(source)
    if reason := entries.get("refused"):
        raise ConversionError(f"{source} can't be converted: {reason}")
    if entries.get("causal_mask") is not True and not assume_causal:
        known = "was trained without a causal mask" if "causal_mask" in entries else "may have been trained without one"
        raise ConversionError(
            f"{source}: the decoder {known}, and ours never sees the future (3.2.3): write causal_mask: true if it was "
            "trained with one, or give --assume-causal"
        )
    split = entries.get("head_split")
    if split not in HEAD_SPLITS:
        raise ConversionError(f"{source}: head_split is {split!r}; give one of {', '.join(HEAD_SPLITS)}")
    if reason := HEAD_SPLITS[split]:
        raise ConversionError(f"{source} can't be converted: {reason}")
    norm = entries.get("layer_norm")
    if norm not in LAYER_NORMS:
        raise ConversionError(f"{source}: layer_norm is {norm!r}; give one of {', '.join(LAYER_NORMS)}")
    prefix, config = entries.get("prefix", ""), {"bos_token_id": None, **entries.get("config", {})}
    if unknown := [ours for ours in entries["names"] if not ours.startswith(STACKS)]:
        raise ConversionError(f"{source}: {unknown[0]} is no parameter; they begin with one of {', '.join(STACKS)}")
    first_position = entries.get("first_position", 0)
    if first_position < 0:
        raise ConversionError(f"{source}: first_position is {first_position}; give the number of a row, from 0 up")
    needed = NEEDED if POSITIONS[0] in entries["names"] else (*NEEDED, "position_encoding")
    if missing := [name for name in needed if name not in config]:
        raise ConversionError(f"{source}: config lacks {', '.join(missing)}, which no tensor tells")
    return Layout(
        names={ours: prefix + theirs for ours, theirs in entries["names"].items()},
        fields=config,
        ignored=tuple(entries.get("ignored", ())),
        attention_scale=_scale(entries.get("attention_scale"), config, source),
        unbiased_norm=norm == "unbiased",
        first_position=first_position,
    )


def read_names(source: str | Path) -> dict[str, str]:
    """Reads a mapping's names alone: ours -> theirs.

    Raises:
        ConversionError: There is no such mapping, or it has unknown entries or wrong values.
    """
    entries = _entries(source)
    return {ours: entries.get("prefix", "") + theirs for ours, theirs in entries["names"].items()}


def _entries(source: str | Path) -> dict[str, Any]:
    """Reads a mapping and those that it extends, whose entries it replaces; `names` and `config` one by one."""
    place = SHIPPED / f"{source}.yaml" if str(source) in shipped_mappings() else Path(source)
    try:
        entries = yaml.safe_load(place.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConversionError(
            f"the mapping {source} can't be read ({first_line(error)}); give a YAML file, or one of "
            f"{', '.join(shipped_mappings())}"
        ) from error
    if not isinstance(entries, dict):
        raise ConversionError(f"the mapping {source} has no entries")
    for name, value in entries.items():
        if name not in ENTRIES:
            raise ConversionError(f"{source}: unknown entry {name}; known are {', '.join(ENTRIES)}")
        if not isinstance(value, ENTRIES[name]) or (isinstance(value, bool) and ENTRIES[name] is not bool):
            raise ConversionError(f"{source}: {name} is {value!r}, which is of another type than expected")
    for name, value in {**entries.get("names", {}), "": entries.get("prefix", "")}.items():
        if not isinstance(value, str):
            raise ConversionError(f"{source}: the name of {name} is {value!r}; give a text")
    if "extends" in entries:
        if entries["extends"] not in shipped_mappings():
            known = ", ".join(shipped_mappings())
            raise ConversionError(f"{source}: there is no mapping {entries['extends']}; give one of {known}")
        entries = _merged(_entries(entries.pop("extends")), entries)
    return {"names": {}, **entries}


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Puts a mapping's entries over those of the one that it extends; its prefix is of the latter's names alone."""
    prefix = own.get("prefix", "")
    names = {ours: prefix + theirs for ours, theirs in base["names"].items()}
    both = {name: {**base.get(name, {}), **own.get(name, {})} for name in ("config",)}
    ignored = [*(prefix + one for one in base.get("ignored", ())), *own.get("ignored", ())]
    rest = {name: value for name, value in own.items() if name != "prefix"}
    return {**base, **rest, **both, "names": {**names, **own.get("names", {})}, "ignored": ignored}


def _scale(value: Any, config: Mapping[str, Any], source: str | Path) -> float | None:
    """Returns what scores are multiplied by; None: 1 / sqrt(d_k)."""
    if value is None:
        return None
    if not isinstance(value, str):
        if not 0 < value < math.inf:
            raise ConversionError(f"{source}: attention_scale is {value}; give a positive number")
        return float(value)
    widths = {"1/sqrt(d_model)": "d_model", "1/sqrt(head_dim)": None}
    if value not in widths:
        raise ConversionError(f"{source}: attention_scale is {value!r}; give a number or one of {', '.join(widths)}")
    if widths[value] is None:
        return None
    if not isinstance(config.get("d_model"), int):
        raise ConversionError(f"{source}: attention_scale 1/sqrt(d_model) needs d_model in config")
    return float(config["d_model"]) ** -0.5
