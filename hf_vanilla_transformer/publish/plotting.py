"""Plots of attention weights and learning curves. They need no screen and don't change matplotlib's global state."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

try:
    from matplotlib import font_manager
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ft2font import FT2Font
    from matplotlib.image import AxesImage
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter
except ImportError as error:
    raise ImportError("Plots need matplotlib: pip install hf-vanilla-transformer[plot]") from error

FONT_SIZE = 8
INCHES_PER_PIECE = 0.17  # so that neighbouring labels of FONT_SIZE don't touch
PANEL_INCHES = (1.6, 7.0)  # a panel's smallest and largest side; beyond the largest, only every n-th label is shown
LONGEST_LABEL = 18

# Used if installed, in addition to matplotlib's own font, which lacks the scripts of East and South Asia.
FALLBACK_FONTS = (
    "Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans Devanagari", "Noto Sans Thai", "WenQuanYi Zen Hei",
    "Hiragino Sans", "PingFang SC", "Microsoft YaHei", "Arial Unicode MS", "Nirmala UI",
)  # fmt: skip
MISSING_GLYPH = "\N{WHITE SQUARE}"

Weights = torch.Tensor | npt.NDArray[np.floating]


def plot_attention(
    weights: Weights,
    source_pieces: Sequence[str],
    target_pieces: Sequence[str],
    *,
    heads: Literal["all", "mean"] = "all",
    title: str | None = None,
) -> Figure:
    """Heat maps of where each target piece attends to: one layer's weights for one sentence.

    Args:
        weights: (heads, target length, source length), each row a distribution over the source; for instance
            `model(..., output_attentions=True).cross_attentions[-1][0]`.
        source_pieces: The tokens attended to, in columns.
        target_pieces: The tokens that attend, in rows.
        heads: "all" for one map per head, "mean" for one map of their average.
        title: Is written above the maps.

    Returns:
        A figure; `figure.savefig("attention.png")` writes it.

    Raises:
        TypeError: The pieces are one string.
        ValueError: The weights' shape doesn't fit the pieces, or their rows are not distributions.
    """
    maps = _checked_weights(weights, source_pieces, target_pieces)
    if heads not in ("all", "mean"):
        raise ValueError(f'heads={heads!r}; choose "all" for one map per head or "mean" for their average')
    if heads == "mean":
        names, maps = [f"mean of {len(maps)} heads"], maps.mean(axis=0, keepdims=True)
    else:
        names = [f"head {number}" for number in range(1, len(maps) + 1)]

    figure, panels = _grid(len(maps), _side(len(source_pieces)), _side(len(target_pieces)))
    family, fonts = _fonts()
    largest = float(maps.max())
    for panel, name, head in zip(panels, names, maps, strict=True):
        # All maps have one colour scale, so that heads can be compared.
        image = panel.imshow(head, cmap="Blues", vmin=0.0, vmax=largest, aspect="auto", interpolation="nearest")
        panel.set_title(name, fontsize=FONT_SIZE + 1)
        _label(panel, "x", [_readable(piece, fonts) for piece in source_pieces], family)
        _label(panel, "y", [_readable(piece, fonts) for piece in target_pieces], family)
    _colour_bar(figure, panels, image)
    if title is not None:
        figure.suptitle(_readable(title, fonts, longest=200), family=family, parse_math=False, wrap=True)
    return figure


def plot_training(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """Learning curves: loss of training, and perplexity and BLEU of validation, by updates.

    Args:
        runs: Name -> the Trainer's log, `trainer.state.log_history` or `log_history` of a trainer_state.json.

    Returns:
        A figure with one panel for each of the three that occurs in any log.

    Raises:
        ValueError: None of them occurs in a log.
    """
    curves = [("loss", "training loss"), ("eval_perplexity", "validation perplexity"), ("eval_bleu", "validation BLEU")]
    shown = [(key, title) for key, title in curves if any(key in entry for log in runs.values() for entry in log)]
    if not shown:
        raise ValueError("no log has a loss, a perplexity or a BLEU score; give `trainer.state.log_history` of runs")
    figure = Figure(figsize=(4.0 * len(shown), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, (key, title) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for name, log in runs.items():
            points = [(entry["step"], entry[key]) for entry in log if key in entry]
            if points:
                panel.plot(*zip(*points, strict=True), label=name, linewidth=1.2)
        panel.set(title=title, xlabel="updates")
        panel.xaxis.set_major_locator(MaxNLocator(5))
        panel.grid(alpha=0.3)
        if key == "eval_perplexity":
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
            panel.yaxis.set_major_formatter(ScalarFormatter())
            panel.yaxis.set_minor_formatter(NullFormatter())
    if len(runs) > 1:
        panel.legend(fontsize=FONT_SIZE)
    return figure


def _checked_weights(
    weights: Weights, source_pieces: Sequence[str], target_pieces: Sequence[str]
) -> npt.NDArray[np.float32]:
    """Returns the weights as float32, (heads, target length, source length), if they fit the pieces."""
    for name, pieces in (("source_pieces", source_pieces), ("target_pieces", target_pieces)):
        if isinstance(pieces, str):
            raise TypeError(f"{name} is one string; give the list of its pieces, tokenizer.tokenize(text)")
    if isinstance(weights, torch.Tensor):
        weights = weights.detach().to(device="cpu", dtype=torch.float32).numpy()
    maps = np.asarray(weights, dtype=np.float32)
    pieces_shape = (len(target_pieces), len(source_pieces))
    if maps.ndim != 3 or maps.shape[1:] != pieces_shape or 0 in maps.shape:
        hint = "; take one sentence of a batch: weights[0]" if maps.ndim == 4 else ""
        raise ValueError(
            f"weights have shape {maps.shape}, but {len(target_pieces)} target pieces and {len(source_pieces)} source "
            f"pieces need (heads, target length, source length) = (heads, {pieces_shape[0]}, {pieces_shape[1]}){hint}"
        )
    sums = maps.sum(axis=-1)
    # Rows of zeros are padding. The tolerance is for bfloat16.
    if not np.all((np.abs(sums - 1) < 0.02) | (sums == 0)) or maps.min() < 0:
        raise ValueError(
            "the rows of weights are not distributions (not negative, with sum 1); give attention weights after the "
            "softmax, of a model in evaluation mode: model.eval() switches dropout off"
        )
    return maps


def _side(pieces: int) -> float:
    smallest, largest = PANEL_INCHES
    return min(max(smallest, pieces * INCHES_PER_PIECE), largest)


def _columns(count: int, width: float, height: float) -> int:
    """Number of columns that gives the grid a screen's proportions with few empty panels: 4 for 8 square panels."""

    def misfit(columns: int) -> float:
        rows = math.ceil(count / columns)
        proportion = columns * width / (rows * height)
        return abs(math.log(proportion / 1.5)) + 3 * (columns * rows - count) / count

    return min(range(1, count + 1), key=misfit)


def _grid(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with `count` empty panels of the given size in inches."""
    columns = _columns(count, width, height)
    rows = math.ceil(count / columns)
    # Add space for labels on the left and below, for a title above each panel and for the colour bar on the right.
    figure = Figure(figsize=(columns * (width + 0.15) + 2.0, rows * (height + 0.35) + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for unused in panels[count:]:
        unused.remove()
    # Only outer panels have labels; above a gap in the last row, the outer panel is that of the row before.
    for panel in panels[max(0, count - columns) : count]:
        panel.xaxis.set_tick_params(which="both", labelbottom=True)
    return figure, panels[:count]


def _label(panel: Axes, axis: Literal["x", "y"], labels: list[str], family: list[str]) -> None:
    # If the panel is too small for all labels, label every n-th piece.
    step = math.ceil(len(labels) * INCHES_PER_PIECE / PANEL_INCHES[1])
    positions = list(range(0, len(labels), step))
    set_ticks = panel.set_xticks if axis == "x" else panel.set_yticks
    shown = [labels[position] for position in positions]
    set_ticks(positions, shown, fontsize=FONT_SIZE, family=family, parse_math=False, rotation=90 if axis == "x" else 0)
    panel.tick_params(length=2, color="grey")
    panel.spines[:].set_color("lightgrey")


def _colour_bar(figure: Figure, panels: list[Axes], image: AxesImage) -> None:
    bar = figure.colorbar(image, ax=panels, label="attention weight", shrink=0.6, aspect=30, pad=0.02)
    bar.outline.set_visible(False)


def _fonts() -> tuple[list[str], list[FT2Font]]:
    """Names and files of the fonts in which characters are looked up, in this order."""
    installed = {font.name for font in font_manager.fontManager.ttflist}
    family = ["DejaVu Sans", *(name for name in FALLBACK_FONTS if name in installed)]
    return family, [font_manager.get_font(font_manager.findfont(name)) for name in family]


def _readable(text: str, fonts: list[FT2Font], longest: int = LONGEST_LABEL) -> str:
    """The text with a symbol for each character that is invisible or in no font, which matplotlib would warn of."""
    if not text.strip():
        return "\N{OPEN BOX}" * max(1, min(len(text), longest))
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    return "".join(
        character if character.isprintable() and any(font.get_char_index(ord(character)) for font in fonts)
        else MISSING_GLYPH
        for character in text
    )  # fmt: skip
