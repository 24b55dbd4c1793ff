"""Any other encoder-decoder of `torch.nn.Module`s: its layout is a YAML file, the user's own or one of mappings/.

docs/mappings.md describes the file's entries.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from .interface import ConversionError, ConversionOptions, Converted, Settings
from .layout import POSITIONS, Layout, from_tensors, variants
from .mappings import FOLDER, shipped_mappings
from .pickles import parse_yaml, read, read_text, tensors_of

ENTRIES: dict[str, type | tuple[type, ...]] = {  # entry -> type
    "extends": str,
    "prefix": str,
    "names": dict,
    "config": dict,
    "ignored": list,
    "stacking": str,
    "attention_scale": (int, float),
    "layer_norm": str,
    "first_position": int,
}
# Entries that no tensor tells -> their values.
CHOICES = {
    "layer_norm": ("biased", "unbiased"),
    "stacking": ("blocks", "heads"),  # q1 q2 k1 k2 v1 v2, or q1 k1 v1 q2 k2 v2
}
BEGINNINGS = ("encoder.", "decoder.", "lm_head")  # of this model's names
# Fields of the configuration that are in no tensor, and without which a wrong model would be made silently.
NEEDED = (
    "encoder_attention_heads", "decoder_attention_heads", "norm_position", "layer_norm_eps", "activation_function",
    "scale_embedding", "pad_token_id", "eos_token_id", "decoder_start_token_id",
)  # fmt: skip
# What jadore801120/attention-is-all-you-need-pytorch has, whose last norms by name are the embeddings'.
NORM_OF_EMBEDDINGS = {"encoder.layer_norm.weight", "encoder.layer_stack.0.slf_attn.w_qs.weight"}
# Where frameworks put the state dict in what they save.
PLACES = ("state_dict", "model_state_dict", "model_state", "model")


def load(source: str | Path, options: ConversionOptions) -> Converted:
    """Reads a state dict by its mapping."""
    if options.mapping is None:
        known = ", ".join(shipped_mappings())
        raise ConversionError(f"give --mapping, a YAML file with the layout of {source} or one of {known}")
    layout, tensors = read_mapping(options.mapping), _tensors(Path(source))
    if tensors.keys() >= NORM_OF_EMBEDDINGS:
        raise ConversionError(
            f"{source} is a model of jadore801120/attention-is-all-you-need-pytorch: encoder.layer_norm and "
            "decoder.layer_norm come before its layers, behind the embeddings, and this model has none there"
        )
    model = from_tensors(tensors, layout)
    return Converted(model, notes=tuple(_norm_note(layout, model.config.layer_norm_eps)))


def _tensors(file: Path) -> dict[str, Tensor]:
    value = read(file)
    place = next((one for one in PLACES if isinstance(value, Mapping) and isinstance(value.get(one), Mapping)), None)
    return tensors_of(value if place is None else value[place], file)


def _norm_note(layout: Layout, eps: float) -> tuple[str, ...]:
    if not layout.unbiased_norm:
        return ()
    return (
        f"its LayerNorm adds epsilon to the standard deviation s, this one {eps:g} to the variance: an output differs "
        f"by the fraction {eps / 2:.1g} |1/s - 1/s^2|, that is 0 at s = 1 and {eps / 2 * 90:.1g} at s = 0.1",
    )


def read_mapping(source: str | Path) -> Layout:
    """Reads a mapping: a YAML file, or the name of one that comes with the package."""
    entries = _entries(source)
    names, config = entries["names"], {"bos_token_id": None, **entries.get("config", {})}
    texts = {ours: name for ours, name in names.items() if isinstance(name, str)}
    is_stacked = any(len(variants(ours)) > len(variants(name)) for ours, name in texts.items())  # several in one
    for name, values in CHOICES.items():
        if entries.get(name) not in values and (name != "stacking" or is_stacked):
            given = repr(entries[name]) if name in entries else "missing"
            raise ConversionError(
                f"{source}: {name} is {given}; give {' or '.join(values)}. docs/mappings.md explains them"
            )
    scale = entries.get("attention_scale")
    if scale is not None and not 0 < scale < math.inf:
        raise ConversionError(f"{source}: attention_scale is {scale!r}; give a positive number")
    if (first := entries.get("first_position", 0)) < 0:
        raise ConversionError(f"{source}: first_position is {first}; give 0 or more")
    needed = NEEDED if POSITIONS[0] in names else (*NEEDED, "position_encoding")
    if missing := [name for name in needed if name not in config]:
        extends = f" in a file of your own with `extends: {source}`" if str(source) in shipped_mappings() else ""
        raise ConversionError(f"{source}: config lacks {', '.join(missing)}, which no tensor tells: give it{extends}")
    return Layout(
        names=_prefixed(names, entries.get("prefix", "")),
        fields=config,
        ignored=tuple(entries.get("ignored", ())),
        stacking=entries.get("stacking", "blocks"),
        attention_scale=scale,
        unbiased_norm=entries["layer_norm"] == "unbiased",
        first_position=entries.get("first_position"),
    )


def _prefixed(names: Mapping[str, str | float], prefix: str) -> dict[str, str | float]:
    return {ours: prefix + theirs if isinstance(theirs, str) else theirs for ours, theirs in names.items()}


def _entries(source: str | Path) -> Settings:
    """Reads a mapping and those that it extends, whose entries it replaces; `names` and `config` one by one."""
    place = FOLDER / f"{source}.yaml" if str(source) in shipped_mappings() else Path(source)
    try:
        entries = parse_yaml(read_text(place), place)
    except ConversionError as error:
        known = ", ".join(shipped_mappings())
        raise ConversionError(f"the mapping {error}; give a YAML file, or one of {known}") from error
    if not isinstance(entries, dict):
        raise ConversionError(f"the mapping {source} has no entries")
    for name, value in entries.items():
        if name not in ENTRIES:
            raise ConversionError(f"{source}: unknown entry {name}; known are {', '.join(ENTRIES)}")
        if not isinstance(value, ENTRIES[name]) or isinstance(value, bool):
            hint = ": YAML takes numbers such as 1e-1 for text; write 1.0e-1" if name == "attention_scale" else ""
            raise ConversionError(f"{source}: {name} is {value!r}, a value of another type than expected{hint}")
    for name, value in entries.get("names", {}).items():
        _check_name(source, name, value)
    if "extends" in entries:
        if entries["extends"] not in shipped_mappings():
            known = ", ".join(shipped_mappings())
            raise ConversionError(f"{source}: there is no mapping {entries['extends']}; give one of {known}")
        entries = _merged(_entries(entries.pop("extends")), entries)
    return {"names": {}, **entries}


def _check_name(source: str | Path, ours: object, theirs: object) -> None:
    """Refuses an entry of `names` that is none, as no tensor would get a wrong one's value."""
    if not str(ours).startswith(BEGINNINGS):
        raise ConversionError(f"{source}: {ours} is no parameter; they begin with one of {', '.join(BEGINNINGS)}")
    is_constant = isinstance(theirs, int | float) and not isinstance(theirs, bool)
    if not isinstance(theirs, str) and not (is_constant and str(ours).endswith(("norm.weight", "norm.bias"))):
        raise ConversionError(
            f"{source}: the name of {ours} is {theirs!r}; give a text, or a number for the weight or bias of a "
            "LayerNorm that has none"
        )


def _merged(extended: Settings, own: Settings) -> Settings:
    """Puts a mapping's entries over those of the one that it extends; its prefix is of the latter's names alone."""
    prefix = own.get("prefix", "")
    replaced = {one for name in own.get("names", {}) for one in variants(name)}
    names = {ours: theirs for ours, theirs in extended["names"].items() if replaced.isdisjoint(variants(ours))}
    names = _prefixed(names, prefix)
    config = {**extended.get("config", {}), **own.get("config", {})}
    ignored = [*(prefix + one for one in extended.get("ignored", ())), *own.get("ignored", ())]
    rest = {name: value for name, value in own.items() if name != "prefix"}
    return {**extended, **rest, "config": config, "names": {**names, **own.get("names", {})}, "ignored": ignored}
