"""Tables of names: another system's tensors become this model's parameters.

A table maps parameters of this model, without "model.", to names of the other system:

    "encoder.layers.*.self_attn.q_proj": "encoder.layers.*.self_attn.q_proj"  # weight and bias
    "encoder.layers.*.self_attn.{q,k,v}_proj.weight": "layers.*.in_proj_weight"  # three, stacked in one of theirs
    "encoder.layers.*.self_attn.q_proj.weight": "layers.*.heads.{0,1}.query.weight"  # one, stacked of two of theirs
    "encoder.layers.*.feed_forward.fc1": "layers.{2n+1}.linear"  # every second of their list
    "encoder.layers.*.final_layer_norm.weight": 1  # a constant: they have no such tensor

`*` is the number n of a layer, from 0 up; "{2n+1}" in their names is computed from it. A name that ends in neither
".weight" nor ".bias" is that of a module with both.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property, partial, reduce

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from ..checkpoints.loading import as_list
from ..configuration_vanilla_transformer import MOST_LAYERS, POSITION_ENCODINGS, VanillaTransformerConfig
from ..errors import first_line, named
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, sinusoidal_table
from .interface import ConversionError, Settings

NAMES_PER_ERROR = 20
SOURCE, TARGET, OUTPUT = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"
POSITIONS = ("encoder.embed_positions.weight", "decoder.embed_positions.weight")
STACKS = ("encoder", "decoder")
KINDS = ("weight", "bias")
LAYER_PARTS = (
    *(f"{part}_attn.{one}_proj" for part in ("self", "encoder") for one in ("q", "k", "v", "out")),
    *("self_attn_layer_norm", "encoder_attn_layer_norm", "feed_forward.fc1", "feed_forward.fc2", "final_layer_norm"),
)
NUMBER = re.compile(r"\*|\{(\d*)n(?:\+(\d+))?\}")
# Sinusoids that were computed in 32 bits are wrong by up to this much per position.
ROUNDING = 2.0**-22


@dataclasses.dataclass(frozen=True)
class Layout:
    """How another system lays out the model."""

    names: Mapping[str, str | float]  # this model's -> theirs, or a constant; see above
    fields: Settings = dataclasses.field(default_factory=dict)  # of this model's configuration that no tensor tells
    ignored: tuple[str, ...] = ()  # names, with `*` for anything, of tensors that carry nothing
    required: tuple[str, ...] = ()  # this model's names, with `*` for anything, of biases that can't be missing
    # How several matrices are stacked in one of theirs: "blocks", one behind the other, or "heads", those of the first
    # head, those of the second, and so on.
    stacking: str = "blocks"
    attention_scale: float | None = None  # what scores are multiplied by; None: 1 / sqrt(d_k)
    # Whether LayerNorm is gain (x - mean) / (std + eps) + bias, with the standard deviation's unbiased estimate.
    unbiased_norm: bool = False
    # The row of a positional table that belongs to the first token; None: row 0, in a table without rows of zeros.
    first_position: int | None = None


@dataclasses.dataclass(frozen=True)
class Rule:
    """Parameters of this model that are, stacked along the first dimension, tensors of theirs, or a constant."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    constant: float | None = None


@dataclasses.dataclass(frozen=True)
class _NamedTensors:
    """Another system's tensors with the rules that name them."""

    tensors: Mapping[str, Tensor]
    layout: Layout
    layers: Mapping[str, int]  # stack -> number
    rules: Sequence[Rule]

    @cached_property
    def known(self) -> dict[str, Rule]:
        """This model's parameters that have tensors, or a constant -> rules."""
        present = self.tensors.keys()
        rules = (rule for rule in self.rules if rule.constant is not None or not present.isdisjoint(rule.theirs))
        return {name: rule for rule in rules for name in rule.ours}

    def names_there(self, name: str) -> tuple[str, ...]:
        """Returns what a parameter is called there."""
        return next((rule.theirs for rule in self.rules if name in rule.ours), (f"a name for {name}",))

    def rows(self, name: str) -> int:
        """Returns the rows of a parameter; raises `ConversionError` if its tensors are missing."""
        if name not in self.known:
            _refuse({"missing": self.names_there(name)})
        rule = self.known[name]
        return sum(len(self.tensors[one]) for one in rule.theirs) // len(rule.ours)

    def equal(self, name: str, other: str) -> bool:
        """Tells whether two parameters have the same values."""
        one, two = ([self.tensors[n] for n in self.known[parameter].theirs] for parameter in (name, other))
        return len(one) == len(two) and all(map(torch.equal, one, two))


def from_tensors(tensors: Mapping[str, Tensor], layout: Layout) -> VanillaTransformerForConditionalGeneration:
    """Makes a model of another system's tensors, in evaluation mode and in the widest type of its weights.

    Raises:
        ConversionError: Tensors are missing, unknown, of another shape, no floating-point numbers or not finite, or
            the layout's fields make no model with them.
    """
    tensors = {name: value for name, value in tensors.items() if not _matches(name, layout.ignored)}
    layers = count_layers(layout, tensors)
    theirs = _NamedTensors(tensors, layout, layers, list(rules_of(layout, layers)))
    _check_tensors(theirs)
    _check_layers(theirs)
    config = _config(theirs)
    weights = _weights(theirs, config)
    used = [tensors[one] for name, rule in theirs.known.items() if name in weights for one in rule.theirs]
    dtype = reduce(torch.promote_types, (value.dtype for value in used))
    state = {
        name if name.startswith("lm_head") else f"model.{name}": value.to(dtype) for name, value in weights.items()
    }
    make = VanillaTransformerForConditionalGeneration.from_pretrained
    return make(None, config=config, state_dict=state, dtype=dtype).eval()


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _refuse(problems: Mapping[str, Iterable[str]]) -> None:
    found = ((problem, set(names)) for problem, names in problems.items())
    if reasons := [f"{problem}: {named(names, NAMES_PER_ERROR)}" for problem, names in found if names]:
        raise ConversionError(f"the weights can't be converted; {'; '.join(reasons)}")


def _check_tensors(theirs: _NamedTensors) -> None:
    """Refuses tensors that have no name in the layout, or values that no parameter can have."""
    tensors = theirs.tensors
    _refuse({"unknown": tensors.keys() - {name for rule in theirs.rules for name in rule.theirs}})
    problems = {
        "not of floating-point numbers": [n for n, value in tensors.items() if not value.is_floating_point()],
        "of another shape, without a dimension": [n for n, value in tensors.items() if value.ndim == 0],
        "not finite": [n for n, value in tensors.items() if not value.isfinite().all()],
    }
    _refuse(problems)


def _check_layers(theirs: _NamedTensors) -> None:
    """Refuses a stack without layers, and layers of a stack that lack what others have."""
    names, fields = theirs.layout.names, theirs.layout.fields
    for stack, number in theirs.layers.items():
        if not number or f"{stack}.layers.0.feed_forward.fc1.weight" not in theirs.known:
            place = next((name for ours, name in names.items() if ours.startswith(f"{stack}.layers.")), "?")
            raise ConversionError(f"the {stack} has no layers: no tensor is called {place}")
        if (stated := fields.get(f"{stack}_layers", number)) != number:
            raise ConversionError(f"the weights have {number} {stack} layers, and the model's options say {stated}")

    of_stacks = [
        {n for o, rule in theirs.known.items() if o.startswith(f"{s}.layers.") for n in rule.theirs} for s in STACKS
    ]
    if (both := sorted(of_stacks[0] & of_stacks[1])) and not {f"{stack}_layers" for stack in STACKS} <= fields.keys():
        raise ConversionError(
            f"{both[0]} is in layers of the encoder and of the decoder: give encoder_layers and decoder_layers, as no "
            "name tells where the encoder ends"
        )
    family = partial(re.sub, r"\.\d+\.", ".*.")
    families = {family(name) for name in theirs.known}
    expected = (rule for rule in theirs.rules if families & {family(name) for name in rule.ours})
    _refuse({"missing": [n for rule in expected for n in rule.theirs if n not in theirs.tensors]})


# ---- The configuration ----
def _config(theirs: _NamedTensors) -> VanillaTransformerConfig:
    layout = theirs.layout
    _check_types(layout.fields)
    found = _sizes(theirs)
    for name in ("share_encoder_decoder_embeddings", "tie_word_embeddings"):
        if layout.fields.get(name) and not found[name]:
            raise ConversionError(f"{name} is true, and the matrices differ")
    for side, name in (("source", "vocab_size"), ("target", "decoder_vocab_size")):
        if (size := layout.fields.get(name)) not in (None, found[name]):
            rows = f"{found[name]:,} rows ({name})"
            raise ConversionError(f"the {side} dictionary has {size:,} entries and the embeddings {rows}")
    fields = {**found, **layout.fields}
    if layout.unbiased_norm:  # (s + eps) is closest to sqrt(s^2 + 2 eps) where s is 1
        fields["layer_norm_eps"] *= 2 * math.sqrt((fields["d_model"] - 1) / fields["d_model"])
    fields |= _head_dims(fields, theirs.rows)
    if tables := [_table(theirs, name, fields["d_model"]) for name in POSITIONS if name in theirs.known]:
        fields |= _positions(tables, fields)
    elif "position_encoding" not in fields:
        name = theirs.names_there(POSITIONS[0])[0]
        raise ConversionError(f"the weights have no {name}; give position_encoding, as no tensor tells it")
    if unknown := fields.keys() - {one.name for one in dataclasses.fields(VanillaTransformerConfig)}:
        raise ConversionError(f"VanillaTransformerConfig has no field {', '.join(sorted(unknown))}; check the spelling")
    try:
        config = VanillaTransformerConfig(**fields)
    except (StrictDataclassError, TypeError) as error:
        raise ConversionError(f"the fields make no valid model ({first_line(error.__cause__ or error)})") from error
    _check_tokens(config)
    return config


def _check_types(fields: Settings) -> None:
    """Refuses fields that are no numbers, before anything is computed with them."""
    for name, value in fields.items():
        wanted = VanillaTransformerConfig.__annotations__.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if wanted in (int, float, int | None, float | int) and not (is_number or (value is None and wanted is not int)):
            hint = ": YAML takes numbers such as 1e-6 for text; write 1.0e-6" if isinstance(value, str) else ""
            raise ConversionError(f"{name} is {value!r}, not a number{hint}")


def _check_tokens(config: VanillaTransformerConfig) -> None:
    """Refuses tokens that the target's vocabulary doesn't have: a decoder couldn't start, or would never end."""
    rows = config.target_vocab_size
    for name in ("pad_token_id", "decoder_start_token_id", "eos_token_id"):
        for number in as_list(getattr(config, name)):
            if not 0 <= number < rows:
                raise ConversionError(f"{name} is {number}, and the target vocabulary has {rows:,} tokens, from 0 up")


def _sizes(theirs: _NamedTensors) -> dict[str, int]:
    """Returns the fields of the configuration that tensors tell: sizes, biases, and which matrices are one."""
    known, rows = theirs.known, theirs.rows
    words = rows(SOURCE)
    target = TARGET if TARGET in known else SOURCE
    if OUTPUT in known and rows(OUTPUT) != rows(target):
        raise ConversionError(
            f"the target's embeddings have {rows(target):,} rows and the output {rows(OUTPUT):,}, and here each token "
            "has a row in both: insert the missing rows into the state dict, zeros at the ids that lack one. If these "
            "are the output's, give them a bias of -10000, so that they are never chosen"
        )
    fields = {
        "d_model": theirs.tensors[known[SOURCE].theirs[0]].shape[-1],
        "vocab_size": words,
        "decoder_vocab_size": rows(target),
        "share_encoder_decoder_embeddings": theirs.equal(target, SOURCE),
        "tie_word_embeddings": OUTPUT not in known or theirs.equal(OUTPUT, target),
        "attention_bias": any("_attn." in name and name.endswith("_proj.bias") for name in known),
        "output_bias": "lm_head.bias" in known,
        "final_layer_norm": any(f"{stack}.layer_norm.weight" in known for stack in STACKS),
    }
    for stack, number in theirs.layers.items():
        fields |= {f"{stack}_layers": number, f"{stack}_ffn_dim": rows(f"{stack}.layers.0.feed_forward.fc1.weight")}
    return fields


def _head_dims(fields: Settings, rows: Callable[[str], int]) -> dict[str, int]:
    """Returns d_k and d_v where these aren't d_model / h, and aren't given, as where one tensor has unlike maps."""
    if None not in (fields.get("head_dim"), fields.get("value_head_dim")):
        return {}
    found: dict[str, int] = {}
    widths = set()
    for stack in STACKS:
        heads = fields[f"{stack}_attention_heads"]
        for name, projection in (("head_dim", "q_proj"), ("value_head_dim", "v_proj")):
            width = rows(f"{stack}.layers.0.self_attn.{projection}.weight")
            if heads < 1 or width % heads:
                raise ConversionError(f"{stack}_attention_heads is {heads} and doesn't divide {projection}'s {width}")
            widths.add(width)
            found[name] = width // heads  # if the stacks' differ, a tensor has another shape
    return {} if widths == {fields["d_model"]} else found


# ---- Positions ----
def _table(theirs: _NamedTensors, parameter: str, d_model: int) -> Tensor:
    """Returns a saved positional table from the first token's row on, (positions, d_model)."""
    (name,) = theirs.known[parameter].theirs
    table, first = theirs.tensors[name], theirs.layout.first_position or 0
    if table.shape[-1] != d_model or table.numel() <= first * d_model:
        raise ConversionError(f"{name} {tuple(table.shape)} is no table of positions of width {d_model}")
    table = table.reshape(-1, d_model)
    is_zero = (table == 0).all(1)
    if theirs.layout.first_position is None and is_zero.any():
        row = int(is_zero.int().argmax())
        raise ConversionError(
            f"row {row} of {name} is zeros, as the row of padding often is: give first_position, the row of the first "
            f"token (often {row + 1}; 0 if that row is no exception)"
        )
    return table[first:]


def _positions(tables: Sequence[Tensor], fields: Settings) -> dict[str, object]:
    """Tells which sinusoids the tables are; any others are learned positions, with an end."""
    wanted = fields.get("position_encoding")
    for encoding in POSITION_ENCODINGS[:-1] if wanted is None else [wanted]:
        first = (fields.get("pad_token_id") or 0) + 1 if encoding == "fairseq" else 0
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


# ---- The weights ----
def _weights(theirs: _NamedTensors, config: VanillaTransformerConfig) -> dict[str, Tensor]:
    """Gives the tensors this model's names, and puts what else the layout has into them."""
    with torch.device("meta"):
        state = VanillaTransformerForConditionalGeneration(config).state_dict()
    shapes = {name.removeprefix("model."): value.shape for name, value in state.items()}
    known, layout = theirs.known, theirs.layout
    places = known.keys() - shapes.keys() - set(POSITIONS)
    _refuse({"without a place in this model": [f"{' + '.join(known[name].theirs)} ({name})" for name in places]})
    copies = {TARGET: SOURCE} if config.share_encoder_decoder_embeddings else {}
    copies |= {OUTPUT: TARGET} if config.tie_word_embeddings else {}
    weights: dict[str, Tensor] = {}
    problems: dict[str, list[str]] = {"missing": [], "of another shape": []}
    for name, shape in shapes.items():
        if name in weights or name in copies:
            continue
        if name in POSITIONS and name in known:
            weights[name] = _table(theirs, name, config.d_model)
        elif name in known:
            rule = known[name]
            own = [shapes.get(one, torch.Size()) for one in rule.ours]
            expected = torch.Size([sum(one[0] for one in own), *shape[1:]])
            value = _stacked(theirs.tensors, rule, expected)
            if value.shape == expected:
                weights |= _unstacked(value, rule, [one[0] for one in own], config, layout)
            else:
                wrong = f"{' + '.join(rule.theirs)} {tuple(value.shape)} instead of {tuple(expected)}"
                problems["of another shape"].append(wrong)
        elif name.endswith(".bias") and not _matches(name, layout.required):  # they have none, as all tensors are known
            weights[name] = torch.zeros(shape)
        else:
            problems["missing"] += theirs.names_there(name)
    _refuse(problems)
    _fold(weights, config, layout)
    for name, other in copies.items():
        weights[name] = weights[other]
    return weights


def _stacked(tensors: Mapping[str, Tensor], rule: Rule, shape: torch.Size) -> Tensor:
    """Returns the tensors of a rule as one, without the width of 1 of a convolution's kernel or of a bias, (1, V)."""
    if rule.constant is not None:
        return torch.full(shape, rule.constant)
    parts = [tensors[one] for one in rule.theirs]
    return torch.cat(
        [
            part if part.ndim != len(shape) + 1 else part.squeeze(-1) if part.shape[-1] == 1 else part.squeeze(0)
            for part in parts
        ]
    )


def _unstacked(
    value: Tensor, rule: Rule, rows: list[int], config: VanillaTransformerConfig, layout: Layout
) -> dict[str, Tensor]:
    """Returns the parameters of a rule; `rows` has the number of each one's rows."""
    if layout.stacking == "heads" and len(rule.ours) > len(rule.theirs):
        heads = getattr(config, f"{rule.ours[0].partition('.')[0]}_attention_heads")
        parts = torch.split(value.reshape(heads, -1, *value.shape[1:]), [number // heads for number in rows], dim=1)
        return dict(zip(rule.ours, (part.flatten(0, 1) for part in parts), strict=True))
    return dict(zip(rule.ours, torch.split(value, rows), strict=True))


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


# ---- Names ----
def layer_names(places: Mapping[str, str], words: Mapping[str, str]) -> dict[str, str]:
    """Returns the part of a table that names layers; `places` says where those of a stack are, with `*`.

    `words` has what they call "self_attn.q_proj", or its words "self_attn" and "q_proj", and so on, where it isn't the
    same; "decoder.self_attn" is the decoder's alone.
    """
    names = {}
    for stack, place in places.items():
        alone = {name.removeprefix(f"{stack}."): word for name, word in words.items() if name.startswith(f"{stack}.")}
        own = {**words, **alone}
        for part in LAYER_PARTS:
            if stack == "decoder" or not part.startswith("encoder_attn"):
                there = own.get(part) or ".".join(own.get(word, word) for word in part.split("."))
                names[f"{stack}.layers.*.{part}"] = f"{place}.{there}"
    return names


def rules_of(layout: Layout, layers: Mapping[str, int]) -> Iterable[Rule]:
    """Returns the table's rules for each layer; `layers` has the number of them, by stack.

    Of two rules for the same parameters, the later one holds.
    """
    rules: dict[tuple[str, ...], Rule] = {}
    for ours, theirs in layout.names.items():
        for number in range(layers[ours.partition(".")[0]]) if "*" in ours else range(1):
            for rule in _rules(ours, theirs, number):
                rules[rule.ours] = rule
    return rules.values()


def _rules(ours: str, theirs: str | float, number: int) -> Iterable[Rule]:
    """Yields the rules of an entry for one layer: one, or those of weight and bias."""
    for kind in [""] if ours.endswith(KINDS) else [f".{kind}" for kind in KINDS]:
        own = tuple(f"{name}{kind}" for name in variants(ours.replace("*", str(number))))
        if isinstance(theirs, str):
            there = NUMBER.sub(lambda found: str(int(found[1] or 1) * number + int(found[2] or 0)), theirs)
            yield Rule(own, tuple(f"{name}{kind}" for name in variants(there)))
        else:
            yield Rule(own, (), theirs)


def variants(name: str) -> list[str]:
    """Returns the names that "{a,b}" in a name stands for."""
    begin, brace, rest = name.partition("{")
    inner, _, end = rest.partition("}")
    return [begin + one + end for one in inner.split(",")] if brace else [name]


def count_layers(layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns the number of layers of each stack: the highest that has a tensor, or what the fields say if it is less.

    Of one list with the layers of both stacks, only the fields tell where the encoder's end.
    """
    layers = dict.fromkeys(STACKS, 0)
    for ours, theirs in layout.names.items():
        place = re.match(r"(encoder|decoder)\.layers\.(\*|\d+)\.", ours)
        if place is None or not isinstance(theirs, str) or ("*" in ours and not NUMBER.search(theirs)):
            continue
        numbers = range(min(len(tensors), MOST_LAYERS)) if place[2] == "*" else [int(place[2])]
        for number in numbers:
            if any(name in tensors for rule in _rules(ours, theirs, number) for name in rule.theirs):
                layers[place[1]] = max(layers[place[1]], number + 1)
    for stack, number in layers.items():
        stated = layout.fields.get(f"{stack}_layers")
        if isinstance(stated, int) and 0 < stated < number:
            layers[stack] = stated
    return layers
