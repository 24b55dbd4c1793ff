"""Fused functions for training, each against torch's module or the formula, at its edges."""

import dataclasses

import pytest
import torch

from hf_vanilla_transformer.engine.training import functions
from hf_vanilla_transformer.engine.training.functions import add_dropout, fused_linear
from hf_vanilla_transformer.engine.training.loss import projected_cross_entropy


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_dropout_drops_as_many_as_it_says(p):
    x = torch.rand(1000, 1001) + 0.5
    dropped = add_dropout(torch.nn.Dropout(p), x)
    kept = dropped != 0
    # Six standard deviations of the binomial distribution around p.
    assert abs(1 - kept.float().mean().item() - p) < 6 * (p * (1 - p) / x.numel()) ** 0.5
    torch.testing.assert_close(dropped[kept], x[kept] / (1 - p), rtol=2e-5, atol=0)  # p to 16 bits
    # Rows and columns alike: no pattern of the random words shows.
    for dim in (0, 1):
        rates = 1 - kept.float().mean(dim=dim)
        assert (rates - p).abs().max() < 6 * (p * (1 - p) / 1000) ** 0.5


def test_neighbours_are_dropped_independently():
    kept = add_dropout(torch.nn.Dropout(0.5), torch.ones(1_000_000)) != 0
    for distance in (1, 2, 3, 4, 8):
        both = (kept[distance:] & kept[:-distance]).float().mean().item()
        assert abs(both - 0.25) < 6 * (0.25 * 0.75 / 1e6) ** 0.5


def test_dropout_passes_gradients_of_what_it_keeps():
    x = torch.ones(1000, requires_grad=True)
    dropped = add_dropout(torch.nn.Dropout(0.3), x)
    dropped.backward(torch.full((1000,), 2.0))
    torch.testing.assert_close(x.grad, 2 * dropped.detach())


def test_dropout_is_seeded():
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks.append(add_dropout(torch.nn.Dropout(0.5), torch.ones(101)))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(p):
    assert add_dropout(torch.nn.Dropout(p), torch.ones(7)).tolist() == [1.0 - p] * 7


def test_dropout_rests_in_evaluation_and_keeps_the_dtype():
    x = torch.ones(9, dtype=torch.bfloat16)
    assert add_dropout(torch.nn.Dropout(0.5).eval(), x) is x
    assert add_dropout(torch.nn.Dropout(0.5), x).dtype == torch.bfloat16
    assert add_dropout(torch.nn.Dropout(0.5), torch.ones(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_residual_is_added_to_what_dropout_leaves(dtype):
    """By the same mask, up to one rounding less."""
    x, y = (torch.randn(3, 5, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    outward, dropout, found = torch.randn(3, 5, 8, dtype=dtype), torch.nn.Dropout(0.3), []
    for compute in (lambda: add_dropout(dropout, y, x), lambda: x + add_dropout(dropout, y)):
        torch.manual_seed(3)
        total = compute()
        found.append((total, *torch.autograd.grad(total, (x, y), outward)))
    tolerance = 2 * torch.finfo(dtype).eps
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=4 * tolerance)
    assert (found[0][0] == x).any()
    assert torch.equal(add_dropout(dropout.eval(), y, x), x + y)


def test_a_residual_of_another_type_or_shape_is_added_as_always():
    x, y, dropout = torch.ones(2, 3), torch.ones(2, 3), torch.nn.Dropout(0.5)
    assert add_dropout(dropout, y.bfloat16(), x).dtype == torch.float32
    assert add_dropout(dropout, y[:1], x).shape == (2, 3)
    assert add_dropout(dropout, y[:0], x[:0]).shape == (0, 3)


@pytest.mark.parametrize("p", [1e-9, 1 - 1e-9])
def test_dropout_that_16_bits_do_not_tell_from_none_or_all_is_torchs(p):
    assert set(add_dropout(torch.nn.Dropout(p), torch.ones(50)).tolist()) == {float(p < 0.5)}


def projected(compute, maps, x, autocast=False):
    """Outputs, and the gradients of x and of all parameters, for a sum whose terms have weights of their own."""
    x = x.clone().requires_grad_()
    for one in maps:
        one.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = compute(x, *maps)
    generator = torch.Generator().manual_seed(9)
    sum((output.double() * torch.randn(output.shape, generator=generator)).sum() for output in outputs).backward()
    return [*outputs, x.grad, *(parameter.grad for one in maps for parameter in one.parameters())]


def one_by_one(x, *maps):
    return tuple(one(x) for one in maps)


def linear_maps(bias=True, dtype=torch.float32, sizes=(6, 6, 10)):
    torch.manual_seed(5)
    return [torch.nn.Linear(8, size, bias=bias, dtype=dtype) for size in sizes]


@pytest.fixture(params=["mkl", "onednn", "onednn, narrow"])
def by_either(request, monkeypatch):
    """Lets one of the two libraries multiply, whichever this machine's processor would prefer."""
    width = 0 if request.param == "onednn" else functions.CPU.width_for_onednn_gradient
    set_cpu(monkeypatch, mkl_is_fastest=request.param == "mkl", width_for_onednn_gradient=width)


def set_cpu(monkeypatch, **values):
    monkeypatch.setattr(functions, "CPU", dataclasses.replace(functions.CPU, **values))


@pytest.mark.usefixtures("by_either")
@pytest.mark.parametrize("shape", [(1, 8), (7, 8), (3, 5, 8), (1, 1, 8), (0, 8)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(6,), (6, 6, 10)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
def test_one_product_is_the_maps_one_by_one(shape, bias, sizes, dtype, tolerance):
    maps = linear_maps(bias, dtype, sizes)
    x = torch.randn(shape, dtype=dtype)
    found, expected = projected(fused_linear, maps, x), projected(one_by_one, maps, x)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_one_product_under_autocast():
    maps, x = linear_maps(), torch.randn(3, 5, 8)
    found, expected = projected(fused_linear, maps, x, autocast=True), projected(one_by_one, maps, x, autocast=True)
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    assert found[0].dtype == torch.bfloat16
    for ours, theirs in zip(found, expected, strict=True):  # bfloat16 has 8 bits
        torch.testing.assert_close(ours, theirs, atol=3e-2, rtol=3e-2)


@pytest.mark.usefixtures("by_either")
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize(("width", "outputs"), [(4, 6), (6, 4), (5, 5), (1, 1)])
def test_the_gradient_of_a_weight(rows, width, outputs):
    gradient, x = torch.randn(rows, outputs), torch.randn(rows, width)
    expected = gradient.double().t() @ x.double()
    found = functions.gradient_of_weight(gradient, x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    both = functions.gradient_of_weight(2 * gradient, x, found)  # as it lies in memory
    torch.testing.assert_close(both.double(), 3 * expected, rtol=1e-6, atol=3e-6)


def test_onednn_gets_no_matrix_with_gaps(monkeypatch):
    """With gaps between rows or columns, it takes a thousand times as long."""
    if not functions.CPU.has_onednn:
        pytest.skip("this torch has no oneDNN")
    seen, multiply = [], functions._onednn_linear

    def record(x, weight, *settings):
        seen.append(weight)
        return multiply(x, weight, *settings)

    monkeypatch.setattr(functions, "_onednn_linear", record)
    set_cpu(monkeypatch, mkl_is_fastest=False, width_for_onednn_gradient=0)
    wide, x = torch.randn(12, 10), torch.randn(4, 5)
    for weight in (wide[:, :5], wide[:5, :6].t(), wide[::2, :5]):
        torch.testing.assert_close(functions.product(x, weight), x @ weight.t(), rtol=1e-5, atol=1e-5)
    for gradient in (wide[:4, :3], wide[:4, :8], wide[:4, ::2]):
        for left, right in ((gradient, x), (x, gradient)):
            found = functions.gradient_of_weight(left, right)
            torch.testing.assert_close(found, left.t() @ right, rtol=1e-5, atol=1e-5)
    assert len(seen) == 9
    assert all(weight.is_contiguous() or weight.t().is_contiguous() for weight in seen)


@pytest.mark.parametrize("sizes", [(6,), (20, 12), (3, 4)])
def test_gradients_lie_in_memory_as_their_weights(sizes):
    """Optimisers and DDP are slower otherwise, and DDP says so."""
    maps, x = linear_maps(sizes=sizes), torch.randn(9, 8)
    sum(output.sum() for output in fused_linear(x, *maps)).backward()
    projection = torch.nn.Linear(8, 40)
    projected_cross_entropy(x[None], projection, torch.arange(9)[None], None, 0.1).backward()
    for one in (*maps, projection):
        assert one.weight.grad.stride() == one.weight.stride()


def test_frozen_maps_get_no_gradient():
    maps, x = linear_maps(), torch.randn(2, 8, requires_grad=True)
    for one in maps:
        one.requires_grad_(False)
    sum(output.sum() for output in fused_linear(x, *maps)).backward()
    assert all(parameter.grad is None for one in maps for parameter in one.parameters())
    torch.testing.assert_close(x.grad, sum(one.weight.sum(dim=0) for one in maps).expand(2, 8))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.usefixtures("by_either")
@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [(torch.float64, False, 1e-13), (torch.float32, False, 1e-5), (torch.float32, True, 3e-2)],
    ids=str,
)
def test_a_relu_is_part_of_the_product(bias, dtype, autocast, tolerance):
    maps, x = linear_maps(bias, dtype, (6,)), torch.randn(3, 5, 8, dtype=dtype)
    found = projected(lambda x, one: fused_linear(x, one, relu=True), maps, x, autocast=autocast)
    expected = projected(lambda x, one: (one(x).relu(),), maps, x, autocast=autocast)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_a_graph_that_is_kept_can_be_gone_through_again():
    (one,), x = linear_maps(sizes=(6,)), torch.randn(3, 8, requires_grad=True)
    y = add_dropout(torch.nn.Dropout(0.5), *fused_linear(x, one, relu=True))
    wanted = [x, *one.parameters()]
    first = torch.autograd.grad(y.square().sum(), wanted, retain_graph=True)
    for once, again in zip(first, torch.autograd.grad(y.square().sum(), wanted), strict=True):
        assert torch.equal(once, again)
