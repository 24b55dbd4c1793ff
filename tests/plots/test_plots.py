"""Attention and learning curves: what stands where, and that neither odd input nor a missing screen breaks them."""

import io
import re
import warnings
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from hf_vanilla_transformer.hub.facts import LOGGED
from hf_vanilla_transformer.metrics import MEASURES
from hf_vanilla_transformer.plots.curves import CURVES, plot_attention, plot_training

AWKWARD = ["$x^{2$", "\\frac{", "</s>", " ", "", "\n", "\x00", "\x1b[31m", "e\u0301", "w" * 40, "_%#&", "\u200b", "--"]


def _weights(heads, target_length, source_length):
    return torch.randn(heads, target_length, source_length).softmax(-1)


def _written(figure, suffix):
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(file, format=suffix)
    return file.getvalue()


def _labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


@pytest.mark.parametrize("heads", [1, 3, 8, 20])
def test_a_map_a_head_with_target_pieces_in_rows_and_source_pieces_in_columns(heads):
    weights = _weights(heads, 3, 4)
    figure = plot_attention(weights, list("abcd"), list("xyz"), title="Layer 2", labels=("keys", "queries"))
    *panels, _ = figure.axes
    assert [panel.get_title() for panel in panels] == [f"head {number}" for number in range(1, heads + 1)]
    for panel, head in zip(panels, weights, strict=True):
        assert np.allclose(panel.images[0].get_array(), head)
        assert panel.images[0].get_clim() == (0, weights.max().item())  # they can be compared
    assert (_labels(panels[-1].xaxis), _labels(panels[0].yaxis)) == (list("abcd"), list("xyz"))
    assert panels[0].get_ylim() == (2.5, -0.5)  # the first target piece is on top
    assert (figure.get_suptitle(), figure.get_supxlabel(), figure.get_supylabel()) == ("Layer 2", "keys", "queries")


def test_rows_of_maps_and_weights_as_models_give_them():
    *panels, _ = plot_attention(_weights(6, 3, 4), list("abcd"), list("xyz"), columns=3).axes
    assert [panel.get_subplotspec().colspan.start for panel in panels] == [0, 1, 2, 0, 1, 2]
    weights = _weights(2, 3, 4)
    for given in (weights.bfloat16(), weights.double().numpy(), weights * torch.eye(3, 1)):
        _written(plot_attention(given, list("abcd"), list("xyz")), "png")


def test_awkward_pieces_and_titles_neither_crash_nor_warn():
    figure = plot_attention(_weights(2, 13, 13), AWKWARD, AWKWARD, title="$ {")
    _written(figure, "png")
    ElementTree.fromstring(_written(figure, "svg"))
    shown = ["$x^{2$", "\\frac{", "</s>", "␣", "␣", "□", "□", "□[31m", "e\u0301", "w" * 18 + "…", "_%#&", "□", "--"]
    assert _labels(figure.axes[0].yaxis) == shown


def test_long_sentences_are_thinned_out_instead_of_growing_without_bound():
    figure = plot_attention(_weights(4, 700, 3), list("abc"), [f"piece{number}" for number in range(700)])
    labels = _labels(figure.axes[0].yaxis)
    assert 20 < len(labels) <= 34  # 5.75 inches
    assert (labels[0], labels[1]) == ("piece0", f"piece{-(-700 // len(labels))}")
    assert max(figure.get_size_inches()) < 30


def test_what_is_no_attention_is_refused():
    for shape in ((2, 4, 3), (3, 4), (1, 2, 3, 4), (0, 3, 4)):
        with pytest.raises(ValueError, match=re.escape(f"shape {shape}; those of one sentence have (heads, 3, 4)")):
            plot_attention(torch.zeros(shape), list("abcd"), list("xyz"))
    for weights in (torch.randn(2, 3, 4), torch.full((2, 3, 4), float("nan")), 2 * _weights(2, 3, 4)):
        with pytest.raises(ValueError, match=r"not distributions; .* of model\.eval\(\)"):
            plot_attention(weights, list("abcd"), list("xyz"))


def test_every_measure_of_an_evaluation_is_in_curves_and_cards():
    assert {f"eval_{name}" for name in MEASURES} <= CURVES.keys() & LOGGED.keys()


def test_learning_curves_show_what_the_logs_have():
    log = [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0, "learning_rate": 0.1}]
    log += [{"step": 1, "eval_perplexity": 120.0}, {"step": 9, "eval_perplexity": 2.5}]
    figure = plot_training({"_base": log, r"r$\frac{$": log[:1]}, "Two runs")
    _written(figure, "svg")
    loss, perplexity = figure.axes
    assert [panel.get_ylabel() for panel in figure.axes] == ["nats per token", "perplexity per token"]
    assert [line.get_xydata().tolist() for line in loss.get_lines()] == [[[1, 5], [2, 4]], [[1, 5]]]
    assert [line.get_xydata().tolist() for line in perplexity.get_lines()] == [[[1, 120], [9, 2.5]], []]
    assert [line.get_marker() for line in loss.get_lines()] == ["", "."]  # a line of one point can't be seen
    assert len({(line.get_color(), line.get_linestyle()) for line in loss.get_lines()}) == 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["_base", r"r$\frac{$"]
    assert {"10", "100"} <= set(_labels(perplexity.yaxis))  # logarithmic, with plain numbers
