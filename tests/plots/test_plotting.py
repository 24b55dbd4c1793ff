"""Attention pictures and learning curves: what stands where, and that no input or missing screen breaks them."""

import importlib.util
import io
import sys
import warnings

import numpy as np
import pytest
import torch

from hf_vanilla_transformer.plots import curves as plotting
from hf_vanilla_transformer.plots import drawing
from hf_vanilla_transformer.plots.curves import plot_attention


def _weights(heads, target_length, source_length):
    return torch.randn(heads, target_length, source_length).softmax(-1)


def _pieces(count):
    return [f"piece{number}" for number in range(count)]


def _png(figure):
    """The figure as PNG, with every warning of the drawing as an error."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(file, format="png")
    return file.getvalue()


def _panels(figure):
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


def _labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def test_a_map_a_head_with_target_pieces_in_rows_and_source_pieces_in_columns():
    weights = _weights(8, 3, 4)
    figure = plot_attention(weights, ["a", "b", "c", "d"], ["x", "y", "z"], title="Layer 2")
    panels = _panels(figure)
    assert [panel.get_title() for panel in panels] == [f"head {number}" for number in range(1, 9)]
    for panel, head in zip(panels, weights, strict=True):
        assert np.allclose(panel.images[0].get_array(), head)
    assert _labels(panels[0].yaxis) == ["x", "y", "z"]
    assert _labels(panels[-1].xaxis) == ["a", "b", "c", "d"]
    assert figure.get_suptitle() == "Layer 2"
    assert panels[0].get_ylim() == (2.5, -0.5)  # the first target piece is on top
    assert _png(figure).startswith(b"\x89PNG")


def test_the_mean_is_one_map():
    weights = _weights(8, 3, 4)
    figure = plot_attention(weights, list("abcd"), list("xyz"), heads="mean")
    (panel,) = _panels(figure)
    assert panel.get_title() == "mean of 8 heads"
    assert np.allclose(panel.images[0].get_array(), weights.mean(0))


@pytest.mark.parametrize(
    "weights",
    [
        _weights(2, 3, 4).to(torch.bfloat16),
        _weights(2, 3, 4).to(torch.float16),
        _weights(2, 3, 4).double().numpy(),
        _weights(2, 3, 4).requires_grad_(),
        _weights(2, 3, 4) * torch.tensor([1.0, 1.0, 0.0])[:, None],  # a padded row
    ],
    ids=["bfloat16", "float16", "numpy", "with gradient", "padded row"],
)
def test_what_models_give_is_taken_as_it_is(weights):
    _png(plot_attention(weights, list("abcd"), list("xyz")))


AWKWARD_PIECES = [
    "$x^{2$", "\\frac{", "</s>", " ", "", "\n", "中文", "🙂", "\x00", "e\u0301", "ﷺ" * 40, "_%#&", "שלום", "\u200b",
    "\u202e",
]  # fmt: skip


def test_awkward_pieces_neither_crash_nor_warn():
    count = len(AWKWARD_PIECES)
    figure = plot_attention(_weights(2, count, count), AWKWARD_PIECES, AWKWARD_PIECES, title="$ 中文 {")
    _png(figure)
    labels = _labels(_panels(figure)[0].yaxis)
    assert labels[:6] == ["$x^{2$", "\\frac{", "</s>", "␣", "␣", "␣"]
    assert labels[8] == drawing.MISSING_GLYPH
    assert len(labels[10]) == drawing.LONGEST_LABEL


def test_long_sentences_are_thinned_out_instead_of_growing_without_bound():
    figure = plot_attention(_weights(4, 700, 3), _pieces(3), _pieces(700))
    labels = _labels(_panels(figure)[0].yaxis)
    assert 20 < len(labels) <= 30
    assert labels[:2] == ["piece0", "piece24"]
    assert max(figure.get_size_inches()) < 30


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 4, 3), r"shape \(2, 4, 3\).*3 target pieces and 4 source pieces.*\(heads, 3, 4\)$"),
        ((3, 4), r"shape \(3, 4\).*\(heads, 3, 4\)$"),
        ((1, 2, 3, 4), r"shape \(1, 2, 3, 4\).*one sentence of a batch: weights\[0\]"),
        ((0, 3, 4), r"shape \(0, 3, 4\)"),
    ],
)
def test_wrong_shapes_name_both_shapes(shape, message):
    with pytest.raises(ValueError, match=message):
        plot_attention(torch.zeros(shape), list("abcd"), list("xyz"))


@pytest.mark.parametrize("weights", [torch.randn(2, 3, 4), torch.full((2, 3, 4), float("nan")), 2 * _weights(2, 3, 4)])
def test_scores_that_are_no_distribution_are_refused(weights):
    with pytest.raises(ValueError, match=r"not distributions .* model\.eval\(\)"):
        plot_attention(weights, list("abcd"), list("xyz"))


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    spec = importlib.util.spec_from_file_location("hf_vanilla_transformer.plots.drawing_alone", drawing.__file__)
    with pytest.raises(ImportError, match=r"pip install '.\[plot\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_legend_has_every_run_by_its_name(tmp_path):
    """Names that are equal once they are shortened, that matplotlib would hide, or that it would take for formulas."""
    names = ["a" * 40 + "1", "a" * 40 + "2", "_hidden", r"r$\frac{$"]
    figure = plotting.plot_training({name: [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0}] for name in names})
    plotting.save_figure(figure, tmp_path / "curves.png")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a" * 39 + "…"] * 2 + names[2:]


def test_learning_curves_show_what_the_log_has():
    log = [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0, "learning_rate": 0.1}, {"step": 2, "eval_bleu": 7.5}]
    figure = plotting.plot_training({"base": log, "other": log[:1]})
    loss, bleu = figure.axes
    assert [panel.get_title() for panel in (loss, bleu)] == ["training loss", "validation BLEU"]
    assert [line.get_xydata().tolist() for line in loss.get_lines()] == [[[1, 5], [2, 4]], [[1, 5]]]
    assert [line.get_xydata().tolist() for line in bleu.get_lines()] == [[[2, 7.5]]]
    assert [panel.get_ylabel() for panel in (loss, bleu)] == ["nats per token", "BLEU"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["base", "other"]
    styles = [(line.get_color(), line.get_linestyle()) for line in loss.get_lines()]
    assert len({colour for colour, _ in styles}) == len({dashes for _, dashes in styles}) == 2
