"""`vanilla-transformer card`."""

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import add
from .output import UsageError, show

if TYPE_CHECKING:
    from ..hub.facts import RunFacts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Write a model's card from what its training saved."""
    parser.epilog = (
        "The card leaves out what isn't known. Languages, licence, data sets and base model in the metadata of an "
        "existing card are kept."
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the model's folder; the card is its README.md")
    for option, metavar, text in (
        ("name", "USER/NAME", "the model's name on the Hub, for its code (default: that in the card, or the folder)"),
        ("title", "TEXT", "the card's title (default: the name)"),
        ("license", "ID", "licence of the weights, such as apache-2.0"),
        ("base-model", "NAME", "the model on the Hub that it was converted or trained from"),
        ("limits", "TEXT", "what the model can't do, a sentence or two"),
    ):
        parser.add_argument(f"--{option}", metavar=metavar, help=text)
    for side, what in (("source", "from, such as en"), ("target", "to, such as de")):
        text = f"code of the language it translates {what}"
        parser.add_argument(f"--{side}-lang", dest=f"{side}_language", metavar="CODE", help=text)
    several: Any = {"nargs": "+", "action": "extend", "default": []}
    text = "its languages, if it has more than two or no direction"
    parser.add_argument("--language", dest="languages", metavar="CODE", help=text, **several)
    text = "data sets on the Hub that it was trained on"
    parser.add_argument("--dataset", "--dataset-name", dest="datasets", metavar="NAME", help=text, **several)
    add(parser, "overwrite", help="replace an existing card")
    parser.set_defaults(run=_card)


def _card(arguments: argparse.Namespace) -> None:
    folder: Path = arguments.folder
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; DIR must be that of a saved model")

    from ..checkpoints.code import other_code
    from ..checkpoints.headers import is_own_model
    from ..checkpoints.kinds import CARD, FACTS
    from ..hub.facts import is_repository, local_name, read_facts
    from ..hub.model_card import save_card

    if arguments.name is not None and not is_repository(arguments.name):
        raise UsageError(f"--name {arguments.name} is not a repository's name; give user/name")
    if (folder / CARD).exists() and not arguments.overwrite:
        raise UsageError(f"{folder / CARD} exists; give --overwrite to replace it")
    facts, note = read_facts(folder)
    if not (is_own_model(folder) or (folder / FACTS).exists()):
        raise UsageError(f"{folder} has neither a model of this package nor {FACTS}; write its {CARD} by hand")
    if not is_repository(facts.name):
        facts = replace(facts, name=local_name(folder))
    save_card(folder, facts := _completed(facts, arguments))
    show(f"wrote {folder / CARD}", filter(None, (note, other_code(folder).note(folder), *_missing(facts))))


def _completed(facts: "RunFacts", arguments: argparse.Namespace) -> "RunFacts":
    """Replaces facts by the user's options."""
    given = {one.name: getattr(arguments, one.name) for one in fields(facts) if getattr(arguments, one.name, None)}
    directed = {"source_language": None, "target_language": None}
    if "languages" in given and not given.keys() & directed.keys():
        given |= directed
    elif given.keys() & directed.keys():  # all languages are replaced
        given.setdefault("languages", [])
    return replace(facts, **given)


def _missing(facts: "RunFacts") -> list[str]:
    """Lists the facts that only the user can know and that the card lacks."""
    options = {
        "languages (--source-lang, --target-lang)": facts.source_language or facts.target_language or facts.languages,
        "licence (--license)": facts.license or facts.metadata.get("license"),
        "base model (--base-model)": not facts.converted or facts.base_model or facts.metadata.get("base_model"),
    }
    return [f"the card names no {what}" for what, value in options.items() if not value]
