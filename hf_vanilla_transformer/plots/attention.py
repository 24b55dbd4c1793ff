"""Heat maps of attention weights: the heads of a layer, or all layers, for one sentence."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from ..translation.attention import Attention
from .drawing import FONT_SIZE, WIDEST, Axes, Figure, colour_bar, heat_map, new_figure, set_title, side_of

Weights = torch.Tensor | npt.NDArray[np.floating]
Maps = npt.NDArray[np.float32]
Part = Literal["encoder", "decoder", "cross"]
Choice = int | Literal["all", "mean"]

# Panels up to this number -> the largest side of one, in inches: many panels are smaller, with fewer labels.
LARGEST_SIDES = {2: 7.0, 8: 5.0, 16: 3.3, 10_000: 1.6}
BAR = "attention weight (a row sums to 1)"
MARGINS = (2.0, 1.6)  # inches for labels, titles and the colour bar
# Part -> its name, the token that attends, the token attended to, and a description of the picture.
PARTS: dict[str, tuple[str, str, str, str]] = {
    "encoder": (
        "Encoder self-attention",
        "source token that attends",
        "source token attended to",
        "which source token each source token attends to",
    ),
    "decoder": (
        "Decoder self-attention",
        "target token that is predicted",
        "earlier target token attended to",
        "which earlier token each target token attends to",
    ),
    "cross": (
        "Cross-attention",
        "target token that is predicted",
        "source token attended to",
        "which source token each target token attends to",
    ),
}


def plot_attention(
    weights: Weights,
    source_pieces: Sequence[str],
    target_pieces: Sequence[str],
    *,
    heads: Literal["all", "mean"] = "all",
    title: str | None = None,
    labels: tuple[str, str] | None = None,
) -> Figure:
    """Heat maps of where each target piece attends to: one layer's weights for one sentence.

    Args:
        weights: (heads, target length, source length), each row a distribution over the source; for instance
            `model(..., output_attentions=True).cross_attentions[-1][0]`.
        source_pieces: The tokens attended to, in columns.
        target_pieces: The tokens that attend, in rows.
        heads: "all" for one map per head, "mean" for one map of their average.
        title: Is written above the maps.
        labels: Names of the columns and of the rows.

    Returns:
        A figure; `figure.savefig("attention.png")` writes it.

    Raises:
        ValueError: The weights' shape doesn't fit the pieces, or their rows are not distributions.
    """
    maps = _checked_weights(weights, source_pieces, target_pieces)
    if heads not in ("all", "mean"):
        raise ValueError(f'heads={heads!r}; choose "all" for one map per head or "mean" for their average')
    maps, names = _of_heads(maps, heads)
    return _draw(maps, names, source_pieces, target_pieces, title, labels)


def draw_attention(
    attention: Attention, part: Part = "cross", *, layer: int | Literal["all"] = "all", heads: Choice = "all"
) -> Figure:
    """Draws one of the three attentions of a sentence, with a title that describes it.

    Args:
        attention: The result of `attention_of`.
        part: "encoder" or "decoder" for their self-attention, "cross" for the decoder's to the encoder's output.
        layer: The number of a layer, from 1; "all" for a map per layer, or per layer and head.
        heads: The number of a head, from 1; "all" for a map per head, "mean" for the average of all.

    Returns:
        A figure.

    Raises:
        ValueError: There is no such part, layer or head; the message says how many there are.
    """
    weights, columns, rows = of_part(attention, part)
    name, queries, keys, what = PARTS[part]
    for unit, number, count in (("layer", layer, weights.shape[0]), ("head", heads, weights.shape[1])):
        if isinstance(number, int) and not 1 <= number <= count:
            raise ValueError(f"{unit} {number} doesn't exist: the {name.lower()} has {unit}s 1 to {count}")
    maps, of_heads = _of_heads(weights.numpy(), heads)  # (layers, heads, T, S)
    maps = maps if layer == "all" else maps[layer - 1 : layer]
    of_layers = [f"layer {number}" for number in range(1, len(weights) + 1)]
    if layer != "all":
        title, names = f"{name}, layer {layer} of {len(weights)}: {what}", of_heads
    elif len(of_heads) == 1:
        title, names = f"{name} by layer, {of_heads[0]}: {what}", of_layers
    else:
        title, names = (
            f"{name}, all layers and heads: {what}",
            [f"{one}, {two}" for one in of_layers for two in of_heads],
        )
    return _draw(maps.reshape(-1, *maps.shape[2:]), names, columns, rows, title, (keys, queries))


def of_part(attention: Attention, part: str) -> tuple[torch.Tensor, list[str], list[str]]:
    """Returns the weights of a part, (layers, heads, queries, keys), and the tokens of its keys and its queries.

    Raises:
        ValueError: There is no such part.
    """
    if part == "encoder":
        return attention.encoder, attention.source_pieces, attention.source_pieces
    if part == "decoder":
        return attention.decoder, attention.input_pieces, attention.target_pieces
    if part == "cross":
        return attention.cross, attention.source_pieces, attention.target_pieces
    raise ValueError(f"part={part!r}; choose one of {', '.join(PARTS)}")


def _of_heads(weights: Maps, heads: Choice) -> tuple[Maps, list[str]]:
    """Returns the weights of all heads, of one or their mean, (..., heads, T, S), and the names of these maps."""
    count = weights.shape[-3]
    if heads == "all":
        return weights, [f"head {number}" for number in range(1, count + 1)]
    if heads == "mean":
        return weights.mean(axis=-3, keepdims=True), [f"mean of {count} heads"]
    return weights[..., heads - 1 : heads, :, :], [f"head {heads} of {count}"]


def _draw(
    maps: Maps,
    names: Sequence[str],
    columns: Sequence[str],
    rows: Sequence[str],
    title: str | None,
    labels: tuple[str, str] | None,
) -> Figure:
    """Draws maps, (maps, rows, columns), in a grid, with one colour scale, so that they can be compared."""
    largest_side = next(side for count, side in LARGEST_SIDES.items() if len(maps) <= count)
    size = side_of(len(columns), largest_side), side_of(len(rows), largest_side)
    figure, panels = _grid(len(maps), *size)
    largest = float(maps.max())
    for panel, name, one in zip(panels, names, maps, strict=True):
        image = heat_map(panel, one, columns, rows, size=size, largest=largest)
        panel.set_title(name, fontsize=FONT_SIZE + 1)
    colour_bar(figure, panels, image, BAR)
    if labels is not None:
        figure.supxlabel(labels[0], fontsize=FONT_SIZE + 1)
        figure.supylabel(labels[1], fontsize=FONT_SIZE + 1)
    if title is not None:
        set_title(figure, title)
    return figure


def _checked_weights(weights: Weights, source_pieces: Sequence[str], target_pieces: Sequence[str]) -> Maps:
    """Returns the weights as float32, (heads, target length, source length), if they fit the pieces."""
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


def _columns(count: int, width: float, height: float) -> int:
    """Number of columns that gives the grid a screen's proportions: 4 for 8 square panels."""
    fitting = max(1, int((WIDEST - MARGINS[0]) / (width + 0.15)))
    return min(count, fitting, max(1, round(math.sqrt(1.7 * count * height / width))))


def _grid(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with `count` empty panels of the given size in inches."""
    columns = _columns(count, width, height)
    rows = math.ceil(count / columns)
    # A panel has a title above it.
    figure = new_figure(columns * (width + 0.15) + MARGINS[0], rows * (height + 0.35) + MARGINS[1])
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for unused in panels[count:]:
        unused.remove()
    # Only outer panels have labels; above a gap in the last row, the outer panel is that of the row before.
    for panel in panels[max(0, count - columns) : count]:
        panel.xaxis.set_tick_params(which="both", labelbottom=True)
    return figure, panels[:count]
