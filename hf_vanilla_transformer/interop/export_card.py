"""The card and the licence of an exported model: those of the folder it comes from, and what the export changed."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..checkpoints.files import check_links
from ..checkpoints.headers import read_json
from ..checkpoints.kinds import CONFIG
from ..checkpoints.loading import MODEL_TYPE
from ..hub.facts import RunFacts, inherited, local_name, read_facts, said_by_author, with_what_was_said
from ..hub.model_card import save_card
from ..hub.upload import LICENSE_OF_CODE
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration


def facts_about(
    model: VanillaTransformerForConditionalGeneration, source: str | Path | None
) -> tuple[RunFacts, str | None]:
    """Returns what is known about a model that comes from a folder or a name on the Hub, and a note as `read_facts`.

    Raises:
        CardError: The folder's card can't be read.
    """
    folder = Path(source) if source is not None and Path(source).is_dir() else None
    if folder is not None and read_json(folder / CONFIG).get("model_type") == MODEL_TYPE:
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


def copy_licence(folder: Path, source: str | Path | None) -> None:
    """Copies the licence of the weights; that of code stays where the code is."""
    found = [] if source is None else [one for one in Path(source).glob("LICENSE*") if one.name != LICENSE_OF_CODE]
    check_links(Path(source or "."), found, in_cache=True)
    for file in found:
        shutil.copyfile(file, folder / file.name)
