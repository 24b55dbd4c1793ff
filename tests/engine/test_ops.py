"""Functions of tensors, each on the cases at its edges."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer import ops_vanilla_transformer as ops
from hf_vanilla_transformer.modeling_vanilla_transformer import eager_attention
from hf_vanilla_transformer.ops_vanilla_transformer import (
    Dropout,
    LayerNorm,
    Packing,
    add_dropped,
    attention_kernel,
    label_smoothed_cross_entropy,
    left_padding,
    linear,
    look_up,
    on_cpu,
    positions_of,
    project,
    projected_cross_entropy,
    shift_right,
    up_to_last,
)


# ---- positions_of ----
def positions(mask, past_length=0, length=4):
    return positions_of(mask, past_length, torch.zeros(2, length, 8)).tolist()


@pytest.mark.parametrize("past", [0, 3, torch.tensor(3)], ids=["0", "3", "tensor 3"])
def test_positions_without_padding(past):
    assert positions(None, past) == [[n + int(past) for n in range(4)]]


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.int32, torch.float32], ids=str)
def test_positions_of_a_padded_batch(dtype):
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]]).to(dtype)
    right, left = positions(mask)
    assert right[:3] == [0, 1, 2]
    assert left[2:] == [0, 1]
    assert all(0 <= position < 4 for position in right + left)  # padding too has a place in the table


def test_positions_of_padding_alone():
    assert positions(torch.zeros(2, 4)) == [[0] * 4] * 2


def test_positions_with_padding_inside():
    assert positions(torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1]]))[0] == [0, 0, 1, 2]


def test_positions_after_a_past():
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])  # three positions in the past, two here
    assert positions(mask, past_length=3, length=2) == [[3, 4], [1, 2]]
    assert positions(mask, past_length=4, length=1) == [[4], [2]]


@pytest.mark.parametrize("added", [False, True], ids=["boolean", "added"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_positions_of_a_causal_mask(added, dtype):
    padding = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]).bool()
    visible = (padding[:, None] & torch.ones(4, 4).tril().bool())[:, None]
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min) if added else visible
    whole, left = positions(mask)
    assert whole == [0, 1, 2, 3]
    assert left[2:] == [0, 1]
    last = positions(mask[:, :, 3:], past_length=3, length=1)
    assert last == [[3], [1]]


def test_positions_index_a_table():
    assert positions_of(torch.ones(2, 4, dtype=torch.bool), 0, torch.zeros(2, 4, 8)).dtype == torch.long
    assert positions_of(None, 0, torch.zeros(2, 4, 8)).dtype == torch.long


# ---- shift_right ----
@pytest.mark.parametrize(
    ("labels", "shifted"),
    [
        ([5, 6, 7], [1, 5, 6]),
        ([5], [1]),
        ([5, 6, -100, -100], [1, 5, 6, 0]),
        ([-100, -100, 5, 6], [0, 0, 1, 5]),
        ([-100, 5, 6, -100], [0, 1, 5, 6]),
        ([5, -100, 6, 7], [1, 5, 0, 6]),  # a target that isn't learned, in the middle
        ([-100, -100], [1, 0]),
        ([-100], [1]),
        ([0, 1, 2], [1, 0, 1]),  # special tokens are tokens
    ],
)
def test_shift_right(labels, shifted):
    labels = torch.tensor([labels, labels])
    before = labels.clone()
    assert shift_right(labels, start_token_id=1, pad_token_id=0).tolist() == [shifted, shifted]
    assert torch.equal(labels, before)


def test_shift_right_where_padding_starts_a_target():
    labels = torch.tensor([[-100, 5, 6], [5, 6, -100]])
    assert shift_right(labels, start_token_id=9, pad_token_id=9).tolist() == [[9, 9, 5], [9, 5, 6]]


@pytest.mark.parametrize(("start", "pad"), [(None, 0), (1, None)])
def test_shift_right_needs_both_tokens(start, pad):
    with pytest.raises(ValueError, match=r"decoder_start_token_id.*pad_token_id"):
        shift_right(torch.tensor([[5]]), start, pad)


# ---- label_smoothed_cross_entropy ----
LABELS = torch.tensor([[3, 0, -100], [-100, 4, -100]])


def smoothed(logits, labels, epsilon):
    """The sum over targets, in float64: q is 1 - epsilon on the target and epsilon / V on every token besides."""
    total = 0.0
    for row, label in zip(logits.flatten(0, 1).double(), labels.flatten().tolist(), strict=True):
        if label != -100:
            q = torch.full_like(row, epsilon / len(row))
            q[label] += 1 - epsilon
            total -= (q * row.log_softmax(-1)).sum()
    return total


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.9])
def test_label_smoothed_cross_entropy(epsilon):
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    expected = smoothed(logits, LABELS, epsilon)
    # In float64 two ways to sum fifteen terms differ in the last digits.
    close = {"rtol": 1e-12, "atol": 0.0}
    torch.testing.assert_close(label_smoothed_cross_entropy(logits, LABELS, None, epsilon), expected / 3, **close)
    for count in (7, torch.tensor(7), torch.tensor([7])):
        loss = label_smoothed_cross_entropy(logits, LABELS, count, epsilon)
        torch.testing.assert_close(loss.squeeze(), expected / 7, **close)


def test_loss_of_no_target_is_zero():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    for count in (None, 7, torch.tensor(7), 0, torch.tensor(0)):
        loss = label_smoothed_cross_entropy(logits, torch.full((2, 3), -100), count, 0.1)
        assert loss == 0
        (gradient,) = torch.autograd.grad(loss, logits)
        assert (gradient == 0).all()


def test_gradient_stays_with_the_targets():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    label_smoothed_cross_entropy(logits, LABELS, label_smoothing=0.1).backward()
    assert torch.equal((logits.grad != 0).any(-1), LABELS != -100)
    torch.testing.assert_close(logits.grad.sum(-1), torch.zeros(2, 3))  # as of every cross-entropy


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_loss_is_computed_in_float32_at_least(dtype):
    logits = (10 * torch.randn(2, 3, 5)).to(dtype)
    loss = label_smoothed_cross_entropy(logits, LABELS, label_smoothing=0.1)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(loss.double(), smoothed(logits, LABELS, 0.1) / 3, rtol=1e-6, atol=1e-6)


def test_loss_takes_what_transformers_hands_over():
    logits = torch.randn(2, 3, 5)
    loss = label_smoothed_cross_entropy(logits=logits, labels=LABELS, vocab_size=5, shift_labels=LABELS, output_ids=1)
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), LABELS.flatten()))


@pytest.mark.parametrize("bad", [5, 99, -1, -99])
def test_label_outside_the_vocabulary(bad):
    labels = LABELS.clone()
    labels[1, 0] = bad
    with pytest.raises(IndexError, match=rf"^Token id {bad} is outside of the vocabulary of 5 tokens, 0 to 4\."):
        label_smoothed_cross_entropy(torch.randn(2, 3, 5), labels)


# ---- look_up ----
TABLE = torch.nn.Embedding(5, 8)


@pytest.mark.parametrize("dtype", [torch.long, torch.int32], ids=str)
def test_look_up(dtype):
    token_ids = torch.tensor([[0, 4], [3, 3]], dtype=dtype)
    assert torch.equal(look_up(TABLE, token_ids, None), TABLE.weight[token_ids.long()])


def test_embeddings_are_handed_on():
    embeddings = torch.randn(2, 3, 8)
    assert look_up(TABLE, None, embeddings) is embeddings


def test_look_up_needs_one_of_two():
    for token_ids, embeddings in ((None, None), (torch.tensor([[1]]), torch.randn(1, 1, 8))):
        with pytest.raises(ValueError, match=r"exactly one.*decoder_input_ids.*labels.*DataCollatorForSeq2Seq"):
            look_up(TABLE, token_ids, embeddings)


@pytest.mark.parametrize("bad", [5, -1, -100, 10**6])
def test_id_outside_the_vocabulary(bad):
    with pytest.raises(IndexError, match=rf"^Token id {bad} is outside of the vocabulary of 5 tokens, 0 to 4\."):
        look_up(TABLE, torch.tensor([[0, 4], [bad, 7]]), None)


# ---- attention_kernel ----
def kernel_of(name, mask=None, is_cross=False, d_k=8, d_v=8, lengths=(3, 5), trains=False, **kwargs):
    config = SimpleNamespace(_attn_implementation=name)
    module = SimpleNamespace(config=config, head_dim=d_k, value_head_dim=d_v, training=trains)
    query, key = (torch.zeros(2, 1, length, d_k) for length in lengths)
    return attention_kernel(module, query, key, mask, is_cross, **kwargs)


@pytest.mark.parametrize("name", ["sdpa", "flex_attention", "flash_attention_2"])
def test_kernel_is_the_one_named(name):
    mask = torch.ones(2, 5, dtype=torch.bool)
    assert kernel_of(name, mask) == (name, mask)


@pytest.mark.parametrize("name", ["eager", None])
def test_kernel_without_a_name_is_the_formula(name):
    assert kernel_of(name) == ("eager", None)


def test_weights_need_the_formula():
    mask = torch.ones(2, 1, 3, 5, dtype=torch.bool)
    assert kernel_of("sdpa", mask, output_attentions=True) == ("eager", mask)
    assert kernel_of("sdpa", mask, output_attentions=None) == ("sdpa", mask)


@pytest.mark.parametrize("lengths", [(1, 1), (32, 32), (2, 512)])
def test_short_sentences_train_by_the_formula(lengths):
    assert kernel_of("sdpa", lengths=lengths, trains=True) == ("eager", None)
    assert kernel_of("sdpa", lengths=lengths) == ("sdpa", None)
    assert kernel_of("sdpa", lengths=(lengths[0] + 1, 513), trains=True) == ("sdpa", None)
    assert kernel_of("flex_attention", lengths=lengths, trains=True) == ("flex_attention", None)


@pytest.mark.parametrize("padded", [False, True])
def test_short_sentences_have_the_gradients_of_sdpa(monkeypatch, padded):
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=50, dropout=0.0)
    model = VanillaTransformerForConditionalGeneration(config).double().train()
    batch = {"input_ids": torch.randint(3, 50, (3, 7)), "labels": torch.randint(3, 50, (3, 6))}
    if padded:
        batch["attention_mask"] = torch.tensor([[1] * 7, [1] * 6 + [0], [1] * 2 + [0] * 5])
        batch["labels"][1, 4:] = -100
    found = []
    for scores in (0, 32 * 32):
        monkeypatch.setattr(ops, "SCORES_OF_SHORT_SENTENCES", scores)
        loss = model(**batch).loss
        found.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    for sdpa, formula in zip(*found, strict=True):
        torch.testing.assert_close(formula, sdpa, rtol=1e-10, atol=1e-14)


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
        for attend in (ops._attend_in_short_sentences, eager_attention):
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
    together = [part.transpose(1, 2).flatten(2).flatten(0, 1) for part in ops._room_for_gradients(*parts)]
    assert ops._side_by_side(together).data_ptr() == together[0].data_ptr()
    assert [part.shape for part in ops._room_for_gradients(*parts)] == [part.shape for part in parts]
    # Parts of something larger, or the same tensor twice, get room of their own.
    for tensors in (parts[:2], [parts[0].contiguous(), rows, rows]):
        apart = ops._room_for_gradients(*tensors)
        assert len({room.untyped_storage().data_ptr() for room in apart}) == len(apart)


@pytest.mark.parametrize("option", [{"dropout": 0.1}, {"output_attentions": True}], ids=str)
def test_attention_that_is_dropped_or_shown_is_left_to_the_formula(option):
    def attend(module, q, k, v, mask, **kwargs):
        return q, "seen"

    q = torch.randn(1, 2, 3, 4)
    module = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"), training=True, is_causal=False)
    assert on_cpu(attend)(module, q, q, q, None, scaling=1.0, **option)[1] == "seen"
    assert on_cpu(attend)(module, q, q, q, None, scaling=1.0)[1] is None
    assert on_cpu(attend)(module, q, q, q, torch.zeros(1, 1, 3, 3), scaling=1.0)[1] == "seen"  # may hold any numbers


def test_gradients_of_fake_tensors():
    """With which others find out how much memory a training takes."""
    with FakeTensorMode():
        config = VanillaTransformerConfig.from_preset("tiny", vocab_size=50)
        model = VanillaTransformerForConditionalGeneration(config).train()
        tokens = torch.ones(2, 5, dtype=torch.long)
        embedded = model.get_input_embeddings()(tokens)
        attend = model.model.encoder.layers[0].self_attn
        attend(embedded, None, None)[0].sum().backward()
        assert attend.q_proj.weight.grad.shape == attend.q_proj.weight.shape


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"])
def test_flash_needs_values_no_wider_than_keys(name):
    with pytest.raises(ValueError, match=r"d_v <= d_k.*value_head_dim.*head_dim.*sdpa"):
        kernel_of(name, d_k=4, d_v=8)


def test_flash_across_two_sequences_with_padding():
    """flash-attn would take the mask of the keys for the queries' too."""
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    kernel, expanded = kernel_of("flash_attention_2", mask, is_cross=True)
    assert kernel == "sdpa"
    assert expanded.dtype == torch.bool
    assert torch.equal(expanded, mask.bool().view(2, 1, 1, 3))
    assert kernel_of("flash_attention_2", None, is_cross=True) == ("flash_attention_2", None)


# ---- The loss without logits ----
def targets(padded: float = 0.3, vocab_size: int = 11) -> torch.Tensor:
    labels = torch.randint(vocab_size, (4, 6))
    return labels.masked_fill(torch.rand(4, 6) < padded, -100)


def test_chunks_of_the_loss_have_enough_rows_and_not_too_many(monkeypatch):
    shapes, product = [], ops._product
    monkeypatch.setattr(
        ops, "_product", lambda x, weight, bias=None: shapes.append(x.shape) or product(x, weight, bias)
    )
    for vocab_size, rows in ((11, 700), (20_000, 256), (10_000, 300)):
        shapes.clear()
        projection = torch.nn.Linear(2, vocab_size, bias=False)
        ops.projected_cross_entropy(torch.randn(1, 700, 2), projection, torch.randint(11, (1, 700)))
        assert max(shape[0] for shape in shapes if shape[1] == 2) == rows


@pytest.mark.parametrize("chunk", [1, 40, 10**6])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
@pytest.mark.parametrize("items", [None, 37])
def test_projected_cross_entropy_is_the_plain_one(monkeypatch, chunk, bias, epsilon, items):
    """Loss and all gradients, in float64 to the last bits, however the targets are parted."""
    monkeypatch.setattr(ops, "LOGITS_A_CHUNK", chunk)
    monkeypatch.setattr(ops, "ROWS_A_CHUNK", (1, 1))
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
    monkeypatch.setattr(ops, "MKL_IS_FASTEST", request.param == "mkl")
    if request.param == "onednn":
        monkeypatch.setattr(ops, "WIDTH_FOR_ONEDNN_GRADIENT", 0)


@pytest.mark.usefixtures("by_either")
@pytest.mark.parametrize("chunk", [1, 40, 10**6])
@pytest.mark.parametrize("width", [5, 13])  # one layout of the sum and the other
def test_projected_cross_entropy_in_float32(monkeypatch, chunk, width):
    """Gradients of chunks are added up by the products themselves."""
    monkeypatch.setattr(ops, "LOGITS_A_CHUNK", chunk)
    monkeypatch.setattr(ops, "ROWS_A_CHUNK", (1, 1))
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


def test_projected_cross_entropy_compiles(recwarn):
    hidden, projection, labels = torch.randn(4, 6, 5, requires_grad=True), torch.nn.Linear(5, 11), targets()
    torch.compiler.reset()
    found = []
    for function in (projected_cross_entropy, torch.compile(projected_cross_entropy, backend="aot_eager")):
        loss = function(hidden, projection, labels, label_smoothing=0.1)
        found.append((loss, *torch.autograd.grad(loss, (hidden, *projection.parameters()))))
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain)
    assert not [str(warning.message) for warning in recwarn if "trace the builtin" in str(warning.message)]


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
    with pytest.raises(IndexError, match=f"{bad} is outside of the vocabulary of 11"):
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
    assert max(ops.LOGITS_A_CHUNK // vocab_size, ops.ROWS_A_CHUNK[0]) == targets_of_chunk
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


def test_a_model_without_logits_trains_as_one_with_them():
    """Dropout included: the random numbers are drawn in the same order."""
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=50, d_model=16, output_bias=True)
    model = VanillaTransformerForConditionalGeneration(config).double().train()
    batch = {"input_ids": torch.randint(3, 50, (3, 7)), "labels": targets(vocab_size=50)[:3]}
    found = []
    for skip in (False, True):
        torch.manual_seed(1)
        output = model(**batch, skip_logits=skip)
        assert (output.logits is None) == skip
        found.append((output.loss, *torch.autograd.grad(output.loss, list(model.parameters()))))
    for plain, fast in zip(*found, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-11, atol=1e-14)


def test_without_labels_logits_are_not_skipped():
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=50, d_model=16)
    ids = torch.randint(3, 50, (2, 4))
    output = VanillaTransformerForConditionalGeneration(config)(ids, decoder_input_ids=ids, skip_logits=True)
    assert output.logits.shape == (2, 4, 50)


# ---- Layer normalisation ----
def norms(d=8, dtype=torch.float64):
    """Ours and torch's own, with the same gains and biases, away from 1 and 0."""
    own, plain = LayerNorm(d, eps=1e-6).to(dtype), torch.nn.LayerNorm(d, eps=1e-6).to(dtype)
    with torch.no_grad():
        own.weight.copy_(torch.linspace(-2, 2, d))
        own.bias.copy_(torch.linspace(3, -3, d))
    plain.load_state_dict(own.state_dict())
    return own, plain


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
    own, x = LayerNorm(8), torch.randn(5, 8)
    setattr(own, missing, None)
    assert torch.equal(own(x), torch.nn.functional.layer_norm(x, (8,), own.weight, own.bias))


def test_norm_of_short_floats_and_under_autocast():
    """bfloat16 has too few digits to go back from; under autocast, what comes in is float32, and so is the gradient."""
    short = LayerNorm(8).to(torch.bfloat16)
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


# ---- Dropout ----
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_dropout_drops_as_many_as_it_says(p):
    x = torch.rand(1000, 1001) + 0.5
    dropped = Dropout(p)(x)
    kept = dropped != 0
    # Six standard deviations of the binomial distribution around p.
    assert abs(1 - kept.float().mean().item() - p) < 6 * (p * (1 - p) / x.numel()) ** 0.5
    torch.testing.assert_close(dropped[kept], x[kept] / (1 - p), rtol=2e-5, atol=0)  # p to 16 bits
    # Rows and columns alike: no pattern of the random words shows.
    for dim in (0, 1):
        rates = 1 - kept.float().mean(dim=dim)
        assert (rates - p).abs().max() < 6 * (p * (1 - p) / 1000) ** 0.5


def test_neighbours_are_dropped_independently():
    kept = Dropout(0.5)(torch.ones(1_000_000)) != 0
    for distance in (1, 2, 3, 4, 8):
        both = (kept[distance:] & kept[:-distance]).float().mean().item()
        assert abs(both - 0.25) < 6 * (0.25 * 0.75 / 1e6) ** 0.5


def test_dropout_passes_gradients_of_what_it_keeps():
    x = torch.ones(1000, requires_grad=True)
    dropped = Dropout(0.3)(x)
    dropped.backward(torch.full((1000,), 2.0))
    torch.testing.assert_close(x.grad, 2 * dropped.detach())


def test_dropout_is_seeded():
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks.append(Dropout(0.5)(torch.ones(101)))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(p):
    assert Dropout(p)(torch.ones(7)).tolist() == [1.0 - p] * 7


def test_dropout_rests_in_evaluation_and_keeps_the_dtype():
    x = torch.ones(9, dtype=torch.bfloat16)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.5)(x).dtype == torch.bfloat16
    assert Dropout(0.5)(torch.ones(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_residual_is_added_to_what_dropout_leaves(dtype):
    """By the same mask, up to one rounding less."""
    x, y = (torch.randn(3, 5, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    outward, dropout, found = torch.randn(3, 5, 8, dtype=dtype), Dropout(0.3), []
    for compute in (lambda: add_dropped(x, dropout, y), lambda: x + dropout(y)):
        torch.manual_seed(3)
        total = compute()
        found.append((total, *torch.autograd.grad(total, (x, y), outward)))
    tolerance = 2 * torch.finfo(dtype).eps
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=4 * tolerance)
    assert (found[0][0] == x).any()
    assert torch.equal(add_dropped(x, dropout.eval(), y), x + y)


def test_a_residual_is_added_to_any_dropout():
    """One of torch's, one with a hook, another type or shape than the residual's."""
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    assert set(add_dropped(x, torch.nn.Dropout(0.5), y).flatten().tolist()) <= {1.0, 3.0}
    calls, dropout = [], Dropout(0.5)
    handle = dropout.register_forward_hook(lambda *_: calls.append(1))
    add_dropped(x, dropout, y)
    assert calls == [1]
    handle.remove()
    assert add_dropped(x, dropout, y.bfloat16()).dtype == torch.float32
    assert add_dropped(x, dropout, y[:1]).shape == (2, 3)
    assert add_dropped(x[:0], dropout, y[:0]).shape == (0, 3)


# ---- sdpa on a CPU ----
def test_bfloat16_attention_is_computed_in_float32():
    seen = []

    def attend(module, q, k, v, mask, **kwargs):
        seen.append((q.dtype, mask.dtype, torch.is_autocast_enabled("cpu")))
        return q, None

    module = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"), training=False)
    q, mask = torch.randn(1, 2, 3, 4, dtype=torch.bfloat16), torch.zeros(1, 1, 3, 3, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        heads, _ = on_cpu(attend)(module, q, q, q, mask)
    assert seen == [(torch.float32, torch.float32, False)]
    assert heads.dtype == torch.bfloat16
    on_cpu(attend)(module, q.float(), q.float(), q.float(), mask.float())
    module.config._attn_implementation = "eager"  # whose masks have the smallest number of their own dtype
    on_cpu(attend)(module, q, q, q, mask)
    assert [dtype for dtype, _, _ in seen[1:]] == [torch.float32, torch.bfloat16]


# ---- Padding on the left of a target ----
def test_left_padding_is_found_and_right_padding_is_not():
    config = SimpleNamespace(decoder_start_token_id=1, pad_token_id=0)
    right, left = torch.tensor([[1, 5, 0]]), torch.tensor([[0, 1, 5]])
    assert left_padding(right, None, config) is None
    assert left_padding(left, None, config).tolist() == [[False, True, True]]
    assert left_padding(right, torch.tensor([[5, 6, -100]]), config) is None
    assert left_padding(right, torch.tensor([[-100, 5, 6]]), config).tolist() == [[False, True, True]]
    assert left_padding(None, None, config) is None
    same = SimpleNamespace(decoder_start_token_id=0, pad_token_id=0)
    assert left_padding(left, None, same) is None


# ---- project ----
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
    found, expected = projected(project, maps, x), projected(one_by_one, maps, x)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_one_product_under_autocast():
    maps, x = linear_maps(), torch.randn(3, 5, 8)
    found, expected = projected(project, maps, x, autocast=True), projected(one_by_one, maps, x, autocast=True)
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
    found = ops._gradient_of_weight(gradient, x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    both = ops._gradient_of_weight(2 * gradient, x, found)  # as it lies in memory
    torch.testing.assert_close(both.double(), 3 * expected, rtol=1e-6, atol=3e-6)


def test_onednn_gets_no_matrix_with_gaps(monkeypatch):
    """With gaps between rows or columns, it takes a thousand times as long."""
    if ops.ONEDNN_LINEAR is None:
        pytest.skip("this torch has no oneDNN")
    seen = []

    def record(x, weight, *settings):
        seen.append(weight)
        return torch.ops.mkldnn._linear_pointwise(x, weight, *settings)

    monkeypatch.setattr(ops, "ONEDNN_LINEAR", record)
    monkeypatch.setattr(ops, "MKL_IS_FASTEST", False)
    monkeypatch.setattr(ops, "WIDTH_FOR_ONEDNN_GRADIENT", 0)
    wide, x = torch.randn(12, 10), torch.randn(4, 5)
    for weight in (wide[:, :5], wide[:5, :6].t(), wide[::2, :5]):
        torch.testing.assert_close(ops._product(x, weight), x @ weight.t(), rtol=1e-5, atol=1e-5)
    for gradient in (wide[:4, :3], wide[:4, :8], wide[:4, ::2]):
        torch.testing.assert_close(ops._gradient_of_weight(gradient, x), gradient.t() @ x, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ops._gradient_of_weight(x, gradient), x.t() @ gradient, rtol=1e-5, atol=1e-5)
    assert len(seen) == 9
    assert all(weight.is_contiguous() or weight.t().is_contiguous() for weight in seen)


@pytest.mark.parametrize("sizes", [(6,), (20, 12), (3, 4)])
def test_gradients_lie_in_memory_as_their_weights(sizes):
    """Optimisers and DDP are slower otherwise, and DDP says so."""
    maps, x = linear_maps(sizes=sizes), torch.randn(9, 8)
    sum(output.sum() for output in project(x, *maps)).backward()
    projection = torch.nn.Linear(8, 40)
    projected_cross_entropy(x[None], projection, torch.arange(9)[None], None, 0.1).backward()
    for one in (*maps, projection):
        assert one.weight.grad.stride() == one.weight.stride()


def products_of(monkeypatch):
    """Records the shape of each weight that goes through one product."""
    shapes, product = [], ops._product

    def record(x, weight, *settings):
        shapes.append(tuple(weight.shape))
        return product(x, weight, *settings)

    monkeypatch.setattr(ops, "_product", record)
    return shapes


def test_maps_are_one_product_only_if_nothing_else_has_to_be_asked(monkeypatch):
    class Adapted(torch.nn.Linear):
        pass

    shapes = products_of(monkeypatch)
    x, maps = torch.randn(2, 8), linear_maps()
    project(x, *maps)
    assert shapes == [(22, 8)]
    shapes.clear()

    calls = []
    handle = maps[1].register_forward_hook(lambda module, args, output: calls.append(output))
    _, hooked, _ = project(x, *maps)
    assert calls[0] is hooked
    handle.remove()
    project(x, maps[0], Adapted(8, 6), maps[2])
    with torch.no_grad():
        project(x, *maps)
    assert shapes == []


def test_frozen_maps_get_no_gradient():
    maps, x = linear_maps(), torch.randn(2, 8, requires_grad=True)
    for one in maps:
        one.requires_grad_(False)
    sum(output.sum() for output in project(x, *maps)).backward()
    assert all(parameter.grad is None for one in maps for parameter in one.parameters())
    torch.testing.assert_close(x.grad, sum(one.weight.sum(dim=0) for one in maps).expand(2, 8))


def test_linear_is_the_map():
    (one,) = linear_maps(sizes=(6,))
    x = torch.randn(4, 8)
    torch.testing.assert_close(linear(one, x), one(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.usefixtures("by_either")
@pytest.mark.parametrize("activation", [torch.nn.ReLU(), torch.nn.GELU()], ids=str)
@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [(torch.float64, False, 1e-13), (torch.float32, False, 1e-5), (torch.float32, True, 3e-2)],
    ids=str,
)
def test_linear_with_an_activation(bias, activation, dtype, autocast, tolerance):
    maps, x = linear_maps(bias, dtype, (6,)), torch.randn(3, 5, 8, dtype=dtype)
    found = projected(lambda x, one: (linear(one, x, activation),), maps, x, autocast=autocast)
    expected = projected(lambda x, one: (activation(one(x)),), maps, x, autocast=autocast)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_relu_is_part_of_the_product_only_if_nothing_else_has_to_be_asked(monkeypatch):
    class Adapted(torch.nn.ReLU):
        pass

    (one,), x, calls = linear_maps(sizes=(6,)), torch.randn(2, 8), []

    def record(x, weight, bias, relu):
        calls.append(relu)
        return product(x, weight, bias, relu)

    def is_part(activation):
        calls.clear()
        torch.testing.assert_close(linear(one, x, activation), F.relu(one(x)), atol=1e-6, rtol=1e-5)
        return calls == [True]

    product = ops._product
    monkeypatch.setattr(ops, "_product", record)
    hooked, watched = torch.nn.ReLU(), torch.nn.ReLU()
    hooked.register_forward_hook(lambda module, args, output: None)
    watched.register_full_backward_hook(lambda module, of_input, of_output: None)
    assert is_part(torch.nn.ReLU())
    assert not is_part(Adapted())
    assert not is_part(hooked)
    assert not is_part(watched)
    with torch.no_grad():
        assert not is_part(torch.nn.ReLU())


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
        joined = ops._side_by_side(parts)
        assert torch.equal(joined, torch.cat(parts, dim=1))
        assert (joined.data_ptr() == parts[0].data_ptr()) == is_view


# ---- Packing ----
def test_packing_takes_padding_out_and_puts_it_back():
    real = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]]).bool()
    x = torch.arange(18.0).view(3, 3, 2).requires_grad_()
    packing = Packing(real)
    packed = packing.pack(x)
    assert torch.equal(packed, x[real])
    assert torch.equal(packing.unpack(packed), x * real[..., None])
    packing.unpack(packed).sum().backward()
    assert torch.equal(x.grad, real[..., None].expand(3, 3, 2).float())
    assert packing.heads(packed, 1).shape == (3, 2, 3, 1)


def test_nothing_is_left_out_without_a_mask():
    x = torch.randn(2, 3, 4)
    assert Packing().pack(x) is x
    assert Packing().unpack(x) is x


@pytest.mark.parametrize(
    ("padding", "kwargs", "leaves_out"),
    [(0, {}, False), (9, {}, False), (11, {}, True), (100, {}, False), (50, {"output_attentions": True}, False)],
)
def test_padding_is_left_out_where_that_pays(padding, kwargs, leaves_out):
    mask = torch.ones(10, 10)
    mask.view(-1)[:padding] = 0
    assert (Packing.of(mask, **kwargs).places is not None) == leaves_out


def test_targets_up_to_the_last_label_are_real():
    labels = torch.tensor([[5, -100, 6, -100], [-100, 5, -100, -100], [-100] * 4, [5, 6, 7, 8]])
    assert up_to_last(labels).long().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("config", [{}, {"norm_position": "pre"}, {"position_encoding": "learned"}], ids=str)
@pytest.mark.parametrize("skip_logits", [True, False])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_leaving_padding_out_changes_no_gradient(monkeypatch, config, skip_logits, kernel):
    torch.manual_seed(3)
    sizes = {"vocab_size": 30, "d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "dropout": 0.0}
    config = VanillaTransformerConfig(**sizes, **config, attn_implementation=kernel, label_smoothing=0.1)
    model = VanillaTransformerForConditionalGeneration(config).double().train()
    source = torch.randint(5, 30, (4, 9))
    mask = torch.arange(9) < torch.tensor([9, 2, 5, 1])[:, None]
    labels = torch.randint(5, 30, (4, 7)).masked_fill(torch.arange(7) >= torch.tensor([2, 7, 4, 1])[:, None], -100)
    labels[1, 2] = -100  # in the middle: no target, but seen by later ones

    def gradients():
        model.zero_grad()
        outputs = model(source, mask, labels=labels, skip_logits=skip_logits)
        outputs.loss.backward()
        return outputs, [parameter.grad.clone() for parameter in model.parameters()]

    packed, ours = gradients()
    assert not packed.encoder_last_hidden_state[~mask].any()  # padding was left out indeed
    monkeypatch.setattr(ops, "WORTH_PACKING", 1.0)
    plain, theirs = gradients()
    torch.testing.assert_close(packed.loss, plain.loss, atol=1e-13, rtol=1e-13)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
    if not skip_logits:
        real = labels != -100
        torch.testing.assert_close(packed.logits[real], plain.logits[real], atol=1e-12, rtol=1e-12)
