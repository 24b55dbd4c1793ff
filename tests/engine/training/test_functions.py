"""Fused functions for training, each against torch's module or the formula, at its edges."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from hf_vanilla_transformer.engine.training import functions
from hf_vanilla_transformer.engine.training.functions import add_dropout, fused_linear, layer_norm, short_attention
from hf_vanilla_transformer.engine.training.loss import projected_cross_entropy
from hf_vanilla_transformer.modeling_vanilla_transformer import eager_attention


def attend_in_short_sentences(module, query, key, value, mask, scaling):
    return short_attention(query, key, value, mask, scaling, module.is_causal), None


def masks_of_attention(batch, queries, keys):
    whole = torch.ones(batch, 1, queries, keys, dtype=torch.bool)
    padded, blind = whole.clone(), whole.clone()
    padded[0, :, :, keys // 2 :] = False
    blind[0] = False  # a query that may look at nothing
    return {"none": None, "padding": padded, "one row for all": padded[:1], "blind": blind}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "padding", "one row for all", "blind"])
@pytest.mark.parametrize(("d_k", "d_v"), [(8, 8), (3, 5)])
def test_attention_in_short_sentences_is_the_formula(mask, is_causal, d_k, d_v):
    """Outputs and gradients, with queries, keys and values side by side in memory and apart."""
    module = SimpleNamespace(is_causal=is_causal, training=True)
    for queries, keys in ((1, 1), (6, 6), (4, 7)):
        mask_of, found = masks_of_attention(3, queries, keys)[mask], []
        wanted = torch.randn(3, queries, 2, d_v, dtype=torch.float64)
        rows = torch.randn(3, max(queries, keys), 2 * (2 * d_k + d_v), dtype=torch.float64, requires_grad=True)
        for attend in (attend_in_short_sentences, eager_attention):
            parts = rows.split([2 * d_k, 2 * d_k, 2 * d_v], dim=-1)
            query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
            heads, _ = attend(module, query[:, :, :queries], key[:, :, :keys], value[:, :, :keys], mask_of, scaling=0.3)
            assert heads.is_contiguous() or attend is eager_attention
            found.append((heads, *torch.autograd.grad((heads * wanted).sum(), rows)))
        for ours, formula in zip(*found, strict=True):
            torch.testing.assert_close(ours, formula, rtol=1e-12, atol=1e-13)


def test_gradients_of_attention_lie_side_by_side_as_their_tensors_do():
    rows = torch.randn(3, 4, 18)
    parts = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in rows.split([6, 6, 6], dim=-1)]
    together = [part.transpose(1, 2).flatten(2).flatten(0, 1) for part in functions.empty_gradients(*parts)]
    assert functions.side_by_side(together).data_ptr() == together[0].data_ptr()
    assert [part.shape for part in functions.empty_gradients(*parts)] == [part.shape for part in parts]
    # Parts of something larger, or the same tensor twice, get room of their own.
    for tensors in (parts[:2], [parts[0].contiguous(), rows, rows]):
        apart = functions.empty_gradients(*tensors)
        assert len({room.untyped_storage().data_ptr() for room in apart}) == len(apart)


def norms(d=8, dtype=torch.float64):
    """Two of torch's own, with the same gains and biases, away from 1 and 0: as a function of ours, and as a module."""
    norm = torch.nn.LayerNorm(d, eps=1e-6).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-2, 2, d))
        norm.bias.copy_(torch.linspace(3, -3, d))
    return Fused(norm), norm


class Fused(torch.nn.Module):
    """A layer normalisation of torch's, by the fused function."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.weight, self.bias = norm, norm.weight, norm.bias

    def forward(self, x):
        return layer_norm(self.norm, x)


# Going back from the output to the input costs some digits: those of the bias, divided by the gain.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)], ids=str)
@pytest.mark.parametrize("shape", [(8,), (5, 8), (3, 4, 8), (0, 8)], ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_norm_has_torchs_values_and_gradients(dtype, tolerance, shape, frozen):
    own, plain = norms(dtype=dtype)
    x, seen = 5 + 3 * torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    found = []
    for norm in (own, plain):
        norm.requires_grad_(not frozen)
        at = x.clone().requires_grad_()
        y = norm(at)
        wanted = [at] if frozen else [at, norm.weight, norm.bias]
        found.append((y, *torch.autograd.grad(y, wanted, seen)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def kept_by(norm, x):
    """What the graph of `norm(x)` holds on to, by the places of its memory, and the output's."""
    places = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: places.append(t.data_ptr()) or t, lambda t: t):
        y = norm(x)
    return places, y.data_ptr()


def test_norm_keeps_its_output_in_place_of_its_input():
    own, plain = norms()
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    places, of_output = kept_by(own, x)
    assert of_output in places
    assert x.data_ptr() not in places
    places, of_output = kept_by(plain, x)
    assert of_output not in places
    assert x.data_ptr() in places


@pytest.mark.parametrize("gain", [0.0, 1e-3, -1e-3])
def test_norm_with_a_tiny_gain_keeps_its_input(gain):
    """From such an output, there is no way back."""
    own, plain = norms()
    x, seen = torch.randn(2, 4, 8, dtype=torch.float64)
    for norm in (own, plain):
        norm.weight.data[3] = gain
    assert x.data_ptr() in kept_by(own, x.requires_grad_())[0]
    ours, theirs = (torch.autograd.grad(norm(x), [x, norm.weight, norm.bias], seen) for norm in (own, plain))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("missing", ["weight", "bias"])
def test_norm_without_a_parameter_is_torchs(missing):
    norm, x = torch.nn.LayerNorm(8), torch.randn(5, 8)
    setattr(norm, missing, None)
    assert torch.equal(layer_norm(norm, x), norm(x))


def test_norm_of_short_floats_and_under_autocast():
    """bfloat16 has too few digits to go back from; under autocast, what comes in is float32, and so is the gradient."""
    short = Fused(torch.nn.LayerNorm(8).to(torch.bfloat16))
    x = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True)
    assert x.data_ptr() in kept_by(short, x)[0]
    own, plain = norms(dtype=torch.float32)
    x, found = torch.randn(5, 8, requires_grad=True), []
    for norm in (own, plain):
        with torch.autocast("cpu", torch.bfloat16):
            y = norm(x)
        found.append((y, *torch.autograd.grad(y.square().sum(), [x, norm.weight, norm.bias])))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


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
    norm, dropout = torch.nn.LayerNorm(6), torch.nn.Dropout(0.5)
    y = layer_norm(norm, add_dropout(dropout, *fused_linear(x, one, relu=True)))
    wanted = [x, *one.parameters(), *norm.parameters()]
    first = torch.autograd.grad(y.square().sum(), wanted, retain_graph=True)
    for once, again in zip(first, torch.autograd.grad(y.square().sum(), wanted), strict=True):
        assert torch.equal(once, again)


def test_neighbouring_columns_are_joined_without_a_copy():
    rows = torch.randn(4, 12)
    for parts, is_view in (
        ([rows[:, :3], rows[:, 3:5], rows[:, 5:9]], True),
        ([rows[:, 3:5]], True),
        ([rows[:, 3:5], rows[:, :3]], False),
        ([rows[:, :3], rows[:, 4:5]], False),
        ([rows[:, :3], rows[:, 3:5].clone()], False),
        ([rows.t()[:, :2], rows.t()[:, 2:4]], False),
    ):
        joined = functions.side_by_side(parts)
        assert torch.equal(joined, torch.cat(parts, dim=1))
        assert (joined.data_ptr() == parts[0].data_ptr()) == is_view
