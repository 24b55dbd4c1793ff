"""What the modules of all systems share: what a user says of a model, and what becomes of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration


class ConversionError(ValueError):
    """A model can't be converted; the message says why, and nothing has been written."""


@dataclass(frozen=True)
class Options:
    """What a user says of a model beside its name.

    Attributes:
        mapping: A YAML file with the layout, or the name of one that comes with the package.
        assume_causal: Whether a model that may have been trained without a causal mask is taken for one that was.
        with_tokenizer: Whether a tokenizer is made.
        revision: Branch, tag or commit on the Hub.
        token: For the Hub, as for `from_pretrained`.
        local_files_only: Whether a name on the Hub is only looked for among the files of earlier downloads.
    """

    mapping: str | Path | None = None
    assume_causal: bool = False
    with_tokenizer: bool = True
    revision: str | None = None
    token: str | bool | None = None
    local_files_only: bool = False


@dataclass(frozen=True)
class Converted:
    """A model of another system, converted to this package's.

    Attributes:
        model: In evaluation mode, in the type of its weights.
        tokenizer: Its tokenizer, in evaluation as in training; None: there is none.
        metadata: The metadata of its card, if it has one.
        base_model: Its name on the Hub; None: it is a file or folder.
        notes: What a user should know: what isn't exact, and by how much, and what is missing.
    """

    model: VanillaTransformerForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    base_model: str | None = None
    notes: tuple[str, ...] = ()


def check_plain(model: Any) -> None:
    """Checks, before its weights are written elsewhere, that a model computes what its weights and configuration say.

    Raises:
        ConversionError: It is another class, or modules were replaced (adapters, quantization) or have hooks.
    """
    kind = VanillaTransformerForConditionalGeneration
    if type(model) is not kind:
        raise ConversionError(f"{type(model).__name__} isn't this package's model, which alone can be exported")
    with torch.device("meta"):
        expected = {name: type(module) for name, module in kind(model.config).named_modules()}
    for name, module in model.named_modules():
        if type(module) is not expected.get(name):
            raise ConversionError(
                f"{name} is a {type(module).__name__}, which no plain model has there: merge adapters "
                "(merge_and_unload), and export a model that isn't quantized"
            )
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        # transformers puts hooks on modules to record their outputs.
        if "forward" in vars(module) or not all(
            str(getattr(one, "__module__", "")).startswith("transformers.") for one in hooks
        ):
            raise ConversionError(f"{name or 'the model'} has hooks or a forward of its own, which can't be exported")


def check_new_folder(output: Path) -> None:
    """Checks, before any work is done, that a folder can be made.

    Raises:
        ConversionError: There is something at `output`, or no folder to put it in.
    """
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ConversionError(f"{output} exists; choose another output")
    if not output.absolute().parent.is_dir():
        raise ConversionError(f"{output} can't be written: there is no folder {output.absolute().parent}")
