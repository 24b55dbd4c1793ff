"""Pictures of the paper's formulas: what is drawn is what the model has, and numbers out of range are refused."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.modeling_vanilla_transformer import sinusoidal_table
from hf_vanilla_transformer.plots.paper import SEEN, Schedule, plot_masks, plot_positions, plot_schedule
from hf_vanilla_transformer.training.schedule import paper_learning_rate


def _panels(figure):
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


@pytest.mark.parametrize("encoding", ["paper", "tensor2tensor", "fairseq", "marian"])
@pytest.mark.parametrize("d_model", [2, 7, 64])
def test_sines_and_cosines_are_those_of_the_formula(encoding, d_model):
    figure = plot_positions(encoding, d_model, positions=12)
    sines, cosines, products, distance = _panels(figure)
    table = sinusoidal_table(12, d_model, encoding).numpy()
    first = sines.images[0].get_array()
    # The fastest is sin(pos), cos(pos); at position 0, sines are 0 and cosines 1.
    assert np.allclose(first[0], np.sin(np.arange(12)), atol=1e-6)
    assert np.allclose(cosines.images[0].get_array()[0], np.cos(np.arange(12)), atol=1e-6)
    assert np.allclose(first[:, 0], 0)
    assert np.allclose(cosines.images[0].get_array()[:, 0], 1)
    assert np.allclose(products.images[0].get_array(), table @ table.T)
    assert np.allclose(distance.get_lines()[0].get_ydata(), (table @ table.T)[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("learned",), "'learned' has no sinusoids; choose one of paper, tensor2tensor"),
        (("papre",), "'papre' has no sinusoids"),
        (("paper", 1), "d_model is 1; give a number from 2 to 8,192"),
        (("paper", 10**9), "d_model is 1000000000"),
        (("paper", 8, 1), "positions is 1; give a number from 2 to 2,000"),
        (("paper", 8, 10**9), "positions is 1000000000"),
    ],
)
def test_positions_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        plot_positions(*arguments)


def test_the_masks_are_those_of_the_model():
    """What a model with random weights attends to in a padded batch is what the picture has in blue."""
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=20, encoder_layers=1, decoder_layers=1)
    model = VanillaTransformerForConditionalGeneration(config).eval()
    source, target = torch.randint(3, 20, (1, 6)), torch.randint(3, 20, (1, 5))
    masks = torch.tensor([[1, 1, 1, 1, 0, 0]]), torch.tensor([[1, 1, 1, 0, 0]])
    outputs = model(source, masks[0], target, decoder_attention_mask=masks[1], output_attentions=True, use_cache=False)
    figure = plot_masks(list("abcd"), list("xyz"), padding=2)
    encoder, causal, decoder = (_seen(panel) for panel in figure.axes[:3])
    assert (encoder == (outputs.encoder_attentions[0][0, 0] > 0).numpy()).all()
    assert (decoder == (outputs.decoder_attentions[0][0, 0] > 0).numpy()).all()
    assert (causal == np.tri(5, dtype=bool)).all()
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == ["x", "y", "z", "<pad>", "<pad>"]


def _seen(panel):
    image = panel.images[0]
    assert to_hex(image.cmap(image.norm(True))) == SEEN.lower()
    return np.asarray(image.get_array(), bool)


def test_the_schedule_is_equation_3():
    schedule, step = Schedule(paper_learning_rate(512, 4000), 4000), np.arange(1.0, 20_001)
    assert np.allclose(schedule(step), 512**-0.5 * np.minimum(step**-0.5, step * 4000**-1.5), rtol=1e-12)
    figure = plot_schedule({"base": schedule}, updates=500)
    (line,) = figure.axes[0].get_lines()
    assert line.get_xdata()[[0, -1]].tolist() == [1, 500]
    assert np.allclose(line.get_ydata(), schedule(line.get_xdata()))
    assert figure.axes[0].get_legend().get_texts()[0].get_text() == "base: peak 6.99e-04"


def test_logged_rates_are_drawn_as_they_are():
    figure = plot_schedule({}, logged={"run": [(1, 0.5), (10, 0.25)]})
    assert figure.axes[0].get_lines()[0].get_xydata().tolist() == [[1, 0.5], [10, 0.25]]
    schedule = {"base": Schedule(0.1, 10)}
    assert len(plot_schedule(schedule, logged={"new": []}).axes[0].get_lines()) == 1
    assert plot_schedule({}, 5, logged={"run": [(1, 0.5), (10, 0.25)]}).axes[0].get_xlim() == (0, 5)
    with pytest.raises(ValueError, match="no schedule and no logged learning rate"):
        plot_schedule({})
