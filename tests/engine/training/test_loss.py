"""The loss without all logits, against the paper's."""

import pytest
import torch

from hf_vanilla_transformer.engine.training import loss as loss_module
from hf_vanilla_transformer.engine.training.loss import projected_cross_entropy
from hf_vanilla_transformer.modeling_vanilla_transformer import label_smoothed_cross_entropy


def targets(padded: float = 0.3, vocab_size: int = 11) -> torch.Tensor:
    labels = torch.randint(vocab_size, (4, 6))
    return labels.masked_fill(torch.rand(4, 6) < padded, -100)


@pytest.mark.parametrize("rows", [1, 5, 512])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
@pytest.mark.parametrize("items", [None, 37])
def test_projected_cross_entropy_is_the_plain_one(monkeypatch, rows, bias, epsilon, items):
    """Loss and all gradients, in float64 to the last bits, however the targets are parted."""
    monkeypatch.setattr(loss_module, "ROWS_PER_CHUNK", rows)
    hidden, labels = torch.randn(4, 6, 5, dtype=torch.float64, requires_grad=True), targets()
    projection = torch.nn.Linear(5, 11, bias=bias, dtype=torch.float64)
    values, found = [hidden, *projection.parameters()], []
    for plain in (True, False):
        arguments = (labels, items, epsilon)
        if plain:
            loss = label_smoothed_cross_entropy(projection(hidden), *arguments)
        else:
            loss = projected_cross_entropy(hidden, projection, *arguments)
        found.append((loss, *torch.autograd.grad(3 * loss, values)))
    for plain, fast in zip(*found, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_projected_cross_entropy_of_the_nearly_impossible(epsilon):
    """A target with a probability of e^-800, which no floating-point number is."""
    projection, labels = torch.nn.Linear(1, 4, bias=False), torch.tensor([[2, 0]])
    with torch.no_grad():
        projection.weight.copy_(torch.tensor([[400.0], [1.0], [-400.0], [0.0]]))
    hidden = torch.ones(1, 2, 1)
    loss = projected_cross_entropy(hidden, projection, labels, label_smoothing=epsilon)
    torch.testing.assert_close(loss, label_smoothed_cross_entropy(projection(hidden), labels, label_smoothing=epsilon))
    assert loss > 300


def test_projected_cross_entropy_without_targets():
    hidden, projection = torch.randn(2, 3, 5, requires_grad=True), torch.nn.Linear(5, 11)
    loss = projected_cross_entropy(hidden, projection, torch.full((2, 3), -100))
    loss.backward()
    assert loss == 0
    assert hidden.grad.eq(0).all()
    assert projection.weight.grad.eq(0).all()


@pytest.mark.parametrize("option", ["retain_graph", "create_graph"])
def test_another_backward_pass_is_refused(option):
    hidden, projection = torch.randn(4, 6, 5, requires_grad=True), torch.nn.Linear(5, 11)
    loss = projected_cross_entropy(hidden, projection, targets())
    if option == "retain_graph":
        torch.autograd.grad(loss, hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"one backward pass, .*`training_shortcuts=False`"):
        torch.autograd.grad(loss, hidden, **{option: True})


@pytest.mark.parametrize("bad", [-1, 11])
def test_projected_cross_entropy_names_a_label_outside(bad):
    with pytest.raises(IndexError, match=rf"go from {min(bad, 3)} to {max(bad, 3)}, but the vocabulary has 11 tokens"):
        projected_cross_entropy(torch.randn(1, 2, 5), torch.nn.Linear(5, 11), torch.tensor([[3, bad]]))


def test_gradients_of_many_targets_under_autocast():
    """The sum over chunks is in float32, so the error doesn't grow with their number."""
    hidden, projection = torch.randn(1, 1_300, 8), torch.nn.Linear(8, 50)
    labels, found = torch.randint(50, (1, 1_300)), []
    for is_on in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            loss = projected_cross_entropy(hidden, projection, labels, label_smoothing=0.1)
        found.append(torch.autograd.grad(loss, (projection.weight, projection.bias)))
    for short, exact in zip(*found, strict=True):  # bfloat16 has 8 bits
        assert short.dtype == torch.float32
        torch.testing.assert_close(short, exact, rtol=0.02, atol=0.02 * exact.abs().max().item())
