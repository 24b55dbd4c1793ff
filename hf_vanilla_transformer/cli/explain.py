"""`vanilla-transformer explain`."""

import argparse
from contextlib import suppress
from pathlib import Path

from .arguments import add
from .models import load_model
from .output import check_output, check_output_folder, say_written, show

PAGE = ".html"
EXAMPLES = 3  # sentences of a model's card, where none are given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Write a page that shows how a model computes, live in the browser."""
    parser.epilog = (
        "The page contains the model and computes it: it needs no server, loads nothing and opens from a file. A "
        "folder is a static Space for the Hub."
    )
    add(parser, "model", "trust_remote_code", "overwrite")
    add(parser, "output", metavar="PAGE.html|DIR", help="the page, or a new folder with the page and a card")
    sentences = "sentences to choose from; the page begins with the first (default: those of the model's card)"
    parser.add_argument("--example", nargs="+", action="extend", default=[], metavar="TEXT", help=sentences)
    title = "the page's title (default: that of the model's card, or --model)"
    parser.add_argument("--title", metavar="TEXT", help=title)
    parser.add_argument(
        "--quantization",
        choices=["float32", "int8"],
        default="float32",
        help="type of the weights; int8: 8 bits, for up to 15 million parameters instead of 3.7 (default: float32)",
    )
    language = "language of the page's texts; readers can change it"
    parser.add_argument("--language", choices=["en", "zh"], default="en", help=language)
    parser.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> None:
    from ..checkpoints.files import write_text

    output, is_page = arguments.output, arguments.output.lower().endswith(PAGE)
    if is_page:
        check_output("--output", output, arguments.overwrite)
    else:
        check_output_folder(output, f"; a page's name ends with {PAGE}")
    said, samples = _of_card(folder := Path(arguments.model))
    title = arguments.title or said or folder.absolute().name
    tokenizer, model = load_model(arguments)
    from ..explain.page import model_page
    from ..explain.space import write_space

    how = {"quantization": arguments.quantization, "language": arguments.language}
    page = model_page(model, tokenizer, title, arguments.example or samples, **how)
    if is_page:
        write_text(output, page)
        say_written(output)
        return
    write_space(page, title, Path(output))
    show(f"wrote the static Space {output}; open {output}/index.html, or upload the folder")


def _of_card(folder: Path) -> tuple[str | None, list[str]]:
    """Returns the title and the longest sentences of a model's card, if it has one."""
    from ..hub.facts import read_facts

    with suppress(ValueError, OSError):
        facts, _ = read_facts(folder)
        sentences = sorted((sample.source for sample in facts.samples), key=lambda one: -len(one.split()))
        return facts.title, sentences[:EXAMPLES]  # in longer ones, each part of a model makes a difference
    return None, []
