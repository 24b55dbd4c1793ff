"""The attention of a sentence by part, layer and head: what is drawn, what its title says, and what is refused."""

import numpy as np
import pytest
import torch

from hf_vanilla_transformer.plots.curves import draw_attention
from hf_vanilla_transformer.translation.attention import Attention

LAYERS, HEADS = {"encoder": 2, "decoder": 3}, {"encoder": 4, "decoder": 2}


@pytest.fixture
def attention():
    """Random weights, with other numbers of layers and heads in the decoder."""

    def weights(stack, queries, keys):
        return torch.randn(LAYERS[stack], HEADS[stack], queries, keys).softmax(-1)

    source, target = ["half", "past", "nine", "</s>"], ["halb", "zehn", "</s>"]
    parts = weights("encoder", 4, 4), weights("decoder", 3, 3), weights("decoder", 3, 4)
    return Attention(source, ["<s>", *target[:-1]], target, *parts)


def _panels(figure):
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


def _labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


@pytest.mark.parametrize(
    ("part", "layer", "heads", "title", "names"),
    [
        ("cross", 3, "all", "Cross-attention, layer 3 of 3: which source token each", ["head 1", "head 2"]),
        ("cross", 1, "mean", "Cross-attention, layer 1 of 3: which", ["mean of 2 heads"]),
        ("encoder", 2, 4, "Encoder self-attention, layer 2 of 2: which", ["head 4 of 4"]),
        ("decoder", 1, "all", "Decoder self-attention, layer 1 of 3: which earlier", ["head 1", "head 2"]),
        ("decoder", "all", "mean", "Decoder self-attention by layer, mean of 2", [f"layer {n}" for n in (1, 2, 3)]),
        ("encoder", "all", 3, "Encoder self-attention by layer, head 3 of 4", ["layer 1", "layer 2"]),
        ("encoder", "all", "all", "Encoder self-attention, all layers", [f"layer 1, head {n}" for n in (1, 2, 3, 4)]),
    ],
)  # fmt: skip
def test_each_choice_draws_its_weights_and_says_so(attention, part, layer, heads, title, names):
    figure = draw_attention(attention, part, layer=layer, heads=heads)
    assert figure.get_suptitle().replace("\n", " ").startswith(title)
    panels = _panels(figure)
    assert [panel.get_title() for panel in panels][: len(names)] == names
    weights = getattr(attention, part).numpy()
    chosen = weights if layer == "all" else weights[layer - 1 : layer]
    if heads == "mean":
        chosen = chosen.mean(axis=1, keepdims=True)
    elif heads != "all":
        chosen = chosen[:, heads - 1 : heads]
    expected = chosen.reshape(-1, *chosen.shape[2:])
    drawn = [panel.images[0].get_array() for panel in panels]
    assert len(drawn) == len(expected)
    assert all(np.allclose(ours, theirs) for ours, theirs in zip(drawn, expected, strict=True))


def test_rows_and_columns_have_their_tokens_and_say_what_they_are(attention):
    for part, columns, rows in (
        ("encoder", attention.source_pieces, attention.source_pieces),
        ("decoder", ["<s>", "halb", "zehn"], attention.target_pieces),
        ("cross", attention.source_pieces, attention.target_pieces),
    ):
        figure = draw_attention(attention, part, layer=1, heads="mean")
        (panel,) = _panels(figure)
        assert (_labels(panel.xaxis), _labels(panel.yaxis)) == (columns, rows)
        assert "attended to" in figure.get_supxlabel()
        assert "predicted" in figure.get_supylabel() or part == "encoder"


@pytest.mark.parametrize(
    ("part", "layer", "heads", "message"),
    [
        ("cross", 4, "all", "layer 4 doesn't exist: the cross-attention has layers 1 to 3"),
        ("cross", 0, "all", "layer 0 doesn't exist"),
        ("encoder", 3, "all", "the encoder self-attention has layers 1 to 2"),
        ("decoder", "all", 3, "head 3 doesn't exist: the decoder self-attention has heads 1 to 2"),
        ("both", 1, "all", "part='both'; choose one of encoder, decoder, cross"),
    ],
)
def test_what_does_not_exist_is_named(attention, part, layer, heads, message):
    with pytest.raises(ValueError, match=message):
        draw_attention(attention, part, layer=layer, heads=heads)
