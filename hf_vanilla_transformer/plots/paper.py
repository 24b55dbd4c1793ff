"""Pictures of what the paper defines: positional encodings (3.5), masks (3.2.3) and learning rates (5.3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..configuration_vanilla_transformer import POSITION_ENCODINGS
from ..modeling_vanilla_transformer import sinusoidal_table
from .drawing import (
    FONT_SIZE,
    WIDTH,
    Axes,
    Figure,
    Line2D,
    ListedColormap,
    colour_bar,
    font_family,
    line_style,
    name_lines,
    name_panel,
    new_figure,
    readable,
    set_title,
)

MOST_POSITIONS, WIDEST_MODEL = 2_000, 8_192  # the picture has fewer pixels
SHOWN_LABELS, SHOWN_CELLS = 15, 40  # tokens of a mask up to which labels, and lines between cells, are drawn
HIDDEN, SEEN = "#DDDDDD", "#0072B2"


# ---- 3.5 Positional encoding ----
def plot_positions(encoding: str = "paper", d_model: int = 512, positions: int = 100) -> Figure:
    """Draws sinusoids, their dot products, and these by the distance of two positions.

    Args:
        encoding: The `position_encoding` of a configuration with sinusoids: "paper", "tensor2tensor" ...
        d_model: Width of the encoding.
        positions: Number of positions.

    Returns:
        A figure with three panels.

    Raises:
        ValueError: There is no such encoding, it has no sinusoids, or a number is out of range.
    """
    sinusoids = [name for name in POSITION_ENCODINGS if name != "learned"]
    if encoding not in sinusoids:
        raise ValueError(f"position encoding {encoding!r} has no sinusoids; choose one of {', '.join(sinusoids)}")
    for name, value, most in (("d_model", d_model, WIDEST_MODEL), ("positions", positions, MOST_POSITIONS)):
        if not 2 <= value <= most:
            raise ValueError(f"{name} is {value}; give a number from 2 to {most:,}")
    table = sinusoidal_table(positions, d_model, encoding).numpy()  # (positions, d_model)
    products = table @ table.T
    figure = new_figure(WIDTH, 7.2)
    panels = figure.subplot_mosaic([["sines", "cosines"], ["products", "distance"]])
    for name, dimensions in _dimensions(encoding, d_model).items():
        values = table[:, list(dimensions)].T
        shown = panels[name].imshow(values, cmap="cividis", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
        which = f"{'every other of ' if dimensions.step > 1 else ''}dimensions {dimensions[0]} to {dimensions[-1]}"
        name_panel(panels[name], f"The {name}, {which}", "position", f"{name}, from fast to slow")
    colour_bar(figure, [panels["sines"], panels["cosines"]], shown, "value")
    shown = panels["products"].imshow(products, cmap="cividis", aspect="auto", interpolation="nearest")
    name_panel(panels["products"], "Dot product of the encodings of two positions", "position", "position")
    colour_bar(figure, panels["products"], shown, "dot product")
    panels["distance"].plot(products[0], **line_style(0))
    panels["distance"].grid(alpha=0.3)
    name_panel(
        panels["distance"], "The dot product depends on the distance alone", "distance in positions", "dot product"
    )
    set_title(figure, f"Positional encoding ({encoding}), d_model {d_model}, positions 0 to {positions - 1}")
    return figure


def _dimensions(encoding: str, d_model: int) -> dict[str, range]:
    """Returns the dimensions of an encoding's sines and cosines; with odd widths, the last may be missing or zero."""
    if encoding == "paper":
        return {"sines": range(0, d_model, 2), "cosines": range(1, d_model, 2)}
    half = -(-d_model // 2) if encoding == "marian" else d_model // 2
    return {"sines": range(half), "cosines": range(half, min(2 * half, d_model))}


# ---- 3.2.3 Masks ----
def plot_masks(source: Sequence[str], target: Sequence[str], padding: int = 2) -> Figure:
    """Draws which tokens are visible: no token sees padding, and in the decoder no token sees a later one.

    Args:
        source: The source's tokens, without padding.
        target: The tokens that the decoder reads, without padding, the start token first.
        padding: Padding after each of them, as in a batch with a longer sentence.

    Returns:
        A figure with three panels: the encoder's mask, the causal mask, and both together for the decoder.
    """
    sources, targets = ([*tokens, *["<pad>"] * padding] for tokens in (source, target))
    real_source, real_target = np.arange(len(sources)) < len(source), np.arange(len(targets)) < len(target)
    causal = np.tri(len(targets), dtype=bool)
    figure = new_figure(WIDTH, 4.4)
    masks = (
        ("Padding mask: encoder self-attention", np.tile(real_source, (len(sources), 1)), sources),
        ("Causal mask: no later token", causal, targets),
        ("Both: decoder self-attention", causal & real_target, targets),
    )
    for panel, (title, mask, tokens) in zip(figure.subplots(1, 3), masks, strict=True):
        _draw_mask(panel, mask, tokens)
        name_panel(panel, title, "token attended to (key)", "token that attends (query)")
    for colour, label in ((SEEN, "may be seen"), (HIDDEN, "hidden")):
        figure.axes[0].plot([], [], "s", color=colour, markersize=9, label=label)
    figure.legend(loc="outside lower center", ncols=2, fontsize=FONT_SIZE + 1, frameon=False)
    set_title(figure, "Masks of a padded pair: which token may attend to which")
    return figure


def _draw_mask(panel: Axes, mask: npt.NDArray[np.bool_], tokens: Sequence[str]) -> None:
    """Draws a mask, (queries, keys), with the same tokens as rows and columns."""
    panel.imshow(mask, cmap=ListedColormap([HIDDEN, SEEN]), vmin=0, vmax=1, interpolation="nearest")
    family = font_family()
    places = list(range(0, len(tokens), -(-len(tokens) // SHOWN_LABELS)))
    shown = [readable(tokens[place]) for place in places]
    panel.set_xticks(places, shown, rotation=90, family=family, parse_math=False)
    panel.set_yticks(places, shown, family=family, parse_math=False)
    if len(tokens) <= SHOWN_CELLS:
        edges = np.arange(len(tokens) + 1) - 0.5
        panel.vlines(edges, -0.5, len(tokens) - 0.5, color="white", linewidth=1)
        panel.hlines(edges, -0.5, len(tokens) - 0.5, color="white", linewidth=1)
    panel.spines[:].set_visible(False)


# ---- 5.3 Learning rate ----
@dataclass(frozen=True)
class Schedule:
    """A linear warm-up to the highest rate, then a decay with the inverse square root of the update (eq. 3).

    Attributes:
        peak: The highest rate; the paper's is (d_model * warmup)^-0.5.
        warmup: Updates until then.
    """

    peak: float
    warmup: int

    def __call__(self, step: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the rates of updates, (n,), counted from 1: peak * min(step / warmup, (warmup / step)^0.5)."""
        rates: npt.NDArray[np.float64] = self.peak * np.minimum(step / self.warmup, (self.warmup / step) ** 0.5)
        return rates


def plot_schedule(
    schedules: Mapping[str, Schedule],
    updates: int | None = None,
    *,
    logged: Mapping[str, Sequence[tuple[int, float]]] | None = None,
) -> Figure:
    """Draws learning rates by update.

    Args:
        schedules: Name -> the schedule.
        updates: Updates that are shown; None: those of the longest log, or five times the longest warm-up.
        logged: Name -> updates and rates that a run logged, as points.

    Returns:
        A figure.

    Raises:
        ValueError: There is nothing to draw.
    """
    logs = {name: log for name, log in (logged or {}).items() if log}
    if not schedules and not logs:
        raise ValueError("there is no schedule and no logged learning rate to draw")
    longest = max([step for log in logs.values() for step, _ in log] or [5 * one.warmup for one in schedules.values()])
    steps = np.unique(np.linspace(1, updates or longest, 1000).round())
    figure = new_figure(WIDTH, 4.2)
    panel = figure.subplots()
    lines: dict[str, Line2D] = {}
    for number, (name, schedule) in enumerate(schedules.items()):
        (lines[f"{name}: peak {schedule.peak:.2e}"],) = panel.plot(steps, schedule(steps), **line_style(number))
    for number, (name, log) in enumerate(logs.items(), start=len(schedules)):
        (lines[f"{name}, as logged"],) = panel.plot(*zip(*log, strict=True), **line_style(number))
    panel.grid(alpha=0.3)
    panel.set_ylim(bottom=0)
    panel.set_xlim(0, updates or longest)
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.yaxis.set_major_formatter("{x:.1e}")
    name_lines(panel, lines)
    name_panel(panel, "", "update", "learning rate")
    set_title(figure, "Learning rate by update: a linear warm-up, then the inverse square root of the update")
    return figure
