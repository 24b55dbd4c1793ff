"""`vanilla-transformer card`."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import RunError, UsageError, show

if TYPE_CHECKING:
    from ..hub.model_card import RunFacts


def _pattern(pattern: str, what: str) -> Any:
    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return text

    return parse


_language = _pattern(r"[a-z]{2,3}(-[A-Za-z0-9]{1,8})*", "a language's ISO 639 code, such as en or deu")
_license = _pattern(r"[a-z0-9][a-z0-9.-]*", "a licence as the Hub writes it, such as apache-2.0 or cc-by-4.0")
_dataset = _pattern(r"\w[\w.-]*(/\w[\w.-]*)?", "a data set's name on the Hub, such as user/name")
_repository = _pattern(r"[A-Za-z0-9][\w.-]*/[\w.-]+", "a repository's name; give user/name")
_line = _pattern(r"[^\r\n]*\S[^\r\n]*", "one line of text")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Write a model's card from what its training saved."""
    parser.epilog = (
        "The card leaves out what isn't known. Languages, licence, data sets and base model in the metadata of an "
        "existing card are kept."
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the model's folder; the card is its README.md")
    parser.add_argument(
        "--name",
        type=_repository,
        metavar="USER/NAME",
        help="the model's name on the Hub, which the card's code loads it by (default: as it is, or the folder)",
    )
    parser.add_argument("--title", type=_line, metavar="TEXT", help="the card's title (default: the name)")
    parser.add_argument(
        "--source-lang", type=_language, metavar="CODE", help="code of the language it translates from, such as en"
    )
    parser.add_argument(
        "--target-lang", type=_language, metavar="CODE", help="code of the language it translates to, such as de"
    )
    parser.add_argument(
        "--language",
        nargs="+",
        action="extend",
        default=[],
        type=_language,
        metavar="CODE",
        help="its languages, if it has more than two or no direction",
    )
    parser.add_argument("--license", type=_license, metavar="ID", help="licence of the weights, such as apache-2.0")
    parser.add_argument(
        "--dataset",
        "--dataset-name",
        nargs="+",
        action="extend",
        default=[],
        type=_dataset,
        metavar="NAME",
        help="data sets on the Hub that it was trained on",
    )
    parser.add_argument("--limits", type=_line, metavar="TEXT", help="what the model can't do, a sentence or two")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing card")
    parser.set_defaults(run=_card)


def _card(arguments: argparse.Namespace) -> None:
    """Writes the card."""
    folder: Path = arguments.folder
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; DIR must be that of a saved model")

    from ..checkpoints.files import LinkError
    from ..hub.facts import CardError, read_facts
    from ..hub.model_card import CARD, save_card

    if (folder / CARD).exists() and not arguments.overwrite:
        raise UsageError(f"{folder / CARD} exists; give --overwrite to replace it")
    try:
        facts, note = read_facts(folder)
        facts = _completed(facts, arguments)
        save_card(folder, facts)
    except (CardError, LinkError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise RunError(str(error)) from error
    show(f"wrote {folder / CARD}")
    for line in filter(None, (note, *_missing(facts))):
        show(f"note: {line}")


def _completed(facts: "RunFacts", arguments: argparse.Namespace) -> "RunFacts":
    """Puts what the user says in place of what was known."""
    from dataclasses import replace

    given = {
        "name": arguments.name,
        "title": arguments.title,
        "source_language": arguments.source_lang,
        "target_language": arguments.target_lang,
        "license": arguments.license,
        "datasets": arguments.dataset,
        "limits": arguments.limits,
    }
    facts = replace(facts, **{name: value for name, value in given.items() if value})
    if arguments.language or arguments.source_lang or arguments.target_lang:  # all of them are replaced
        facts = replace(facts, languages=arguments.language)
    return facts


def _missing(facts: "RunFacts") -> list[str]:
    """What only the user can know."""
    options = {
        "languages (--source-lang, --target-lang)": (facts.source_language, facts.languages),
        "licence (--license)": (facts.license,),
    }
    return [f"the card names no {what}" for what, values in options.items() if not any(values)]
