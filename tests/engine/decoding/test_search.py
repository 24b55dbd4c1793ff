"""Greedy and beam search of the engine against transformers' own loop."""

import copy
import functools

import pytest
import torch
from test_generation import BOS, EOS, SHOWN, SOURCES, gnmt_divisor, lively_model, padded

from hf_vanilla_transformer import engine

# Sums of up to 40 log-probabilities in float32, which differ in their last digits (6e-8 of numbers up to 100) by the
# order and by the precision in which they are added and divided.
SCORES = {"abs": 1e-5, "rel": 1e-5}

# ---- generate(): the engine and transformers' loop on the same settings ----


def by_us(model, compute_type="default", **options):
    """What the engine finds; fails where transformers' loop is taken."""
    with engine.attach(model, compute_type) as attached:
        output = model.generate(return_dict_in_generate=True, **options)
    assert (attached.calls, attached.fallbacks) == (1, 0), attached.last_reason
    return output


def by_transformers(model, **options):
    """What transformers' own loop finds, with the model's own encoder."""
    assert model.engine is None
    return model.generate(**{**SHOWN, **options})


def assert_same_output(model, **options):
    """Everything that both ways of decoding tell is the same; returns ours."""
    # Copies, since transformers repeats what is encoded in its place for the beams.
    ours, theirs = (way(model, **copy.deepcopy(options)) for way in (by_us, by_transformers))
    assert ours.get("scores") is None
    assert theirs.scores is not None
    assert torch.equal(ours.sequences, theirs.sequences)
    assert type(ours) is type(theirs)
    if "sequences_scores" in theirs:
        assert torch.equal(ours.beam_indices, theirs.beam_indices)
        assert ours.sequences_scores.tolist() == pytest.approx(theirs.sequences_scores.tolist(), **SCORES)
    return ours


@functools.cache
def exact_model(**fields):
    """In float64, so that both ways compute the same logits, however near to one another two of them are."""
    return lively_model(**fields).double()


@pytest.fixture
def model():
    """Shared: tests leave it as it is."""
    return exact_model()


BATCHES = {"left": padded(SOURCES, "left"), "right": padded(SOURCES)}


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("kind", ["no mask", "boolean mask", "encoded", "encoded without a mask", "one token"])
@torch.no_grad()
def test_sources_of_every_kind(model, kind, num_beams):
    ids, mask = BATCHES["right"]["input_ids"], BATCHES["right"]["attention_mask"]
    inputs = {
        "no mask": lambda: {"input_ids": ids},
        "boolean mask": lambda: {"input_ids": ids, "attention_mask": mask.bool()},
        "encoded": lambda: {"encoder_outputs": model.get_encoder()(ids, mask), "attention_mask": mask},
        "encoded without a mask": lambda: {"encoder_outputs": model.get_encoder()(ids)},
        "one token": lambda: {"input_ids": ids[:, :1]},
    }[kind]()
    assert_same_output(model, **inputs, num_beams=num_beams, max_extra_length=4)


# ---- coverage and alignments ----


@torch.no_grad()
def forced(source, tokens):
    """Log-probability of each token, (T,), and what each attends to, (T, S): the last layer's mean over heads."""
    output = exact_model()(
        input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([[BOS, *tokens[:-1]]]), output_attentions=True
    )
    log_probabilities = output.logits[0].log_softmax(dim=-1)
    return log_probabilities[range(len(tokens)), tokens], output.cross_attentions[-1][0].mean(dim=0)


ALIGNED = {"num_beams": 4, "num_return_sequences": 4, "max_extra_length": 4, "output_alignments": True}
GREEDY = {"num_beams": 1, "max_extra_length": 4, "output_alignments": True}


@pytest.mark.parametrize("options", [GREEDY, ALIGNED, ALIGNED | {"coverage_penalty": 0.4}], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_alignments_are_the_attention_of_the_forced_translation(model, side, options):
    output, width = by_us(model, **BATCHES[side], **options), options["num_beams"]
    mask, new = BATCHES[side]["attention_mask"].bool(), output.sequences[:, 1:].tolist()
    if width == 1:
        pairs = zip(new, SOURCES, strict=True)
        lengths = [row.index(EOS) + 1 if EOS in row else len(source) + 4 for row, source in pairs]
        plain = model.generate(**BATCHES[side], num_beams=1, max_extra_length=4)
        assert torch.equal(plain, output.sequences)
    else:
        lengths = (output.beam_indices >= 0).sum(dim=1).tolist()
    assert output.alignments.shape == (5 * width, max(lengths), mask.shape[1])
    assert len(set(lengths)) > 1  # so that sentences leave the batch
    for row, (tokens, length, alignment) in enumerate(zip(new, lengths, output.alignments, strict=True)):
        source, real = SOURCES[row // width], mask[row // width]
        _, expected = forced(source, tokens[:length])
        # In float32, of the same numbers in float64.
        torch.testing.assert_close(alignment[:length, real], expected.float(), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(alignment[:length].sum(dim=1), torch.ones(length), atol=1e-6, rtol=0)
        assert not alignment[:length, ~real].any()
        assert not alignment[length:].any()


@pytest.mark.parametrize("beta", [0.2, 1.0])
@pytest.mark.parametrize("alpha", [0, 0.6])
def test_the_coverage_penalty_is_wus(model, alpha, beta):
    """s(Y, X) = log P(Y | X) / lp(Y) + cp(X; Y), equation 14."""
    options = {**ALIGNED, "gnmt_length_penalty": alpha}
    output, without = (by_us(model, **BATCHES["right"], **options, coverage_penalty=one) for one in (beta, None))
    lengths, penalties = (output.beam_indices >= 0).sum(dim=1).tolist(), []
    for row, (sequence, length) in enumerate(zip(output.sequences.tolist(), lengths, strict=True)):
        log_probabilities, attention = forced(SOURCES[row // 4], sequence[1 : 1 + length])
        penalty = beta * attention.sum(dim=0).clamp(max=1.0).log().sum()
        penalties.append(penalty.item())
        score = log_probabilities.sum() / gnmt_divisor(length, alpha) + penalty
        assert output.sequences_scores[row].item() == pytest.approx(score.item(), **SCORES)
    assert min(penalties) < -5 * beta  # that would be noticed
    assert (output.sequences_scores.view(5, 4).diff(dim=1) <= 0).all()
    assert output.sequences.tolist() != without.sequences.tolist()
