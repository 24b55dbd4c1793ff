"""Exports a model for another system; each format has a module here with a function that writes it."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ..checkpoints.files import check_new_folder, new_folder
from ..errors import first_line, install
from . import FORMATS, STOCK

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration


def export(
    model: "VanillaTransformerForConditionalGeneration",
    output: str | Path,
    *,
    to: str,
    tokenizer: "PreTrainedTokenizerBase",
    source: str | Path | None = None,
    **options: object,
) -> list[str]:
    """Writes a model in another system's format, as `vanilla-transformer export` does.

    Args:
        model: A model of this package, such as that of a `Translator`; `from_marian` makes one of a Marian model.
        output: The folder to write. It appears when it is complete, and may exist if it is empty.
        to: The format: "ctranslate2", "onnx" (for onnxruntime), "stock" (a class of transformers' own) or
            "transformers_js" (the same, with graphs for the browser).
        tokenizer: The model's tokenizer, whose files are written too.
        source: What the model was loaded from, a folder or a name on the Hub: the result gets the folder's licence, and
            "stock" and "transformers_js" a card that says what the folder's does.
        **options: Of "ctranslate2": `quantization`, such as "int8". Of "onnx" and "transformers_js": `progress`, which
            is called with the name of each step.

    Returns:
        Notes for the user: what differs, and by how much.

    Raises:
        ConversionError: The format has no such model or tokenizer, or the result computes something else.
        ImportError: A package of the extra `export` isn't installed.
        ValueError: There is no such format.
        CardError: The card in `source` can't be read.
        OSError: The output exists, or can't be written.
    """
    write, card = writer_of(to), _module("export_card")
    check_new_folder(Path(output))
    facts, changed = card.facts_about(model, source) if to in STOCK else (None, None)
    with new_folder(Path(output)) as folder:
        notes = write(model, tokenizer, folder, **options)
        card.copy_licence(folder, source)
        if to in STOCK:
            card.save_stock_card(folder, Path(output), facts, notes)
            notes = [*notes, *filter(None, [changed])]
    return notes


def writer_of(to: str) -> Callable[..., list[str]]:
    """Imports the function that writes a format into an empty folder; errors are those of `export`."""
    if to not in FORMATS:
        raise ValueError(f"there is no format {to!r}; give one of {', '.join(FORMATS)}")
    try:
        write: Callable[..., list[str]] = getattr(_module(to), f"write_{to}")
    except ImportError as error:
        raise ImportError(f"{to} needs more packages ({first_line(error)}): {install('export')}") from error
    return write


def _module(name: str) -> ModuleType:
    """Imports a module of this folder when it is needed, as commands have to begin at once."""
    return importlib.import_module(f".{name}", __package__)


__all__ = ["export"]
