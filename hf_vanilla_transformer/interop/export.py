"""Exports a model for another system; each format has a module here with a function that writes it.

The card and the licence of the result are those of the folder that it comes from, with what the export changed.
"""

import importlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..checkpoints.files import check_links, check_new_folder, new_folder
from ..checkpoints.headers import is_own_model, read_json
from ..checkpoints.kinds import CONFIG
from ..errors import first_line, install
from ..hub.facts import RunFacts, inherited, local_name, read_facts, said_by_author, with_what_was_said
from ..hub.model_card import save_card
from ..hub.upload import LICENSE_OF_CODE
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from . import FORMATS, STOCK


def export(
    model: VanillaTransformerForConditionalGeneration,
    output: str | Path,
    *,
    to: str,
    tokenizer: PreTrainedTokenizerBase,
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
    write = writer_of(to)
    check_new_folder(Path(output))
    facts, changed = facts_about(model, source) if to in STOCK else (None, None)
    with new_folder(Path(output)) as folder:
        notes = write(model, tokenizer, folder, **options)
        _copy_licence(folder, source)
        if facts is not None:
            save_stock_card(folder, Path(output), facts, notes)
            notes = [*notes, *filter(None, [changed])]
    return notes


def writer_of(to: str) -> Callable[..., list[str]]:
    """Imports the function that writes a format into an empty folder; errors are those of `export`."""
    if to not in FORMATS:
        raise ValueError(f"there is no format {to!r}; give one of {', '.join(FORMATS)}")
    try:
        write: Callable[..., list[str]] = getattr(importlib.import_module(f".{to}", __package__), f"write_{to}")
    except ImportError as error:
        raise ImportError(f"{to} needs more packages ({first_line(error)}): {install('export')}") from error
    return write


def facts_about(
    model: VanillaTransformerForConditionalGeneration, source: str | Path | None
) -> tuple[RunFacts, str | None]:
    """Returns what is known about a model that comes from a folder or a name on the Hub, and a note as `read_facts`."""
    folder = Path(source) if source is not None and Path(source).is_dir() else None
    if folder is not None and is_own_model(folder):
        return read_facts(folder)
    said = inherited(str(source or "")) if folder is None else said_by_author(folder)
    facts = RunFacts("", config=model.config.to_dict(), parameters=model.num_parameters(), converted=True)
    return with_what_was_said(facts, said), None


def save_stock_card(folder: Path, place: Path | str, facts: RunFacts, notes: Sequence[str]) -> None:
    """Writes the card of a model that was exported as one of transformers' own; `place` is its folder or repository."""
    (kind,) = read_json(folder / CONFIG)["architectures"]
    limits = [facts.limits, *(f"{one[0].upper()}{one[1:]}." for one in notes)]
    name = local_name(place) if isinstance(place, Path) else place
    save_card(folder, replace(facts, name=name, stock=kind, limits="\n\n".join(filter(None, limits))))


def _copy_licence(folder: Path, source: str | Path | None) -> None:
    """Copies the licence of the weights; that of code stays where the code is."""
    found = [] if source is None else [one for one in Path(source).glob("LICENSE*") if one.name != LICENSE_OF_CODE]
    check_links(Path(source or "."), found, in_cache=True)
    for file in found:
        shutil.copyfile(file, folder / file.name)


__all__ = ["export"]
