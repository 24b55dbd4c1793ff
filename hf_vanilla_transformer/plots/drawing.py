"""Shared by the plots: figures without a screen, fonts, colours, heat maps with tokens, and writing a file.

Nothing here changes matplotlib's global state. Sizes are made for a picture that is 1,000 pixels wide.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checkpoints.files import replacing
from ..errors import install

try:
    # `as`: exported to the other modules, so that this error names the missing extra.
    from matplotlib import font_manager
    from matplotlib.axes import Axes as Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap as ListedColormap
    from matplotlib.figure import Figure as Figure
    from matplotlib.image import AxesImage
    from matplotlib.lines import Line2D as Line2D
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter
except ImportError as error:
    raise ImportError(f"Plots need matplotlib: {install('plot')}") from error

FONT_SIZE = 8
WIDTH = 10.0  # inches of a picture with a fixed width
WIDEST = 13.8  # inches: scaled down to 1,000 pixels, a letter of FONT_SIZE still has 8 of them
DPI = 120
INCHES_PER_PIECE = 0.17  # so that neighbouring labels of FONT_SIZE don't touch
LONGEST_LABEL = 18
# Okabe and Ito (2008): distinct with any kind of colour vision; without yellow: it is too light for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 2)))

# Used if installed, because matplotlib's own font lacks the scripts of East and South Asia.
FALLBACK_FONTS = (
    "Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans Devanagari", "Noto Sans Thai", "WenQuanYi Zen Hei",
    "Hiragino Sans", "PingFang SC", "Microsoft YaHei", "Arial Unicode MS", "Nirmala UI",
)  # fmt: skip
MISSING_GLYPH = "\N{WHITE SQUARE}"


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure of a size in inches; it needs no screen."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, file: str | Path) -> None:
    """Writes a figure in the format of the file's suffix, such as PNG or SVG. After an error there is no file.

    Raises:
        ValueError: matplotlib doesn't write files with this suffix.
        OSError: It can't be written.
    """
    with replacing(file) as temporary:
        figure.savefig(temporary, format=Path(file).suffix.lower().strip("."), dpi=DPI)


def line_style(number: int) -> dict[str, Any]:
    """Returns colour and dashes of a plot's n-th line: lines differ in both."""
    dashes = LINES[(number + number // len(COLOURS)) % len(LINES)]  # the eighth line has other ones than the first
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": dashes, "linewidth": 1.6}


def set_title(figure: Figure, title: str) -> None:
    """Writes a title above a figure, on several lines if it is long."""
    text = readable(title, longest=300)
    figure.suptitle(text, family=font_family(), parse_math=False, wrap=True, fontsize=11)


def side_of(pieces: int, largest: float) -> float:
    """Returns the inches that tokens need, at most `largest`; beyond it, only every n-th token has a label."""
    return min(max(1.6, pieces * INCHES_PER_PIECE), largest)


def heat_map(
    panel: Axes,
    weights: npt.NDArray[np.float32],
    columns: Sequence[str],
    rows: Sequence[str],
    *,
    size: tuple[float, float],
    largest: float,
) -> AxesImage:
    """Draws weights, (rows, columns), and labels the rows on the left and the columns below.

    Args:
        panel: Where to draw.
        weights: The weights.
        columns: The tokens below.
        rows: The tokens on the left.
        size: The panel's width and height in inches; if there is too little room, every n-th token has a label.
        largest: The weight that has the darkest colour; 0 has the lightest.
    """
    image = panel.imshow(weights, cmap="Blues", vmin=0.0, vmax=largest, aspect="auto", interpolation="nearest")
    family = font_family()
    for axis, labels, inches in (("x", columns, size[0]), ("y", rows, size[1])):
        step = max(1, math.ceil(len(labels) * INCHES_PER_PIECE / inches - 1e-6))
        shown = {place: readable(labels[place]) for place in range(0, len(labels), step)}
        set_ticks, rotation = (panel.set_xticks, 90) if axis == "x" else (panel.set_yticks, 0)
        set_ticks([*shown], [*shown.values()], fontsize=FONT_SIZE, family=family, parse_math=False, rotation=rotation)
    panel.tick_params(length=2, color="grey")
    panel.spines[:].set_color("lightgrey")
    return image


def colour_bar(figure: Figure, panels: Axes | list[Axes], image: AxesImage, label: str) -> None:
    """Puts a scale of the colours beside panels."""
    bar = figure.colorbar(image, ax=panels, shrink=0.7, aspect=30, pad=0.02)
    bar.set_label(label, fontsize=FONT_SIZE)
    bar.ax.tick_params(labelsize=FONT_SIZE)
    bar.outline.set_visible(False)


def name_panel(panel: Axes, title: str, xlabel: str, ylabel: str) -> None:
    """Writes a panel's title and what its axes are."""
    panel.set_title(title, fontsize=FONT_SIZE + 1)
    panel.set_xlabel(xlabel, fontsize=FONT_SIZE + 1)
    panel.set_ylabel(ylabel, fontsize=FONT_SIZE + 1)
    panel.tick_params(labelsize=FONT_SIZE)


def name_lines(place: Axes | Figure, lines: Mapping[str, Line2D], **options: Any) -> None:
    """Adds a legend with a name for each line; a name is no formula, whatever characters it has."""
    font: Any = {"size": FONT_SIZE, "family": font_family()}
    names = [readable(name, longest=40) for name in lines]
    for text in place.legend([*lines.values()], names, prop=font, **options).get_texts():
        text.set_parse_math(False)


def count_updates(panel: Axes) -> None:
    """Gives a panel's horizontal axis a few ticks at round numbers of updates."""
    panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    panel.xaxis.set_major_formatter("{x:,.0f}")


def set_log_scale(panel: Axes) -> None:
    """Gives a panel a logarithmic axis with plain numbers."""
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    panel.yaxis.set_major_formatter(ScalarFormatter())
    panel.yaxis.set_minor_formatter(NullFormatter())


@functools.cache
def font_family() -> list[str]:
    """Returns the names of the fonts in which characters are looked up, in this order."""
    installed = {font.name for font in font_manager.fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in FALLBACK_FONTS if name in installed)]


def readable(text: str, longest: int = LONGEST_LABEL) -> str:
    """Returns the text with a symbol for each character that is invisible or in no font; matplotlib would warn."""
    fonts = [font_manager.get_font(font_manager.findfont(name)) for name in font_family()]
    if not text.strip():
        return "\N{OPEN BOX}" * max(1, min(len(text), longest))
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    return "".join(
        character if character.isprintable() and any(font.get_char_index(ord(character)) for font in fonts)
        else MISSING_GLYPH
        for character in text
    )  # fmt: skip
