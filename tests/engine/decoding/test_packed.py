"""The encoder and decoder of `generate()` against the model's own modules."""

import copy
import functools

import numpy as np
import pytest
import torch
from test_generation import SOURCES, VARIANTS, VOCABULARY, lively_model, padded
from test_search import by_us

from hf_vanilla_transformer.engine.decoding import linear
from hf_vanilla_transformer.engine.decoding.packed import Packed, PackedDecoder
from hf_vanilla_transformer.engine.decoding.prepared import AveragedDecoder
from hf_vanilla_transformer.engine.decoding.weights import Weights


@pytest.fixture(autouse=True)
def _all_in_8_bits(monkeypatch):
    """These models are small; in 8 bits, large weights alone are by default."""
    monkeypatch.setattr(linear, "ELEMENTS_FOR_INT8", 0)


MODELS = {
    **VARIANTS,
    "tied, one vocabulary each": {
        "share_encoder_decoder_embeddings": False,
        "decoder_vocab_size": 31,
        "tie_word_embeddings": True,
    },
    "pre-norm without a last one": {"norm_position": "pre"},
    "post-norm with a last one": {"final_layer_norm": True, "attention_bias": True},
    "marian": {"position_encoding": "marian", "activation_function": "gelu", "attention_bias": True},
    "tensor2tensor": {"position_encoding": "tensor2tensor", "activation_function": "silu", "scale_embedding": False},
    "one head": {"encoder_attention_heads": 1, "decoder_attention_heads": 1, "head_dim": 1, "value_head_dim": 5},
    "odd widths": {"d_model": 23, "head_dim": 7, "value_head_dim": 3, "output_bias": True},
}


@functools.cache
def varied(name="default", dtype=torch.float32):
    """A lively model whose biases and norms are no longer zeros and ones, so that none can be left out unseen."""
    model = lively_model(**MODELS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.to(dtype)


@pytest.fixture
def model():
    """Shared: tests leave it as it is."""
    return varied()


# Logits, here up to 20. In float32 sums are taken in another order (an error of 1e-5 was the largest seen; one left-out
# bias moves them by 0.1 and more); float64 has 29 more bits.
CLOSE = {torch.float32: {"atol": 5e-5, "rtol": 1e-5}, torch.float64: {"atol": 1e-12, "rtol": 1e-12}}


# In float32 weights are packed on a CPU, in float64 they are not.
PRECISIONS = [(name, torch.float32) for name in MODELS] + [("default", torch.float64), ("odd widths", torch.float64)]


# ---- encoder and decoder ----


def cut(inputs, i):
    """Sentence i of a batch, as a batch."""
    return {name: value[i : i + 1] for name, value in inputs.items()}


def decode_at_random(model, memory, mask, steps, beams, keep_attention=False, is_int8=False):
    """Goes on with random tokens and random moves; sentences leave one by one.

    Returns:
        [(sentence, tokens, logits of each step, attention of each step)], of each row that has ever been left.
    """
    decoder = PackedDecoder(Weights(model, is_int8), memory, mask, beams, keep_attention)
    return wander(decoder, model.config.target_vocab_size, len(memory), steps, beams, keep_attention)


def wander(decoder, vocab_size, sentences, steps, beams, keep_attention=False):
    generator = torch.Generator().manual_seed(1)
    random = functools.partial(torch.randint, generator=generator)
    rows, left, order = [(i, [], [], []) for i in range(sentences)], [], list(range(sentences))
    for step in range(steps):
        tokens = random(vocab_size, (len(rows),))
        logits = decoder.step(tokens)
        shown = decoder.attention if keep_attention else [None] * len(rows)
        rows = [
            (i, [*ids, token], [*past, new], [*seen, one])
            for (i, ids, past, seen), token, new, one in zip(rows, tokens.tolist(), logits, shown, strict=True)
        ]
        width, kept = len(rows) // len(order), list(range(len(order)))
        if step % 4 == 3 and len(order) > 1:
            gone = int(random(len(order), ()))
            left += rows[gone * width : (gone + 1) * width]
            # The last sentence takes the place that gets free.
            kept = [kept[-1] if place == gone else place for place in kept[:-1]]
        parents = [place * width + parent for place in kept for parent in random(width, (beams,)).tolist()]
        decoder.move(torch.tensor(parents), torch.tensor(kept))
        rows, order = [rows[parent] for parent in parents], [order[place] for place in kept]
        assert [row[0] for row in rows] == [i for i in order for _ in range(beams)]
    return left + rows


@torch.no_grad()
def forced(model, inputs, tokens, **options):
    """What the modules make of given tokens."""
    return model(**inputs, decoder_input_ids=torch.tensor([tokens]), use_cache=False, **options)


def assert_as_forced(model, inputs, found):
    """Logits and, where it is kept, attention of each row are those of the modules for the same tokens."""
    for i, tokens, logits, attention in found:
        shown = {"decoder_attention_mask": torch.ones(1, len(tokens), dtype=torch.long), "output_attentions": True}
        expected = forced(model, cut(inputs, i), tokens, **(shown if attention[0] is not None else {}))
        torch.testing.assert_close(torch.stack(logits), expected.logits[0], **CLOSE[model.dtype])
        if attention[0] is not None:
            shares = expected.cross_attentions[-1][0].mean(dim=0).float()
            torch.testing.assert_close(torch.stack(attention), shares, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def errors_of_steps(model, is_int8):
    """The largest error of logits of given tokens, and the root of the mean square divided by how logits vary."""
    inputs, wrong, expected = padded(SOURCES), [], []
    memory, mask = Packed(model, is_int8).encode(**inputs), inputs["attention_mask"]
    for i, tokens, logits, _ in decode_at_random(model, memory, mask, 12, beams=2, is_int8=is_int8):
        expected.append(forced(model, cut(inputs, i), tokens).logits[0])
        wrong.append(torch.stack(logits) - expected[-1])
    largest = max(one.abs().max().item() for one in wrong)
    return largest, (torch.cat(wrong).square().mean().sqrt() / torch.cat(expected).std()).item()


@pytest.mark.parametrize(("name", "dtype"), PRECISIONS)
@torch.no_grad()
def test_encoder_and_decoder_are_the_models(name, dtype):
    """Step by step, twice beyond the positions that caches have at first, as rows move and sentences leave."""
    model, inputs = varied(name, dtype), padded(SOURCES, "left")
    memory, steps = Packed(model).encode(**inputs), {"default": 70, "learned positions": 38}.get(name, 16)
    assert memory.dtype == dtype
    found = decode_at_random(model, memory, inputs["attention_mask"], steps, beams=2)
    assert len(found) == 2 * len(SOURCES)
    assert_as_forced(model, inputs, found)


@pytest.mark.parametrize("name", ["default", "d_k and d_v", "pre-norm, biases", "odd widths"])
@torch.no_grad()
def test_a_single_sentences_keys_and_values_are_folded(name):
    """With padding and without, as rows are exchanged."""
    model = varied(name)
    for rows in ([SOURCES[1]], [SOURCES[1][1:], SOURCES[1]]):
        inputs = cut(padded(rows, "left"), 0)
        memory = Packed(model).encode(**inputs)
        decoder = PackedDecoder(Weights(model), memory, inputs["attention_mask"], 3, keep_attention=True)
        assert len(decoder.folded) == model.config.decoder_layers
        assert_as_forced(model, inputs, wander(decoder, model.config.target_vocab_size, 1, 7, 3, True))


@torch.no_grad()
def test_bfloat16_is_as_exact_as_the_models():
    """Both round at other places, so they are compared with what the same weights give in float64."""
    model, inputs = varied(dtype=torch.bfloat16), padded(SOURCES)
    exact, mask = copy.deepcopy(model).double(), inputs["attention_mask"]
    encoded = Packed(model).encode(**inputs)
    assert encoded.dtype == torch.bfloat16
    ours, theirs = [], []
    for i, tokens, logits, _ in decode_at_random(model, encoded, mask, 20, beams=2):
        expected = forced(exact, cut(inputs, i), tokens).logits[0]
        ours.append(torch.stack(logits) - expected)
        theirs.append(forced(model, cut(inputs, i), tokens).logits[0] - expected)
    ours, theirs = (torch.cat(errors).square().mean().sqrt() for errors in (ours, theirs))
    # Over some thousand logits, of size 3. Measured: 0.0195 and 0.0181.
    assert ours < 1.3 * theirs < 0.1


# ---- 8 bits ----


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", ["pre-norm, biases", "marian", "odd widths"])
@torch.no_grad()
def test_8_bits_come_close(name):
    """Measured: errors of the encoder's output are 1 to 6% of it, those of the logits 3 to 5% of how they vary."""
    model, inputs = varied(name), padded(SOURCES)
    memory, real = Packed(model, is_int8=True).encode(**inputs), inputs["attention_mask"].bool()
    expected = model.get_encoder()(**inputs)[0]
    assert (memory - expected)[real].norm() < 0.1 * expected[real].norm()
    assert 1e-3 < errors_of_steps(model, is_int8=True)[1] < 0.1


@pytest.mark.parametrize("rows", [1, 8, 33])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("kind", [linear.FBGEMMLinear, linear.OneDNNLinear])
def test_the_formula_of_8_bits(rows, relu, kind):
    """Weights are rounded to integers up to 127, inputs to 127 or, without VNNI, to 63; their products are exact."""
    x, weight, bias, residual = torch.randn(rows, 48) * 3, torch.randn(20, 48), torch.randn(20), torch.randn(rows, 20)
    x[0], weight[3] = 0.0, 0.0
    expected, highest = np.zeros((rows, 20)), linear.HIGHEST
    steps = weight.abs().amax(dim=1).clamp(min=1e-30) / 127
    rounded = (weight / steps[:, None]).round().double().numpy()
    for row, values in enumerate(x):
        largest = values.abs().max().clamp(min=1e-30)
        integers = (values * (highest / largest)).round().double().numpy()
        expected[row] = rounded @ integers * steps.double().numpy() * float(largest) / highest
    expected += bias.double().numpy()
    found = kind(weight, bias)(x, None if relu else residual.clone(), relu)
    wanted = expected.clip(min=0) if relu else expected + residual.double().numpy()
    np.testing.assert_allclose(found.numpy(), wanted, atol=2e-5, rtol=1e-5)  # numbers up to 100, in float32


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [linear.FBGEMMLinear, linear.OneDNNLinear])
def test_8_bits_do_not_depend_on_torchs_default_type(kind, default):
    weight, x = torch.randn(20, 48), torch.randn(5, 48)
    expected = kind(weight, None)(x)
    torch.set_default_dtype(default)
    try:
        assert torch.equal(kind(weight, None)(x), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@torch.no_grad()
def test_in_8_bits_a_sentence_does_not_depend_on_its_batch(model):
    x, linear_map = torch.randn(20, 32), linear.linear_map(torch.randn(48, 32), torch.randn(48), is_int8=True)
    x[3] *= 1000
    one_by_one = torch.cat([linear_map(row[None]) for row in x])
    torch.testing.assert_close(linear_map(x), one_by_one, rtol=1e-6, atol=1e-5)  # a step is worth 1e-2
    options = {"max_extra_length": 6, "compute_type": "int8"}
    together = by_us(model, **padded(SOURCES), **options).sequences
    for i, row in enumerate(together.tolist()):
        (alone,) = by_us(model, **cut(padded(SOURCES), i), **options).sequences.tolist()
        assert row[: len(alone)] == alone[: len(row)]


# ---- ensembles ----


@functools.cache
def members(dtype=torch.float64):
    small = {"d_model": 16, "head_dim": 4, "value_head_dim": 4, "decoder_layers": 1}
    return [lively_model(seed, **fields).to(dtype) for seed, fields in ((3, {}), (7, {}), (5, small))]


@torch.no_grad()
def test_an_ensembles_decoder_is_the_mean_of_its_members():
    inputs, mask = padded(SOURCES), padded(SOURCES)["attention_mask"]
    both = copy.deepcopy(members()[:2])
    memories = [model.get_encoder()(**inputs)[0] for model in both]
    decoder = AveragedDecoder(
        [PackedDecoder(Weights(m), x, mask, 2, True) for m, x in zip(both, memories, strict=True)]
    )
    for i, tokens, found, attention in wander(decoder, VOCABULARY, len(SOURCES), 10, 2, keep_attention=True):
        outputs = [forced(model, cut(inputs, i), tokens, output_attentions=True) for model in both]
        mean = torch.stack([output.logits[0].softmax(dim=-1) for output in outputs]).mean(dim=0)
        torch.testing.assert_close(torch.stack(found), mean.log().float(), atol=1e-5, rtol=1e-5)
        mean = torch.stack([output.cross_attentions[-1][0].mean(dim=0) for output in outputs]).mean(dim=0)
        torch.testing.assert_close(torch.stack(attention), mean.float(), atol=1e-6, rtol=1e-5)
