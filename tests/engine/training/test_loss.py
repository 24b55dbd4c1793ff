"""The loss without all logits, against the paper's."""

import copy
import dataclasses

import pytest
import torch

from hf_vanilla_transformer.engine.cpu import CPU
from hf_vanilla_transformer.engine.training import functions
from hf_vanilla_transformer.engine.training import loss as loss_module
from hf_vanilla_transformer.engine.training.loss import projected_cross_entropy
from hf_vanilla_transformer.modeling_vanilla_transformer import label_smoothed_cross_entropy


def targets(padded: float = 0.3, vocab_size: int = 11) -> torch.Tensor:
    labels = torch.randint(vocab_size, (4, 6))
    return labels.masked_fill(torch.rand(4, 6) < padded, -100)


def test_chunks_of_the_loss_have_enough_rows_and_not_too_many(monkeypatch):
    shapes, product = [], loss_module.product
    monkeypatch.setattr(
        loss_module, "product", lambda x, weight, bias=None: shapes.append(x.shape) or product(x, weight, bias)
    )
    for vocab_size, rows in ((11, 700), (20_000, 256), (10_000, 300)):
        shapes.clear()
        projection = torch.nn.Linear(2, vocab_size, bias=False)
        projected_cross_entropy(torch.randn(1, 700, 2), projection, torch.randint(11, (1, 700)))
        assert max(shape[0] for shape in shapes if shape[1] == 2) == rows


@pytest.mark.parametrize("chunk", [1, 40, 10**6])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
@pytest.mark.parametrize("items", [None, 37])
def test_projected_cross_entropy_is_the_plain_one(monkeypatch, chunk, bias, epsilon, items):
    """Loss and all gradients, in float64 to the last bits, however the targets are parted."""
    monkeypatch.setattr(loss_module, "CPU", dataclasses.replace(CPU, logits_per_chunk=chunk, rows_per_chunk=1))
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


@pytest.fixture(params=["mkl", "onednn", "onednn, narrow"])
def by_either(request, monkeypatch):
    """Lets one of the two libraries multiply, whichever this machine's processor would prefer."""
    width = 0 if request.param == "onednn" else functions.CPU.width_for_onednn_gradient
    changed = {"mkl_is_fastest": request.param == "mkl", "width_for_onednn_gradient": width}
    monkeypatch.setattr(functions, "CPU", dataclasses.replace(functions.CPU, **changed))


@pytest.mark.usefixtures("by_either")
@pytest.mark.parametrize("chunk", [1, 40, 10**6])
@pytest.mark.parametrize("width", [5, 13])  # one layout of the sum and the other
def test_projected_cross_entropy_in_float32(monkeypatch, chunk, width):
    """Gradients of chunks are added up by the products themselves."""
    monkeypatch.setattr(loss_module, "CPU", dataclasses.replace(CPU, logits_per_chunk=chunk, rows_per_chunk=1))
    hidden, labels = torch.randn(4, 6, width, dtype=torch.float64, requires_grad=True), targets()
    exact = torch.nn.Linear(width, 11, dtype=torch.float64)
    loss = label_smoothed_cross_entropy(exact(hidden), labels, label_smoothing=0.1)
    expected = (loss, *torch.autograd.grad(loss, [hidden, *exact.parameters()]))
    single, projection = hidden.detach().float().requires_grad_(), copy.deepcopy(exact).float()
    loss = projected_cross_entropy(single, projection, labels, label_smoothing=0.1)
    found = (loss, *torch.autograd.grad(loss, [single, *projection.parameters()]))
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), plain, rtol=1e-5, atol=1e-6)


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


def test_projected_cross_entropy_needs_no_gradient():
    projection, labels = torch.nn.Linear(5, 11), targets()
    with torch.no_grad():
        hidden = torch.randn(4, 6, 5)
        loss = projected_cross_entropy(hidden, projection, labels)
        torch.testing.assert_close(loss, label_smoothed_cross_entropy(projection(hidden), labels))
    assert not loss.requires_grad


def test_projected_cross_entropy_of_frozen_weights():
    hidden, projection = torch.randn(4, 6, 5, requires_grad=True), torch.nn.Linear(5, 11).requires_grad_(False)
    projected_cross_entropy(hidden, projection, targets()).backward()
    assert hidden.grad.abs().sum() > 0
    assert projection.weight.grad is None


def test_projected_cross_entropy_goes_back_as_often_as_its_graph_is_kept():
    hidden, projection = torch.randn(4, 6, 5, requires_grad=True), torch.nn.Linear(5, 11)
    values, labels = (hidden, *projection.parameters()), targets()
    expected = torch.autograd.grad(label_smoothed_cross_entropy(projection(hidden), labels), values)
    loss = projected_cross_entropy(hidden, projection, labels)
    for factor, again in ((3, True), (0, True), (2, True), (1, False)):
        for found, one in zip(torch.autograd.grad(factor * loss, values, retain_graph=again), expected, strict=True):
            torch.testing.assert_close(found, factor * one)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, values)


def test_the_largest_gradient_is_not_copied():
    """That of the vocabulary's matrix is as large as the matrix, when all activations are still there."""
    hidden, projection, saved = torch.randn(4, 6, 5, requires_grad=True), torch.nn.Linear(5, 11), []

    def pack(x):
        saved.append(x.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = projected_cross_entropy(hidden, projection, targets())
    assert torch.autograd.grad(loss, projection.weight)[0].data_ptr() in saved


@pytest.mark.parametrize("bad", [-1, 11])
def test_projected_cross_entropy_names_a_label_outside(bad):
    with pytest.raises(IndexError, match=rf"go from {min(bad, 3)} to {max(bad, 3)}, but the vocabulary has 11 tokens"):
        projected_cross_entropy(torch.randn(1, 2, 5), torch.nn.Linear(5, 11), torch.tensor([[3, bad]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_projected_cross_entropy_of_short_floats(dtype):
    """Products in the short type, the rest in float32: within 1% of the exact loss."""
    hidden, labels, projection = torch.randn(4, 6, 32), targets(), torch.nn.Linear(32, 11, bias=False)
    short = hidden.to(dtype).requires_grad_()
    loss = projected_cross_entropy(short, projection.to(dtype), labels, label_smoothing=0.1)
    exact = label_smoothed_cross_entropy(short.float() @ projection.weight.float().t(), labels, label_smoothing=0.1)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=0.01, atol=0)
    gradient, exact_gradient = (torch.autograd.grad(value, short)[0].float() for value in (loss, exact))
    torch.testing.assert_close(gradient, exact_gradient, rtol=0.02, atol=0.02 * exact_gradient.abs().max().item())


def test_projected_cross_entropy_under_autocast():
    hidden, labels, projection = torch.randn(4, 6, 32, requires_grad=True), targets(), torch.nn.Linear(32, 11)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = projected_cross_entropy(hidden, projection, labels)
        plain = label_smoothed_cross_entropy(projection(hidden), labels)
    loss.backward()
    torch.testing.assert_close(loss, plain, rtol=0.01, atol=0)
    assert hidden.grad.dtype == projection.weight.grad.dtype == torch.float32


def test_projected_cross_entropy_of_many_targets_under_autocast():
    """The table's gradient is added up in float32, chunk by chunk and, on a CPU, some of its rows at a time."""
    vocab_size, targets_of_chunk = 5_000, 600  # three chunks, three pieces of the table
    assert max(CPU.logits_per_chunk // vocab_size, CPU.rows_per_chunk) == targets_of_chunk
    hidden, projection = torch.randn(1, 1_300, 8), torch.nn.Linear(8, vocab_size)
    labels = torch.randint(vocab_size, (1, 1_300))
    found = []
    for is_on in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            loss = projected_cross_entropy(hidden, projection, labels, label_smoothing=0.1)
        found.append(torch.autograd.grad(loss, (projection.weight, projection.bias)))
    for short, exact in zip(*found, strict=True):  # bfloat16 has 8 bits
        assert short.dtype == torch.float32
        torch.testing.assert_close(short, exact, rtol=0.02, atol=0.02 * exact.abs().max().item())
