"""The paper's figures for its notebook, 1 (the model), 2 (attention), 3 to 5 (what words attend to), and its formulas.

    python -m notebooks.diagrams docs/images/masks.png

draws the picture of this name: architecture, masks, positions or schedule.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch
from torch import Tensor, nn

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.modeling_vanilla_transformer import (
    PostNormResidual,
    VanillaTransformerAttention,
    VanillaTransformerFeedForward,
    sinusoidal_table,
)
from hf_vanilla_transformer.training.schedule import paper_learning_rate

# Heads: Okabe and Ito's colours, distinct for colour-blind readers; boxes: lighter ones.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
BLUE, ORANGE, GREEN, PINK, YELLOW = "#CFE3F2", "#F8D9C4", "#CDEBE0", "#F3DCE9", "#FAF3BE"
WIDTH, HEIGHT = 3.4, 0.7  # of a box; the boxes of a column are 1 apart
FIRST = 3.5  # where a layer begins
PAPERS = ((512, 4000), (1024, 4000), (512, 8000))  # d_model and warm-up: base, big, and base with a longer one

Point = tuple[float, float]
Box = tuple[str, str, str]  # its text, its name in the code, its colour


# ---- Figure 1: the model ----
def draw_architecture(model: VanillaTransformerForConditionalGeneration) -> Figure:
    """Draws figure 1 from the modules of a post-norm model, with their names in the code.

    Args:
        model: Its stacks have at least one layer each.

    Returns:
        A figure: the encoder on the left, the decoder on the right, from bottom to top.
    """
    encoder, decoder = model.model.encoder, model.model.decoder
    figure, axes = _canvas(8.2, 8.4, (-1.0, 13.4), (-0.3, 12.6))
    top = _stack(axes, 3.3, -1, encoder, ("encoder", "inputs"))
    last = _stack(axes, 9.1, 1, decoder, ("decoder", "outputs (shifted right)"))
    cross = FIRST + [name for name, _ in decoder.layers[0].named_children()].index("encoder_attn")
    _arrow(axes, (3.3, top), (3.3, top + 0.5), (6.2, top + 0.5), (6.2, cross), (9.1 - WIDTH / 2, cross))
    head = _column(axes, 9.1, last + 0.9, [("linear", "lm_head", BLUE), ("softmax", "", GREEN)])
    _arrow(axes, (9.1, last), (9.1, last + 0.9 - HEIGHT / 2))
    _arrow(axes, (9.1, head + HEIGHT / 2), (9.1, head + 0.8))
    axes.text(9.1, head + 0.9, "output probabilities", ha="center", fontsize=10)
    return figure


def _stack(axes: Axes, x: float, outside: int, stack: nn.Module, names: tuple[str, str]) -> float:
    """Draws a stack at x, with its residual connections on one side (-1: left); returns the y of its top."""
    name, reads = names
    axes.text(x, 0.0, reads, ha="center", fontsize=10)
    _arrow(axes, (x, 0.35), (x, 1.2 - HEIGHT / 2))
    _box(axes, (x, 1.2), ("embedding", f"{name}.embed_tokens", PINK))
    _arrow(axes, (x, 1.2 + HEIGHT / 2), (x, 1.95))
    axes.text(x, 2.2, "+", ha="center", va="center", fontsize=12, bbox={"boxstyle": "circle", "fc": "white"})
    beside = x + outside * 2.4
    axes.text(beside, 2.45, "positional encoding", ha="center", fontsize=9)
    axes.text(beside, 2.2, f"{name}.embed_positions", ha="center", va="center", fontsize=6.5, family="monospace")
    _arrow(axes, (x + outside * 0.95, 2.2), (x + outside * 0.27, 2.2))
    _arrow(axes, (x, 2.45), (x, FIRST - HEIGHT / 2))
    return _layer(axes, x, outside, stack)


def _layer(axes: Axes, x: float, outside: int, stack: nn.Module) -> float:
    """Draws one layer, with a residual connection around each sub-layer; returns the y of its top."""
    children = list(stack.layers[0].named_children())
    frame = FancyBboxPatch(
        (x - 2.3, FIRST - 0.75), 4.6, len(children) + 0.4, boxstyle="round,pad=0,rounding_size=0.3",
        facecolor="#F5F5F5", edgecolor="grey", zorder=0,
    )  # fmt: skip
    axes.add_patch(frame)
    middle = FIRST + (len(children) - 1) / 2
    axes.text(x + outside * 2.5, middle, f"N = {len(stack.layers)}", ha="left" if outside > 0 else "right", fontsize=11)
    last = _column(axes, x, FIRST, [_described(name, module) for name, module in children])
    for number, (_, module) in enumerate(children):
        if isinstance(module, PostNormResidual):
            below, side, y = FIRST + number - 1.5, x + outside * 2.05, FIRST + number
            start = (x, below if number > 1 else FIRST - 0.55)
            _arrow(axes, start, (side, start[1]), (side, y), (x + outside * WIDTH / 2, y))
    return last + HEIGHT / 2


def _described(name: str, module: nn.Module) -> Box:
    """Returns figure 1's name of a layer's module."""
    if isinstance(module, VanillaTransformerAttention):
        return "masked multi-head attention" if module.is_causal else "multi-head attention", name, ORANGE
    if isinstance(module, VanillaTransformerFeedForward):
        return "feed forward", name, BLUE
    if type(module) is PostNormResidual:
        return "add & norm", name, YELLOW
    raise ValueError(f"figure 1 has no {type(module).__name__}; give a model with norm_position='post'")


# ---- Figure 2: attention ----
def draw_attention_diagram() -> Figure:
    """Draws figure 2: scaled dot-product attention on the left, multi-head attention on the right."""
    figure, axes = _canvas(8.6, 4.4, (0, 13.4), (-0.2, 6.6))
    _scaled_dot_product(axes)
    _multi_head(axes)
    return figure


def _scaled_dot_product(axes: Axes) -> None:
    axes.text(2.6, 6.3, "scaled dot-product attention", ha="center", fontsize=11)
    steps = (("matrix product", PINK), ("scale", YELLOW), ("mask (optional)", ORANGE), ("softmax", GREEN))
    last = _column(axes, 1.9, 1.2, [(text, "", colour) for text, colour in steps])
    _arrow(axes, (1.9, last + HEIGHT / 2), (1.9, last + 1 - HEIGHT / 2))
    _box(axes, (2.9, last + 1), ("matrix product", "", PINK), width=5.0)
    _arrow(axes, (2.9, last + 1 + HEIGHT / 2), (2.9, last + 1.8))
    for x, name, top in ((1.3, "Q", 1.2), (2.5, "K", 1.2), (4.6, "V", last + 1)):
        axes.text(x, 0.0, name, ha="center", fontsize=11)
        _arrow(axes, (x, 0.35), (x, top - HEIGHT / 2))


def _multi_head(axes: Axes) -> None:
    axes.text(9.8, 6.3, "multi-head attention", ha="center", fontsize=11)
    copies = (0.3, 0.15, 0.0)  # three of h
    for x, name in ((7.7, "V"), (9.6, "K"), (11.5, "Q")):
        for shift in copies:
            _box(axes, (x + shift, 1.2 + shift), ("" if shift else "linear", "", GREEN), width=1.5)
        axes.text(x, 0.0, name, ha="center", fontsize=11)
        _arrow(axes, (x, 0.35), (x, 1.2 - HEIGHT / 2))
        _arrow(axes, (x, 1.2 + HEIGHT / 2 + 0.3), (x, 2.7 - HEIGHT / 2))
    for shift in copies:
        text = "" if shift else "scaled dot-product attention"
        _box(axes, (9.6 + shift, 2.7 + shift), (text, "", PINK), width=5.3)
    axes.text(12.75, 2.7, "h", fontsize=13, style="italic")
    _arrow(axes, (9.6, 2.7 + HEIGHT / 2 + 0.3), (9.6, 4.2 - HEIGHT / 2))
    last = _column(axes, 9.6, 4.2, [("concatenate", "", YELLOW), ("linear", "", GREEN)])
    _arrow(axes, (9.6, last + HEIGHT / 2), (9.6, last + 0.8))


# ---- Figures 3 to 5: what words attend to ----
def draw_links(
    weights: Tensor, queries: Sequence[str], keys: Sequence[str], title: str, word: int | None = None
) -> Figure:
    """Draws attention as lines from the queries above to the keys below: the darkest line is the largest weight.

    Args:
        weights: Of one layer, (h, T, S), each head in a colour of its own; at most 8 heads.
        queries: The T tokens that attend.
        keys: The S tokens attended to.
        title: Is written above.
        word: The index of the one query whose lines are drawn; None: all.

    Returns:
        A figure.
    """
    if len(weights) > len(COLOURS):
        raise ValueError(f"{len(weights)} heads; there are colours for {len(COLOURS)}, give some of them: weights[:8]")
    length = max(len(queries), len(keys))
    figure, axes = _canvas(max(0.42 * length + 1.6, 5.0), 3.4, (-0.8, length + 0.6), (-1.1, 2.1))
    for y, tokens, side in ((1.05, queries, "bottom"), (-0.05, keys, "top")):
        for x, token in enumerate(tokens):
            chosen = y > 1 and x == word
            bold = "bold" if chosen else "normal"
            axes.text(x, y, token, rotation=90, ha="center", va=side, fontsize=9, weight=bold, parse_math=False)
    shown = range(len(queries)) if word is None else [word]
    largest = float(weights[:, list(shown)].max())
    for query in shown:
        for number, head in enumerate(weights[:, query]):
            shift = 0.12 * (number - (len(weights) - 1) / 2)  # lines of several heads end beside one another
            for key, weight in enumerate(head.tolist()):
                axes.plot([query, key + shift], [1, 0], color=COLOURS[number], alpha=weight / largest, linewidth=1.8)
    lines = [Line2D([], [], color=colour, linewidth=2) for colour in COLOURS[: len(weights)]]
    if len(weights) > 1:
        names = [f"head {number}" for number in range(1, len(weights) + 1)]
        axes.legend(lines, names, fontsize=8, loc="center right", frameon=False)
    axes.set_title(title, fontsize=11)
    return figure


# ---- Masks (3.2.3), positions (3.5), learning rates (5.3) ----
def draw_masks(source: str = "It is half past three . </s>", target: str = "<s> Es ist halb vier .") -> Figure:
    """Draws the encoder's mask, the causal mask, and both together for the decoder, with padding after both texts."""
    sources, targets = (f"{text} <pad> <pad>".split() for text in (source, target))
    seen = np.tri(len(targets), dtype=bool)  # (queries, keys)
    real_source, real_target = (np.array(tokens) != "<pad>" for tokens in (sources, targets))
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    for panel, title, mask, tokens in zip(
        figure.subplots(1, 3),
        ("Padding mask: encoder self-attention", "Causal mask: no later token", "Both: decoder self-attention"),
        (np.tile(real_source, (len(sources), 1)), seen, seen & real_target),
        (sources, targets, targets),
        strict=True,
    ):
        panel.pcolormesh(mask, cmap=ListedColormap(["#DDDDDD", COLOURS[0]]), vmin=0, vmax=1, edgecolors="white")
        panel.set_xticks(np.arange(len(tokens)) + 0.5, tokens, rotation=90, fontsize=8)
        panel.set_yticks(np.arange(len(tokens)) + 0.5, tokens, fontsize=8)
        panel.set(aspect="equal", ylim=(len(tokens), 0))
        _name(panel, title, "token attended to (key)", "token that attends (query)")
    for colour, label in ((COLOURS[0], "may be seen"), ("#DDDDDD", "hidden")):
        panel.plot([], [], "s", color=colour, markersize=9, label=label)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.suptitle("Masks of a padded pair: which token may attend to which", fontsize=11)
    return figure


def draw_positions(d_model: int = 512, positions: int = 100) -> Figure:
    """Draws the sinusoids, their dot products, and these by the distance of two positions."""
    table = sinusoidal_table(positions, d_model).numpy()  # (positions, d_model)
    products = table @ table.T
    figure = Figure(figsize=(10, 7.2), layout="constrained")
    (sines, cosines), (pairs, distances) = figure.subplots(2, 2)
    for panel, name, first in ((sines, "sines", 0), (cosines, "cosines", 1)):
        image = panel.imshow(
            table[:, first::2].T, cmap="cividis", vmin=-1, vmax=1, aspect="auto", interpolation="nearest"
        )
        title = f"The {name}, every other of dimensions {first} to {d_model - 2 + first}"
        _name(panel, title, "position", f"{name}, from fast to slow")
    bar: dict[str, Any] = {"shrink": 0.7, "aspect": 30, "pad": 0.02}
    figure.colorbar(image, ax=[sines, cosines], label="value", **bar)
    image = pairs.imshow(products, cmap="cividis", aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=pairs, label="dot product", **bar)
    _name(pairs, "Dot product of the encodings of two positions", "position", "position")
    distances.plot(products[0], color=COLOURS[0])
    distances.grid(alpha=0.3)
    _name(distances, "The dot product depends on the distance alone", "distance in positions", "dot product")
    figure.suptitle(f"Positional encoding, d_model {d_model}, positions 0 to {positions - 1}", fontsize=11)
    return figure


def draw_schedule(sizes: Sequence[tuple[int, int]] = PAPERS, updates: int = 40_000) -> Figure:
    """Draws equation 3, the learning rate by update, for each (d_model, warm-up)."""
    step = np.arange(1, updates + 1)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panel = figure.subplots()
    for number, (d_model, warmup) in enumerate(sizes):
        peak = paper_learning_rate(d_model, warmup)
        label = f"d_model {d_model:,}, warm-up {warmup:,}: peak {peak:.2e}"
        rate = peak * np.minimum(step / warmup, (warmup / step) ** 0.5)
        panel.plot(step, rate, color=COLOURS[number], linestyle=("-", "--", "-.", ":")[number % 4], label=label)
    panel.set(xlim=(0, updates), ylim=(0, None))
    panel.grid(alpha=0.3)
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.yaxis.set_major_formatter("{x:.1e}")
    panel.legend(fontsize=9)
    _name(panel, "", "update", "learning rate")
    figure.suptitle(
        "Learning rate by update: a linear warm-up, then the inverse square root of the update", fontsize=11
    )
    return figure


def _name(panel: Axes, title: str, xlabel: str, ylabel: str) -> None:
    panel.set_title(title, fontsize=9)
    panel.set_xlabel(xlabel, fontsize=9)
    panel.set_ylabel(ylabel, fontsize=9)
    panel.tick_params(labelsize=8)


# ---- Boxes and arrows ----
def _canvas(width: float, height: float, x: Point, y: Point) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set(xlim=x, ylim=y)
    axes.axis("off")
    return figure, axes


def _column(axes: Axes, x: float, bottom: float, boxes: Sequence[Box]) -> float:
    """Draws boxes one above the other with arrows between them; returns the y of the last one's centre."""
    for number, box in enumerate(boxes):
        _box(axes, (x, bottom + number), box)
        if number:
            _arrow(axes, (x, bottom + number - 1 + HEIGHT / 2), (x, bottom + number - HEIGHT / 2))
    return bottom + len(boxes) - 1


def _box(axes: Axes, centre: Point, box: Box, width: float = WIDTH) -> None:
    text, name, colour = box
    (x, y), corner = centre, (centre[0] - width / 2, centre[1] - HEIGHT / 2)
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch(corner, width, HEIGHT, boxstyle=style, facecolor=colour, edgecolor="black"))
    axes.text(x, y + 0.12 * bool(name), text, ha="center", va="center", fontsize=9)
    axes.text(x, y - 0.2, name, ha="center", va="center", fontsize=6.5, family="monospace", color="#333333")


def _arrow(axes: Axes, *points: Point) -> None:
    """Draws a line through points with a head at the last one."""
    before, end = points[-2:]
    if len(points) > 2:
        axes.plot(*zip(*points[:-1], strict=True), color="black", linewidth=0.9, solid_joinstyle="round")
    axes.annotate(
        "", end, before, arrowprops={"arrowstyle": "-|>", "color": "black", "lw": 0.9, "shrinkA": 0, "shrinkB": 0}
    )


def _base_model() -> Figure:
    with torch.device("meta"):
        return draw_architecture(
            VanillaTransformerForConditionalGeneration(VanillaTransformerConfig.from_preset("base"))
        )


# Pictures of docs/paper.md -> what draws them, and the dots per inch.
PICTURES: dict[str, tuple[Callable[[], Figure], int]] = {
    "architecture": (_base_model, 80),
    "masks": (draw_masks, 120),
    "positions": (draw_positions, 120),
    "schedule": (draw_schedule, 120),
}

if __name__ == "__main__":
    draw, dpi = PICTURES[Path(sys.argv[1]).stem]
    draw().savefig(sys.argv[1], dpi=dpi)
