"""`vanilla-transformer card`."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import RunError, UsageError

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
        "What isn't known is left out of the card. Languages, licence, data sets and base model in the metadata of "
        "an existing card are kept."
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
    parser.add_argument(
        "--benchmark",
        type=_dataset,
        metavar="NAME",
        help="a benchmark's data set on the Hub that the test set is; with --task, the score is also written into "
        ".eval_results/, from where the Hub takes it into the benchmark's table",
    )
    parser.add_argument("--task", type=_line, metavar="ID", help="the task, as the benchmark's eval.yaml calls it")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing card")
    parser.set_defaults(run=_card)


def _card(arguments: argparse.Namespace) -> None:
    """Writes the card, and the benchmark's result where one is asked for."""
    folder: Path = arguments.folder
    if (arguments.benchmark is None) != (arguments.task is None):
        raise UsageError("--benchmark and --task name a result together; give both or neither")
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; DIR must be that of a saved model")
    result = folder / ".eval_results" / f"{(arguments.benchmark or '').replace('/', '--')}.yaml"
    files = [folder / "README.md", *([result] if arguments.benchmark else [])]
    for file in files:
        if file.exists() and not arguments.overwrite:
            raise UsageError(f"{file} exists; give --overwrite to replace it")

    from ..checkpoints.files import LinkError, check_links, write_text
    from ..hub.facts import CardError, eval_results, read_facts
    from ..hub.model_card import CARD, FACTS, save_card

    try:
        check_links(folder, [*files, folder / FACTS])
        facts, note = read_facts(folder)
        facts = _completed(facts, arguments)
        text = eval_results(facts, arguments.benchmark, arguments.task) if arguments.benchmark else None
        save_card(folder, facts)
        if text is not None:
            result.parent.mkdir(exist_ok=True)
            write_text(result, text)
    except (CardError, LinkError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise RunError(str(error)) from error
    print(f"wrote {folder / CARD}" + (f" and {result}" if text is not None else ""))
    for line in filter(None, (note, *_missing(facts))):
        print(f"note: {line}")


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
