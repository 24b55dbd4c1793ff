"""What the module of each system gets, returns and raises: options, the result, the error, and checks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration


class ConversionError(ValueError):
    """A model can't be converted; the message says why, and nothing has been written."""


@dataclass(frozen=True)
class ConversionOptions:
    """Options of a conversion.

    Attributes:
        mapping: A YAML file with the layout, or the name of one that comes with the package.
        with_tokenizer: Whether a tokenizer is made.
        revision: Branch, tag or commit on the Hub.
        local_files_only: Whether a name on the Hub is only looked for among the files of earlier downloads.
        vocab: Files with the vocabularies of a model that comes without them (Marian's .npz): one, or two.
        check: A file with ids and the original's logits for them, to compare with; docs/interop.md has its entries.
    """

    mapping: str | Path | None = None
    with_tokenizer: bool = True
    revision: str | None = None
    local_files_only: bool = False
    vocab: tuple[str | Path, ...] = ()
    check: str | Path | None = None


@dataclass(frozen=True)
class Converted:
    """A model of another system, converted to this package's.

    Attributes:
        model: In evaluation mode, in the type of its weights.
        tokenizer: Its tokenizer; None: there is none.
        metadata: The metadata of its card, if it has one.
        base_model: Its name on the Hub; None: it is a file or folder.
        notes: What isn't exact, and by how much, and what is missing.
    """

    model: VanillaTransformerForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    base_model: str | None = None
    notes: tuple[str, ...] = ()


def check_options(
    options: Mapping[str, Any], wanted: Mapping[str, tuple[object, ...]], unwanted: Sequence[str] = ()
) -> None:
    """Refuses the options of a model that computes something else.

    Args:
        options: Those that the model was made with.
        wanted: Option -> the values that it may have, where it is given.
        unwanted: Options that have to be off.

    Raises:
        ConversionError: An option has another value.
    """
    for name, values in wanted.items():
        if name in options and options[name] not in values:
            known = repr(values[0]) if len(values) == 1 else " or ".join(map(str, values))
            raise ConversionError(f"the model can't be converted: its {name} is {options[name]!r}, not {known}")
    for name in unwanted:
        if options.get(name):
            raise ConversionError(f"the model can't be converted: its {name} is {options[name]!r}, not off")


def check_savable(settings: GenerationConfig) -> None:
    """Checks generation settings before anything is written; older versions of transformers saved what 5 refuses.

    Raises:
        ConversionError: transformers won't save them.
    """
    try:
        settings.validate(strict=True)
    except ValueError as error:
        raise ConversionError(f"correct generation_config.json: {' '.join(str(error).split())}") from error


def check_plain(model: nn.Module) -> None:
    """Checks, before its weights are written elsewhere, that a model computes what its weights and configuration say.

    Raises:
        ConversionError: It is another class, or modules were replaced (adapters, quantization) or have hooks.
    """
    kind = VanillaTransformerForConditionalGeneration
    if type(model) is not kind:
        raise ConversionError(f"{type(model).__name__} can't be exported; only {kind.__name__} can")
    with torch.device("meta"):
        expected = {name: type(module) for name, module in kind(model.config).named_modules()}
    for name, module in model.named_modules():
        if type(module) is not expected.get(name):
            raise ConversionError(
                f"{name} is a {type(module).__name__}, not the model's own module: merge adapters (merge_and_unload), "
                "and export a model that isn't quantized"
            )
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        # transformers puts hooks on modules to record their outputs.
        if "forward" in vars(module) or not all(
            str(getattr(one, "__module__", "")).startswith("transformers.") for one in hooks
        ):
            raise ConversionError(
                f"{name or 'the model'} has hooks or a forward of its own; remove them before the export"
            )
