"""`vanilla-transformer plot`."""

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import install
from .arguments import LANGUAGES, LOADING, add, given, positive
from .models import check_model_name, decoding_errors, load_translator
from .output import UsageError, check_output, say_written

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

PAGE = ".html"
# Part -> its name, the tokens attended to, and those that attend.
PARTS = {
    "encoder": ("Encoder self-attention", "source", "source"),
    "decoder": ("Decoder self-attention", "input", "target"),
    "cross": ("Cross-attention", "source", "target"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Draw attention or learning curves."""
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", dest="kind", required=True)
    for name, declare in KINDS.items():
        kind = kinds.add_parser(name, help=declare.__doc__, description=declare.__doc__, allow_abbrev=False)
        declare(kind)
        kind.set_defaults(parser=kind, run=_plot)
        kind.add_argument("--output", required=True, metavar="FILE", help=" or ".join(kind.get_default("formats")))
        add(kind, "overwrite", "debug")


def _add_attention(parser: argparse.ArgumentParser) -> None:
    """Where each token attends to, for one sentence; in .html, all layers and heads."""
    add(parser, "model", *LANGUAGES, *LOADING)
    parser.add_argument("--source", required=True, metavar="TEXT", help="the sentence")
    parser.add_argument("--target", metavar="TEXT", help="its translation (default: the model's own)")
    parser.add_argument("--part", choices=PARTS, help="whose attention (default: cross, the decoder's to the source)")
    parser.add_argument("--layer", type=_number, metavar="N|all|mean", help="from 1 (default: the last)")
    parser.add_argument("--heads", "--head", type=_number, metavar="N|all|mean", help="from 1 (default: all)")
    parser.set_defaults(draw=_attention, formats=(".png", ".svg", PAGE))


def _add_curves(parser: argparse.ArgumentParser) -> None:
    """Loss, perplexity and BLEU of trainings by update."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs, or their trainer_state.json")
    parser.set_defaults(draw=_curves, formats=(".png", ".svg"))


KINDS = {"attention": _add_attention, "curves": _add_curves}


def _number(text: str) -> int | str:
    return text if text in ("all", "mean") else positive(text)


def _plot(arguments: argparse.Namespace) -> None:
    """Checks the output before any work is done, draws, and writes."""
    output, suffix = arguments.output, Path(arguments.output).suffix.lower()
    if suffix not in arguments.formats:
        raise UsageError(f"--output {output} has to end with {' or '.join(arguments.formats)}")
    if suffix != PAGE and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"matplotlib isn't installed, and plots need it: {install('plot')}")
    check_output("--output", output, arguments.overwrite)
    from ..checkpoints.files import replacing, write_text

    with decoding_errors():
        drawn = arguments.draw(arguments, suffix == PAGE)
    if isinstance(drawn, str):
        write_text(output, drawn)
    else:
        with replacing(output) as file:
            drawn.savefig(file, format=suffix[1:], dpi=120)
    say_written(output)


def _attention(arguments: argparse.Namespace, is_page: bool) -> "Figure | str":
    """Draws attention, or returns its page."""
    if is_page and (arguments.part or arguments.layer or arguments.heads):
        raise UsageError("an .html page has all layers and heads to choose from; leave out --part, --layer and --heads")
    if not (arguments.source.strip() and (arguments.target or "-").strip()):
        raise UsageError("the text is empty; give a sentence")
    check_model_name(arguments.model)
    from ..translation.attention import attention_of

    translator, languages = load_translator(arguments.model, arguments), given(arguments, *LANGUAGES)
    attention = attention_of(translator.model, translator.tokenizer, arguments.source, arguments.target, **languages)
    if is_page:
        from ..explain.attention import attention_page

        return attention_page(attention, f"Attention: {arguments.source}")
    from ..plots.attention import plot_attention

    part = arguments.part or "cross"
    title, keys, queries = PARTS[part]
    weights = getattr(attention, part)  # (layers, heads, T, S)
    weights, layers = _chosen(weights, 0, arguments.layer or len(weights), "layer")
    weights, heads = _chosen(weights, 1, arguments.heads or "all", "head")
    columns, rows = getattr(attention, f"{keys}_pieces"), getattr(attention, f"{queries}_pieces")
    labels = f"{keys} token attended to", f"{queries} token that attends"
    each = len(heads) if len(layers) > 1 else None  # a row for each layer
    figure = plot_attention(weights.flatten(0, 1), columns, rows, title, labels, each)
    for panel, name in zip(figure.axes, [f"{layer}, {head}" for layer in layers for head in heads], strict=False):
        panel.set_title(name)
    return figure


def _chosen(weights: "Tensor", axis: int, choice: int | str, unit: str) -> "tuple[Tensor, list[str]]":
    """Returns the weights of the layers or heads that are chosen, and their names."""
    count = weights.shape[axis]
    if choice == "mean":
        return weights.mean(axis, keepdim=True), [f"mean of {count} {unit}s"]
    first, number = (0, count) if choice == "all" else (int(choice) - 1, 1)
    if first >= count:
        raise ValueError(f"{unit} {choice} doesn't exist: there are {unit}s 1 to {count}")
    return weights.narrow(axis, first, number), [f"{unit} {one + 1} of {count}" for one in range(first, first + number)]


def _curves(arguments: argparse.Namespace, is_page: bool) -> "Figure":
    from ..plots.curves import plot_training
    from ..training.run_folder import read_log

    return plot_training({run: read_log(run) for run in arguments.runs}, f"Training of {', '.join(arguments.runs)}")
