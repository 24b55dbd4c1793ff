"""Heat maps of attention weights for one sentence, and the style of all plots."""

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib import font_manager, rc_context
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

INCHES = 0.17  # of a token, so that its label doesn't touch the next one
# matplotlib's own has no Asian script; of these, a character is drawn by the first that is installed and has it.
FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans Devanagari", "PingFang SC", "Microsoft YaHei", "Nirmala UI")
STYLE: Any = {"font.size": 8, "figure.constrained_layout.use": True, "text.parse_math": False}  # "$x_" is no formula
STYLE["font.family"] = [name for name in FONTS if name in font_manager.get_font_names()]


@rc_context(STYLE)
def plot_attention(
    weights: ArrayLike | torch.Tensor,
    source_pieces: Sequence[str],
    target_pieces: Sequence[str],
    title: str = "",
    labels: Sequence[str] = ("", ""),
    columns: int | None = None,
) -> Figure:
    """Heat maps of attention weights, such as a layer's `model(..., output_attentions=True).cross_attentions[-1][0]`.

    Weights are (heads, target length, source length), of torch or NumPy; a row sums to 1, or to 0 for padding. Source
    pieces, attended to, are columns, target pieces rows; `labels` name both. `columns` is how many maps a row has, at
    most 8; None: as suits their number. Weights of another shape, or that are not distributions, raise `ValueError`.
    """
    maps = _checked(weights, len(target_pieces), len(source_pieces))
    columns = min(len(maps), columns or (2 if len(maps) <= 4 else 4 if len(maps) <= 16 else 8), 8)
    side = min(7.0, 11.5 / columns)  # the largest of a map, in inches
    width, height = (min(max(1.6, INCHES * len(pieces)), side) for pieces in (source_pieces, target_pieces))
    rows = -(-len(maps) // columns)
    figure = Figure(figsize=(columns * (width + 0.15) + 2.0, rows * (height + 0.35) + 1.6))
    for number, one in enumerate(maps):
        panel = figure.add_subplot(rows, columns, number + 1, title=f"head {number + 1}")
        image = panel.imshow(one.numpy(), cmap="Blues", vmin=0, vmax=float(maps.max()), aspect="auto")
        panel.set_xticks(*_ticks(source_pieces, width), rotation=90)
        panel.set_yticks(*_ticks(target_pieces, height))
        panel.tick_params(labelleft=number % columns == 0, labelbottom=number >= len(maps) - columns)
    figure.colorbar(image, ax=figure.axes, shrink=0.7, aspect=30, pad=0.02, label="attention weight (a row sums to 1)")
    figure.supxlabel(labels[0])
    figure.supylabel(labels[1])
    figure.suptitle(title, wrap=True)
    return figure


def _checked(weights: ArrayLike | torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """Returns the weights as float32, (heads, queries, keys)."""
    maps = torch.as_tensor(weights).detach().to(device="cpu", dtype=torch.float32)
    if maps.shape[1:] != (queries, keys) or not maps.numel():
        raise ValueError(f"weights have shape {(*maps.shape,)}; those of one sentence have (heads, {queries}, {keys})")
    if not (((maps.sum(-1) - 1).abs() < 0.02) | (maps.sum(-1) == 0)).all() or maps.min() < 0:  # 0.02: in bfloat16
        raise ValueError("the rows of weights are not distributions; give those after the softmax, of model.eval()")
    return maps


def _ticks(pieces: Sequence[str], inches: float) -> tuple[Sequence[int], list[str]]:
    """Returns where labels are, and the labels: with too little room, those of every n-th token."""
    places = range(0, len(pieces), 1 + int(len(pieces) * INCHES / inches - 1e-6))
    shown = (piece if len(piece := pieces[place]) < 20 else f"{piece[:18]}…" for place in places)
    # What isn't printable isn't visible, and may be no character of an SVG.
    return places, ["".join(one if one.isprintable() else "□" for one in piece).strip() or "␣" for piece in shown]
