"""Tables of names, by which the tensors of another system become ours, and ours become theirs.

A table has the names of our parameters, without "model.", and those of the other system:

    "encoder.layers.*.self_attn.q_proj": "encoder.layers.*.self_attn.q_proj"  # weight and bias
    "encoder.layers.*.self_attn.{q,k,v}_proj.weight": "layers.*.in_proj_weight"  # three, stacked in one of theirs
    "encoder.layers.*.self_attn.q_proj.weight": "layers.*.heads.{0,1}.query.weight"  # one, stacked of two of theirs

`*` is the number of a layer. A name that ends in neither ".weight" nor ".bias" is that of a module with both.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import reduce
from itertools import product
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import GenerationConfig

from ..checkpoints.loading import named
from ..configuration_vanilla_transformer import POSITION_ENCODINGS, VanillaTransformerConfig
from ..errors import first_line
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, sinusoidal_table
from .base import ConversionError

NAMES_PER_ERROR = 20
SOURCE, TARGET, OUTPUT = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"
POSITIONS = ("encoder.embed_positions.weight", "decoder.embed_positions.weight")
KINDS = ("weight", "bias")
# Sinusoids that were computed in 32 bits are wrong by up to this much per position.
ROUNDING = 2.0**-22


@dataclasses.dataclass(frozen=True)
class Layout:
    """How another system lays out the model.

    Attributes:
        names: Our names -> theirs; see above.
        fields: Fields of our configuration that the tensors don't tell.
        ignored: Names, with `*` for anything, of tensors that carry nothing.
        attention_scale: What scores are multiplied by; None: 1 / sqrt(d_k).
        unbiased_norm: Whether LayerNorm is gain (x - mean) / (std + eps) + bias, with the standard deviation's
            unbiased estimate.
        first_position: The row of a positional table that belongs to the first token.
        required: Our names, with `*` for anything, of biases that are missing, and not zero, without a tensor.
    """

    names: Mapping[str, str]
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    attention_scale: float | None = None
    unbiased_norm: bool = False
    first_position: int = 0
    required: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Rule:
    """This model's parameters that are, stacked along the first dimension, those of theirs, stacked likewise."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]


# ---- In ----
def from_tensors(
    tensors: Mapping[str, Tensor], layout: Layout, generation_config: GenerationConfig | None = None
) -> VanillaTransformerForConditionalGeneration:
    """Makes a model of another system's tensors.

    Args:
        tensors: Their names -> values.
        layout: The system's layout.
        generation_config: Settings of decoding; None: the model's own, with the paper's.

    Returns:
        The model, in evaluation mode and in the widest type of its weights.

    Raises:
        ConversionError: Tensors are missing, unknown, of another shape, no floating-point numbers or not finite, or
            the layout's fields make no model with them.
    """
    tensors = {name: value for name, value in tensors.items() if not _is_ignored(name, layout)}
    layers = count_layers(layout, tensors)
    rules = list(rules_of(layout, layers))
    _refuse({"unknown": tensors.keys() - {name for rule in rules for name in rule.theirs}})
    _refuse(
        {
            "not of floating-point numbers": [n for n, value in tensors.items() if not value.is_floating_point()],
            "sparse, without values or of 8 bits": [n for n, value in tensors.items() if not _is_plain(value)],
            "of another shape, without a dimension": [n for n, value in tensors.items() if value.ndim == 0],
        }
    )
    _refuse({"not finite": [n for n, value in tensors.items() if not value.isfinite().all()]})
    known = {name: rule for rule in rules if not tensors.keys().isdisjoint(rule.theirs) for name in rule.ours}
    for stack, number in layers.items():
        first = f"{stack}.layers.0.feed_forward.fc1.weight"
        if not number or first not in known:
            place = next((theirs for ours, theirs in layout.names.items() if ours.startswith(f"{stack}.layers.")), "?")
            raise ConversionError(f"the {stack} has no layers: no tensor is called {place}")
    # What one layer has, all layers of its stack have.
    families = {_family(name) for name in known}
    expected = (rule for rule in rules if families & {_family(name) for name in rule.ours})
    _refuse({"missing": [n for rule in expected for n in rule.theirs if n not in tensors]})
    config = _config(tensors, known, layers, layout)
    weights = _weights(tensors, known, rules, config, layout)
    used = [
        tensors[one] for name, rule in known.items() if {name, f"model.{name}"} & weights.keys() for one in rule.theirs
    ]
    dtype = reduce(torch.promote_types, (value.dtype for value in used))
    model = VanillaTransformerForConditionalGeneration.from_pretrained(
        None, config=config, state_dict={name: value.to(dtype) for name, value in weights.items()}, dtype=dtype
    )
    if generation_config is not None:
        model.generation_config = generation_config
    return model.eval()


def _is_ignored(name: str, layout: Layout) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in layout.ignored)


def _is_plain(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_meta and (value.itemsize > 1 or not value.is_floating_point())


def _is_required(name: str, layout: Layout) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in layout.required)


def _family(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _refuse(problems: Mapping[str, Iterable[str]]) -> None:
    found = ((problem, set(names)) for problem, names in problems.items())
    if reasons := [f"{problem}: {named(names, NAMES_PER_ERROR)}" for problem, names in found if names]:
        raise ConversionError(f"the weights can't be converted; {'; '.join(reasons)}")


def _config(
    tensors: Mapping[str, Tensor], known: Mapping[str, Rule], layers: Mapping[str, int], layout: Layout
) -> VanillaTransformerConfig:
    """Makes the configuration of what the tensors tell and of the layout's fields, which come first."""

    def rows(name: str) -> int:
        if name not in known:
            _refuse({"missing": next((rule.theirs for rule in rules_of(layout, layers) if name in rule.ours), (name,))})
        return sum(len(tensors[one]) for one in known[name].theirs) // len(known[name].ours)

    _check_types(layout.fields)
    found = _sizes(tensors, known, layers, rows)
    _check_fields(layout.fields, found)
    fields = {**found, **layout.fields}
    if layout.unbiased_norm:  # (s + eps) is closest to sqrt(s^2 + 2 eps) where s is 1
        fields["layer_norm_eps"] *= 2 * math.sqrt((fields["d_model"] - 1) / fields["d_model"])
    fields |= _head_dims(fields, rows)
    if not known.keys().isdisjoint(POSITIONS):
        tables = [_table(tensors, known[name], fields["d_model"], layout) for name in POSITIONS if name in known]
        fields |= _positions(tables, fields)
    if unknown := fields.keys() - {one.name for one in dataclasses.fields(VanillaTransformerConfig)}:
        raise ConversionError(f"our configuration has no field {', '.join(sorted(unknown))}; check the spelling")
    try:
        config = VanillaTransformerConfig(**fields)
    except (StrictDataclassError, TypeError) as error:
        raise ConversionError(f"the fields make no valid model ({first_line(error.__cause__ or error)})") from error
    _check_tokens(config)
    return config


def _check_types(fields: Mapping[str, Any]) -> None:
    """Refuses fields that are no numbers, before anything is computed with them."""
    for stack in ("encoder", "decoder"):
        if fields.get(f"{stack}_attention_heads") is None:
            raise ConversionError(f"the number of heads is in no tensor: give {stack}_attention_heads")
    for name, value in fields.items():
        wanted = VanillaTransformerConfig.__annotations__.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if wanted in (int, float, int | None, float | int) and not (is_number or value is None):
            hint = ": YAML takes numbers such as 1e-6 for text; write 1.0e-6" if isinstance(value, str) else ""
            raise ConversionError(f"{name} is {value!r}, which is no number{hint}")


def _check_tokens(config: VanillaTransformerConfig) -> None:
    """Refuses tokens that the target's vocabulary doesn't have: a decoder couldn't start, or would never end."""
    rows = config.target_vocab_size
    for name in ("pad_token_id", "decoder_start_token_id", "eos_token_id"):
        value = getattr(config, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not 0 <= number < rows:
                raise ConversionError(f"{name} is {number}, and the target vocabulary has {rows:,} tokens, from 0 up")


def _check_fields(fields: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Refuses fields that the tensors contradict, where nothing else would notice it or say it as clearly."""
    for name in ("share_encoder_decoder_embeddings", "tie_word_embeddings"):
        if fields.get(name) and not found[name]:
            raise ConversionError(f"{name} is true, and the matrices differ")
    for stack in ("encoder", "decoder"):
        number = found[f"{stack}_layers"]
        if (stated := fields.get(f"{stack}_layers", number)) != number:
            raise ConversionError(f"the weights have {number} {stack} layers, and the model's options say {stated}")


def _sizes(
    tensors: Mapping[str, Tensor], known: Mapping[str, Rule], layers: Mapping[str, int], rows: Callable[[str], int]
) -> dict[str, Any]:
    """Returns the fields of our configuration that tensors tell: sizes, biases, and which matrices are one."""

    def are_one(name: str, other: str) -> bool:
        if name not in known:
            return True
        one, two = ([tensors[n] for n in known[parameter].theirs] for parameter in (name, other))
        return len(one) == len(two) and all(map(torch.equal, one, two))

    words = rows(SOURCE)
    target = TARGET if TARGET in known else SOURCE
    fields: dict[str, Any] = {
        "d_model": tensors[known[SOURCE].theirs[0]].shape[-1],
        "vocab_size": words,
        "decoder_vocab_size": rows(target),
        "share_encoder_decoder_embeddings": are_one(TARGET, SOURCE),
        "tie_word_embeddings": are_one(OUTPUT, target),
        "attention_bias": any("_attn." in name and name.endswith("_proj.bias") for name in known),
        "output_bias": "lm_head.bias" in known,
        "final_layer_norm": any(f"{stack}.layer_norm.weight" in known for stack in layers),
    }
    for stack, number in layers.items():
        fields |= {f"{stack}_layers": number, f"{stack}_ffn_dim": rows(f"{stack}.layers.0.feed_forward.fc1.weight")}
    return fields


def _head_dims(fields: Mapping[str, Any], rows: Callable[[str], int]) -> dict[str, int]:
    """Returns d_k and d_v where these aren't d_model / h, and aren't given, as where one tensor has unlike maps."""
    found: dict[str, set[int]] = {"head_dim": set(), "value_head_dim": set()}
    widths = set()
    if None not in map(fields.get, found):
        return {}
    for stack in ("encoder", "decoder"):
        heads = fields[f"{stack}_attention_heads"]
        for name, projection in (("head_dim", "q_proj"), ("value_head_dim", "v_proj")):
            width = rows(f"{stack}.layers.0.self_attn.{projection}.weight")
            if heads < 1 or width % heads:
                raise ConversionError(
                    f"{stack}_attention_heads is {heads}, which doesn't divide {projection}'s {width}"
                )
            widths.add(width)
            found[name].add(width // heads)
    if widths == {fields["d_model"]}:
        return {}
    if any(len(one) > 1 for one in found.values()):
        raise ConversionError("the heads of encoder and decoder have different widths, which this model can't have")
    return {name: one.pop() for name, one in found.items()}


def _table(tensors: Mapping[str, Tensor], rule: Rule, d_model: int, layout: Layout) -> Tensor:
    """Returns a saved positional table from the first token's row on, (positions, d_model)."""
    (name,) = rule.theirs
    table = tensors[name]
    if table.shape[-1] != d_model or table.numel() <= layout.first_position * d_model:
        raise ConversionError(f"{name} {tuple(table.shape)} is no table of positions of width {d_model}")
    return table.reshape(-1, d_model)[layout.first_position :]


def _positions(tables: Sequence[Tensor], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Tells which sinusoids the tables are; any others are learned ones, which have an end."""
    wanted = fields.get("position_encoding")
    for encoding in POSITION_ENCODINGS[:-1] if wanted is None else [wanted]:
        first = fields.get("pad_token_id", 0) + 1 if encoding == "fairseq" else 0
        if encoding != "learned" and all(_is_sinusoidal(table, encoding, first) for table in tables):
            return {"position_encoding": encoding}
    if wanted not in (None, "learned"):
        raise ConversionError(f"the positional tables are not those of position_encoding={wanted!r}")
    lengths = {len(table) for table in tables}
    if len(tables) < len(POSITIONS) or len(lengths) > 1:
        raise ConversionError("learned tables of positions have to be two, of the same length")
    if "max_position_embeddings" in fields and fields["max_position_embeddings"] > min(lengths):
        asked = fields["max_position_embeddings"]
        raise ConversionError(f"the tables have {min(lengths)} learned positions, fewer than the model's {asked}")
    return {"position_encoding": "learned", "max_position_embeddings": lengths.pop()}


def _is_sinusoidal(table: Tensor, encoding: str, first: int) -> bool:
    expected = sinusoidal_table(len(table), table.shape[1], encoding, first).double()
    # Angles that were computed in 32 bits are wrong by some parts of the last bit; in half precision, sines are.
    rounding = 1e-6 + ROUNDING * torch.arange(first, first + len(table), dtype=torch.float64)[:, None]
    tolerance = rounding if table.dtype in (torch.float32, torch.float64) else rounding + torch.finfo(table.dtype).eps
    return bool(((table.double() - expected).abs() <= tolerance).all())


def _weights(
    tensors: Mapping[str, Tensor],
    known: Mapping[str, Rule],
    rules: Iterable[Rule],
    config: VanillaTransformerConfig,
    layout: Layout,
) -> dict[str, Tensor]:
    """Gives the tensors our names, and what else of the layout has to be put into them."""
    with torch.device("meta"):
        state = VanillaTransformerForConditionalGeneration(config).state_dict()
    shapes = {name.removeprefix("model."): value.shape for name, value in state.items()}
    named_there = {name: rule.theirs for rule in rules for name in rule.ours}
    places = known.keys() - shapes.keys() - set(POSITIONS)
    _refuse({"without a place in our model": [f"{' + '.join(known[name].theirs)} ({name})" for name in places]})
    weights: dict[str, Tensor] = {}
    problems: dict[str, list[str]] = {"missing": [], "of another shape": []}
    for name, shape in shapes.items():
        if name in weights or (name in (TARGET, OUTPUT) and _is_tied(name, config)):
            continue
        if name in POSITIONS and name in known:
            weights[name] = _table(tensors, known[name], config.d_model, layout)
        elif name in known:
            rule = known[name]
            own = [shapes.get(one, torch.Size()) for one in rule.ours]
            value = torch.cat([_flat_kernel(tensors[one], len(shape)) for one in rule.theirs])
            expected = (sum(one[0] for one in own), *shape[1:])
            if value.shape != expected:
                problems["of another shape"] += [
                    f"{' + '.join(rule.theirs)} {tuple(value.shape)} instead of {expected}"
                ]
                continue
            weights |= dict(zip(rule.ours, torch.split(value, [one[0] for one in own]), strict=True))
        elif name.endswith(".bias") and not _is_required(name, layout):  # theirs has none, as all its tensors are known
            weights[name] = torch.zeros(shape)
        else:
            problems["missing"] += named_there.get(name, (f"a name for {name}",))
    _refuse(problems)
    _fold(weights, config, layout)
    for name in (TARGET, OUTPUT):
        if _is_tied(name, config):
            weights[name] = weights[SOURCE if name == TARGET else TARGET]
    return {name if name.startswith("lm_head") else f"model.{name}": value for name, value in weights.items()}


def _fold(weights: dict[str, Tensor], config: VanillaTransformerConfig, layout: Layout) -> None:
    """Puts another LayerNorm's and another attention's factors into the weights."""
    if layout.unbiased_norm:
        for name in (name for name in weights if name.endswith("layer_norm.weight")):
            weights[name] = weights[name] * math.sqrt((config.d_model - 1) / config.d_model)
    if layout.attention_scale is not None:
        for name in (name for name in weights if ".q_proj." in name):
            heads = getattr(config, f"{name.partition('.')[0]}_attention_heads")
            d_k = len(weights[name]) // heads  # each stack has its own, where their heads differ
            weights[name] = weights[name] * (layout.attention_scale * math.sqrt(d_k))


def _flat_kernel(value: Tensor, ndim: int) -> Tensor:
    """Takes the width of 1 from a convolution's kernel, (out, in, 1), and the batch of 1 from a bias, (1, V)."""
    if value.ndim == ndim + 1:
        return value.squeeze(-1) if value.shape[-1] == 1 else value.squeeze(0)
    return value


# ---- Out ----
def to_tensors(model: VanillaTransformerForConditionalGeneration, layout: Layout) -> dict[str, Tensor]:
    """Returns a model's parameters under another system's names: the opposite of `from_tensors`, without folding.

    Raises:
        ConversionError: The model has parameters that the system has no name for.
    """
    config, own = model.config, {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    tensors: dict[str, Tensor] = {}
    written: set[str] = set()
    for rule in rules_of(layout, {"encoder": config.encoder_layers, "decoder": config.decoder_layers}):
        if not set(rule.ours) <= own.keys():
            continue
        value = torch.cat([own[name] for name in rule.ours])
        tensors |= dict(zip(rule.theirs, value.chunk(len(rule.theirs)), strict=True))
        written.update(rule.ours)
    tied = {name for name in (TARGET, OUTPUT) if name in own and _is_tied(name, config)}
    if unnamed := own.keys() - written - tied:
        raise ConversionError(f"the other system has no place for {named(unnamed, NAMES_PER_ERROR)}")
    return tensors


def _is_tied(name: str, config: VanillaTransformerConfig) -> bool:
    return config.share_encoder_decoder_embeddings if name == TARGET else config.tie_word_embeddings


# ---- Names ----
def rules_of(layout: Layout, layers: Mapping[str, int]) -> Iterable[Rule]:
    """Returns the table's rules for each layer; `layers` has the number of them, by stack.

    Of two rules for the same parameters, the later one holds.
    """
    rules: dict[tuple[str, ...], Rule] = {}
    for ours, theirs in layout.names.items():
        numbers = range(layers[ours.partition(".")[0]]) if "*" in ours else range(1)
        kinds = [""] if ours.endswith(KINDS) else [f".{kind}" for kind in KINDS]
        for number, kind in product(numbers, kinds):
            one, other = (
                tuple(f"{name.replace('*', str(number))}{kind}" for name in _variants(names))
                for names in (ours, theirs)
            )
            rules[one] = Rule(one, other)
    return rules.values()


def _variants(name: str) -> list[str]:
    """Returns the names that "{a,b}" in a name stands for."""
    begin, brace, rest = name.partition("{")
    inner, _, end = rest.partition("}")
    return [begin + one + end for one in inner.split(",")] if brace else [name]


def count_layers(layout: Layout, tensors: Iterable[str]) -> dict[str, int]:
    """Returns the number of layers of each stack, by the highest number in the names."""
    layers = {"encoder": 0, "decoder": 0}
    for ours, theirs in layout.names.items():
        if "*" not in ours:
            continue
        stack = ours.partition(".")[0]
        for one in _variants(theirs):
            pattern = re.compile(re.escape(one).replace(r"\*", r"(\d{1,4})", 1) + r"(\.|$)")
            numbers = [int(match[1]) + 1 for match in map(pattern.match, tensors) if match]
            layers[stack] = max([layers[stack], *numbers])
    return layers
