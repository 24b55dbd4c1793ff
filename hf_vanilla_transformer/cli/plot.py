"""`vanilla-transformer plot`."""

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import first_line, install
from .arguments import LANGUAGES, add_debug, add_language_arguments, add_loading_arguments, add_model, natural, positive
from .models import check_model_name, load_translator
from .output import UsageError, check_output, say_written

if TYPE_CHECKING:
    from ..plots.attention import Choice, Part
    from ..plots.curves import Figure

PICTURES = (".png", ".svg")
PAGE = ".html"
ENCODINGS = ("paper", "tensor2tensor", "fairseq", "marian")
# d_model and warm-up of the schedules that are drawn by default.
PAPER = {
    "d_model 512, warm-up 4,000 (base)": (512, 4000),
    "d_model 1,024, warm-up 4,000 (big)": (1024, 4000),
    "d_model 512, warm-up 8,000": (512, 8000),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Draw attention, positions, schedules, masks or learning curves."""
    parser.epilog = "`vanilla-transformer plot KIND --help` lists the options of a kind. Plots need no screen."
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", dest="kind", required=True)
    for name, add in KINDS.items():
        summary = (add.__doc__ or "").splitlines()[0]
        kind = kinds.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        kind.set_defaults(parser=kind, run=_plot)
        add(kind)
        page = ", or .html for a page with all layers and heads" if name == "attention" else ""
        kind.add_argument("--output", required=True, metavar="FILE", help=f"the picture, .png or .svg{page}")
        kind.add_argument("--overwrite", action="store_true", help="replace an existing file")
        add_debug(kind)


def _add_attention(parser: argparse.ArgumentParser) -> None:
    """Where each token attends to, for one sentence."""
    add_model(parser)
    parser.add_argument("--source", required=True, type=_text, metavar="TEXT", help="the sentence")
    parser.add_argument(
        "--target", type=_text, metavar="TEXT", help="its translation (default: the model's own, as translate gives it)"
    )
    parser.add_argument(
        "--part",
        choices=["encoder", "decoder", "cross"],
        help="self-attention of the encoder or of the decoder, or the decoder's to the source (default: cross)",
    )
    parser.add_argument("--layer", type=_number_or("all"), metavar="N|all", help="from 1 (default: the last)")
    parser.add_argument(
        "--heads", "--head", type=_number_or("all", "mean"), metavar="N|all|mean", help="from 1 (default: all)"
    )
    add_language_arguments(parser)
    add_loading_arguments(parser)
    parser.set_defaults(draw=_attention)


def _add_positions(parser: argparse.ArgumentParser) -> None:
    """The sinusoids of section 3.5 and their dot products."""
    parser.add_argument(
        "--encoding", choices=ENCODINGS, default="paper", help="order of the sinusoids (default: paper)"
    )
    parser.add_argument("--d-model", type=positive, default=512, metavar="N", help="width (default: 512)")
    parser.add_argument("--positions", type=positive, default=100, metavar="N", help="how many (default: 100)")
    parser.set_defaults(draw=_positions)


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    """Learning rates by update, as in section 5.3."""
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="recipes, by name or file, and folders of runs with logged rates (default: the paper's base "
        "and big model, with 4,000 and 8,000 updates of warm-up)",
    )
    parser.add_argument(
        "--updates",
        type=positive,
        metavar="N",
        help="updates shown (default: those of the longest run, else 5 times the warm-up)",
    )
    parser.set_defaults(draw=_schedule)


def _add_masks(parser: argparse.ArgumentParser) -> None:
    """The padding mask and the causal mask of section 3.2.3."""
    parser.add_argument(
        "--source", type=_text, default="It is half past three .", metavar="TEXT", help="words of the source"
    )
    parser.add_argument(
        "--target", type=_text, default="Es ist halb vier .", metavar="TEXT", help="words of the target"
    )
    parser.add_argument("--padding", type=natural, default=2, metavar="N", help="padding after each (default: 2)")
    parser.set_defaults(draw=_masks)


def _add_curves(parser: argparse.ArgumentParser) -> None:
    """Loss, perplexity and BLEU of trainings by update."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="output folders of `vanilla-transformer train`, or trainer_state.json files; of a run that is still "
        "training, what its last checkpoint knows",
    )
    parser.set_defaults(draw=_curves)


KINDS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "attention": _add_attention,
    "positions": _add_positions,
    "schedule": _add_schedule,
    "masks": _add_masks,
    "curves": _add_curves,
}


def _text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("the text is empty; give a sentence")
    return text


def _number_or(*words: str) -> Callable[[str], int | str]:
    def parse(text: str) -> int | str:
        return text if text in words else positive(text)

    return parse


def _plot(arguments: argparse.Namespace) -> None:
    """Checks the output, draws the figure of a kind, and saves it; a page is written by its kind."""
    _check_output(arguments)
    try:
        figure = arguments.draw(arguments)
    except (ValueError, IndexError) as error:  # IndexError: a token that the model doesn't have
        raise UsageError(first_line(error)) from error
    if figure is not None:
        from ..plots.curves import save_figure

        save_figure(figure, arguments.output)
    say_written(arguments.output)


def _attention(arguments: argparse.Namespace) -> "Figure | None":
    """Computes the attention of a sentence and draws it, or writes a page."""
    is_page = _suffix(arguments) == PAGE
    part: Part = arguments.part or "cross"
    heads: Choice = arguments.heads or "all"
    if is_page and (arguments.part or arguments.layer or arguments.heads):
        raise UsageError("an .html page has all layers and heads to choose from; leave out --part, --layer and --heads")
    check_model_name(arguments.model)
    from ..translation.attention import attention_of

    translator = load_translator(arguments.model, arguments)
    languages = {name: getattr(arguments, name) for name in LANGUAGES}
    attention = attention_of(translator.model, translator.tokenizer, arguments.source, arguments.target, **languages)
    if is_page:
        from ..checkpoints.files import write_text
        from ..explain.attention import attention_page

        write_text(arguments.output, attention_page(attention, f"Attention: {arguments.source}"))
        return None
    from ..plots.attention import of_part
    from ..plots.curves import draw_attention

    layers = len(of_part(attention, part)[0])
    return draw_attention(attention, part, layer=arguments.layer or layers, heads=heads)


def _positions(arguments: argparse.Namespace) -> "Figure":
    from ..plots.curves import plot_positions

    return plot_positions(arguments.encoding, arguments.d_model, arguments.positions)


def _masks(arguments: argparse.Namespace) -> "Figure":
    from ..plots.curves import plot_masks

    source, target = [*arguments.source.split(), "</s>"], ["<s>", *arguments.target.split()]
    return plot_masks(source, target, arguments.padding)


def _schedule(arguments: argparse.Namespace) -> "Figure":
    """Draws the schedules of recipes, and the logged rates of runs."""
    from ..plots.curves import Schedule, plot_schedule
    from ..training.run_folder import read_log
    from ..training.schedule import paper_learning_rate, schedule_of_recipe

    runs = [name for name in arguments.names if Path(name).is_dir() or Path(name).suffix == ".json"]
    schedules = {name: Schedule(*schedule_of_recipe(name)) for name in arguments.names if name not in runs}
    if not arguments.names:
        schedules = {name: Schedule(paper_learning_rate(*sizes), sizes[1]) for name, sizes in PAPER.items()}
    rates = {
        name: [(int(one["step"]), one["learning_rate"]) for one in read_log(run) if "learning_rate" in one]
        for name, run in _named(runs).items()
    }
    return plot_schedule(schedules, arguments.updates, logged=rates)


def _curves(arguments: argparse.Namespace) -> "Figure":
    """Draws the logs of runs."""
    from ..plots.curves import plot_training
    from ..training.run_folder import read_log

    logs = {name: read_log(run) for name, run in _named(arguments.runs).items()}
    return plot_training(logs, f"Training of {', '.join(logs)}, by updates")


def _named(runs: list[str]) -> dict[str, str]:
    """Names each run by its folder, also where a file in it is given."""
    names: dict[str, str] = {}
    for run in runs:
        path = Path(run).resolve()
        folder = path if path.is_dir() or path.suffix != ".json" else path.parent
        name = folder.parent.name if folder.name == "model" else folder.name  # outputs/quickstart/model
        if name in names:
            raise UsageError(f"two runs are called {name}; rename a folder, so that their lines can be told apart")
        names[name] = run
    return names


def _suffix(arguments: argparse.Namespace) -> str:
    return Path(arguments.output).suffix.lower()


def _check_output(arguments: argparse.Namespace) -> None:
    """Checks, before any work is done, that the picture can be drawn and written."""
    suffix = _suffix(arguments)
    known = (*PICTURES, PAGE) if arguments.kind == "attention" else PICTURES
    if suffix not in known:
        hint = "; .html is for attention" if suffix == PAGE else ""
        raise UsageError(f"--output {arguments.output} has to end with {' or '.join(known)}{hint}")
    if suffix != PAGE and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"matplotlib isn't installed, and plots need it: {install('plot')}")
    check_output("--output", arguments.output, arguments.overwrite)
