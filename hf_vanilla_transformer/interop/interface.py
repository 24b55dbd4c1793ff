"""What the module of each system gets, returns and raises: options, the result, the error, and checks.

Everything in this folder raises `ConversionError` for a file, a setting or a tensor that it can't convert exactly.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..engine.support import edited_reason
from ..errors import named
from ..modeling_vanilla_transformer import (
    SinusoidalPositions,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerStack,
    sinusoidal_table,
)

# Whose modules compute with fewer bits than their weights say.
QUANTIZERS = ("torch.ao.", "torchao.", "optimum.quanto.", "bitsandbytes.")

# How far logits may be from a model's, as a part of the largest where that is above 1, and what is said beyond that.
LIMITS = {
    "onnx": (1e-4, "onnxruntime's logits differ from the model's"),
    "stock": (1e-4, "the logits of the exported model differ"),  # epsilons do
    "original": (1e-3, "the model isn't the original: its logits differ from those in the file"),  # kernels differ
    "ctranslate2": (1e-3, "its loader makes another model of this one: probabilities of sequences differ"),
}

Settings = Mapping[str, Any]  # what another system's files say, whose values may be of any type


class ConversionError(ValueError):
    """A model can't be converted; the message says why, and nothing has been written."""


@dataclass(frozen=True)
class ConversionOptions:
    """Options of a conversion."""

    mapping: str | Path | None = None  # a YAML file with the layout, or the name of one that comes with the package
    with_tokenizer: bool = True
    revision: str | None = None  # branch, tag or commit on the Hub
    local_files_only: bool = False  # a name on the Hub is only looked for among the files of earlier downloads
    vocab: tuple[str | Path, ...] = ()  # vocabularies of a model that has none (Marian's .npz): one file, or two
    check: str | Path | None = None  # a file with ids and the original's logits (docs/interop.md), to compare with


@dataclass(frozen=True)
class Converted:
    """A model of another system, converted to this package's."""

    model: VanillaTransformerForConditionalGeneration  # in evaluation mode, in the type of its weights
    tokenizer: PreTrainedTokenizerBase | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)  # of its card, if it has one
    base_model: str | None = None  # its name on the Hub; None: it is a file or folder
    notes: tuple[str, ...] = ()  # what isn't exact, and by how much, and what is missing


def check_options(
    options: Settings, wanted: Mapping[str, Collection[object]], unwanted: Sequence[str] = (), of: str = "its"
) -> None:
    """Refuses options with other values than `wanted` has for them, where they are given, and `unwanted` ones."""
    for name, values in wanted.items():
        if name in options and options[name] not in [*values]:
            known = " or ".join(repr(one) if len(values) == 1 else str(one) for one in values)
            raise ConversionError(f"the model can't be converted: {of} {name} is {options[name]!r}, not {known}")
    for name in unwanted:
        if options.get(name):
            raise ConversionError(f"the model can't be converted: {of} {name} is {options[name]!r}, not off")


def check_alike(encoder: Settings, decoder: Settings, names: Sequence[str]) -> None:
    """Refuses options that differ between the stacks, where this model has one for both."""
    for name in names:
        if encoder[name] != decoder[name]:
            raise ConversionError(
                f"{name} is {encoder[name]!r} in the encoder and {decoder[name]!r} in the decoder; here, both are alike"
            )


def check_savable(settings: GenerationConfig) -> None:
    """Checks generation settings before anything is written; older versions of transformers saved what 5 refuses."""
    try:
        settings.validate(strict=True)
    except ValueError as error:
        raise ConversionError(f"correct generation_config.json: {' '.join(str(error).split())}") from error


def check_unquantized(model: nn.Module) -> None:
    """Raises `ConversionError` for a model whose weights are quantized, all of them or some."""
    kinds: set[type] = {type(one) for one in model.parameters()} - {nn.Parameter, Tensor}
    kinds |= {type(one) for one in model.modules() if type(one).__module__.startswith(QUANTIZERS)}
    if kinds or getattr(model, "is_quantized", False):
        found = f" ({named(one.__name__ for one in kinds)})" if kinds else ""
        raise ConversionError(f"its weights are quantized{found}; export the model as it was before that")


def check_plain(model: PreTrainedModel) -> None:
    """Refuses a model that computes something else than its weights and configuration say: with adapters or hooks."""
    check_unquantized(model)
    if (reason := edited_reason(model)) is not None:
        raise ConversionError(
            f"the model can't be exported: {reason}; merge adapters (merge_and_unload), and remove hooks before"
        )


def distance(found: Tensor, expected: Tensor) -> float:
    """Returns how far logits differ at most, as a part of the largest expected one where that is above 1."""
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1)).item()


def check_distance(difference: float, kind: str, end: str = "") -> float:
    """Returns the distance of logits; raises `ConversionError` if it is more than this kind's in `LIMITS`, or NaN."""
    limit, what = LIMITS[kind]
    if not difference <= limit:
        raise ConversionError(f"{what} by {difference:.1e} of the largest ({limit:.0e} is allowed){end}")
    return difference


def table_of(stack: VanillaTransformerStack, rows: int) -> Tensor:
    """Returns a stack's positions as a table, (positions, d_model); one of sinusoids gets this number of rows."""
    positions = stack.embed_positions
    if isinstance(positions, SinusoidalPositions):
        return sinusoidal_table(rows, *positions.layout)
    return positions.get_parameter("weight")


def in_float32(model: VanillaTransformerForConditionalGeneration) -> VanillaTransformerForConditionalGeneration:
    """Returns a copy on the CPU in float32, with sinusoids that the model's own type hasn't rounded."""
    exact = copy.deepcopy(model).cpu().float().eval()
    for stack in (exact.model.encoder, exact.model.decoder):
        if isinstance(stack.embed_positions, SinusoidalPositions):
            stack.embed_positions = SinusoidalPositions(exact.config)
    return exact
