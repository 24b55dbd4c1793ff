"""Greedy and beam search: against plain ones over a toy, and against transformers' loops."""

import copy
import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_generation import BOS, EOS, SHOWN, SOURCES, Recorder, gnmt_divisor, lively_model, new_tokens, padded
from transformers.generation import logits_process

from hf_vanilla_transformer import engine
from hf_vanilla_transformer.engine.decoding.generate import BeamSearchOutput
from hf_vanilla_transformer.engine.decoding.scores import score_processor
from hf_vanilla_transformer.engine.decoding.search import beam_search, greedy_search
from hf_vanilla_transformer.plan_vanilla_transformer import GNMTLengthPenalty, Plan

# Sums of up to 40 log-probabilities in float32, which differ in their last digits (6e-8 of numbers up to 100) by the
# order and by the precision in which they are added and divided.
SCORES = {"abs": 1e-5, "rel": 1e-5}

# ---- a toy that can be searched ----


@functools.cache
def _drawn(kind, size, *key):
    return np.random.default_rng([kind, *key]).normal(size=size)


def plan_of(num_beams, ends, penalty=1.0, early_stopping=True, coverage_penalty=0.0):
    """A plan that returns all of its hypotheses."""
    return Plan(
        num_beams=num_beams,
        num_hypotheses=num_beams,
        ends=tuple(ends),
        length_penalty=penalty,
        early_stopping=early_stopping,
        coverage_penalty=coverage_penalty,
    )


class Toy:
    """A decoder whose logits and attention are drawn anew for each prefix of each sentence; `end` favours token 0."""

    def __init__(self, seed, vocabulary, sentences=(0,), end=0.0):
        self.seed, self.vocabulary, self.end = seed, vocabulary, end
        self.sentences, self.rows, self.steps = list(sentences), [(number, ()) for number in sentences], 0

    def log_probabilities(self, sentence, prefix):
        logits = torch.from_numpy(1.5 * _drawn(0, self.vocabulary, self.seed, sentence, *prefix))
        logits[0] += self.end
        return logits.log_softmax(dim=0)

    def mask_of(self, sentence):
        """Source positions, 2 to 4, of 4 that a batch has."""
        return torch.arange(4) < 2 + sentence % 3

    def attention_of(self, sentence, prefix):
        scores = torch.from_numpy(2 * _drawn(2, 4, self.seed, sentence, *prefix))
        return scores.masked_fill(~self.mask_of(sentence), -math.inf).softmax(dim=0)

    def step(self, tokens):
        self.steps += 1
        rows = zip(self.rows, tokens.tolist(), strict=True)
        self.rows = [(sentence, (*prefix, token)) for (sentence, prefix), token in rows]
        return torch.stack([self.log_probabilities(*row) for row in self.rows])

    @property
    def attention(self):
        return torch.stack([self.attention_of(*row) for row in self.rows]).float()

    keeps_places = True

    def move(self, rows, sentences):
        self.rows, self.sentences = [self.rows[row] for row in rows], [self.sentences[place] for place in sentences]
        width = len(rows) // len(sentences)
        assert [sentence for sentence, _ in self.rows] == [one for one in self.sentences for _ in range(width)]


PROMPT = (1, 2)


def no_repetition(tokens, log_probabilities):
    """A processor: bars the last token, so that none stands twice in a row."""
    return log_probabilities.scatter(1, tokens[:, -1:], -math.inf)


def barring(level, seed=0):
    """A processor: bars tokens that are drawn anew for each prefix, about half of them where the level is 0."""

    def process(tokens, log_probabilities):
        lots = [_drawn(1, log_probabilities.shape[1], seed, *row) for row in tokens.tolist()]
        return log_probabilities.masked_fill(torch.from_numpy(np.stack(lots)) < level, -math.inf)

    return process


def _continuations(toy, sentence, live, process):
    """All ways to go on by one token, best first: (log-probability, tokens, sums of attention, ranks of parents)."""
    found = []
    for rank, (score, tokens, sums, parents) in enumerate(live):
        prefix = (*PROMPT, *tokens)
        row, sums = toy.log_probabilities(sentence, prefix), sums + toy.attention_of(sentence, prefix)
        if process is not None:
            row = process(torch.tensor([prefix]), row[None])[0]
        found += [(score + x, (*tokens, token), sums, (*parents, rank)) for token, x in enumerate(row.tolist())]
    return sorted((one for one in found if one[0] > -math.inf), key=lambda one: -one[0])


def _coverage(beta, sums, mask):
    """cp(X; Y) of Wu et al. 2016, equation 15."""
    return beta * sum(math.log(min(share, 1.0)) for share in sums[mask].tolist())


def _start(toy, sentence):
    """The prompt, as an empty hypothesis: what its tokens but the first attend to counts."""
    return [(0.0, (), sum(toy.attention_of(sentence, PROMPT[:n]) for n in range(1, len(PROMPT))), ())]


def plain_beam_search(toy, sentence, longest, rules, divisor, process=None):
    """Section 6.1 as in `reference_beam_search` of test_generation: [(score, tokens, ranks of parents)].

    With `early_stopping` None the search goes on to the maximum length, whatever it has found.
    """
    live, finished = _start(toy, sentence), []
    for length in range(1, longest + 1):
        candidates = _continuations(toy, sentence, live, process)[: (1 + len(rules.ends)) * rules.num_beams]
        live = []
        for rank, (score, tokens, sums, parents) in enumerate(candidates):
            if tokens[-1] not in rules.ends and length < longest:
                live.append((score, tokens, sums, parents))
            elif rank < rules.num_beams:
                penalty = _coverage(rules.coverage_penalty, sums, toy.mask_of(sentence))
                finished.append((score / divisor(length) + penalty, tokens, parents))
        live = live[: rules.num_beams]
        finished = sorted(finished, key=lambda one: -one[0])[: rules.num_beams]
        if live and len(finished) == rules.num_beams and rules.early_stopping is not None:
            bounds = [live[0][0] / divisor(n) for n in (length, longest if rules.early_stopping == "never" else length)]
            if rules.early_stopping is True or max(bounds) <= finished[-1][0]:
                break
    return finished


def hypotheses(found):
    """What a search has found: [(score, tokens, ranks of parents)]."""
    return [(one.score, tuple(one.tokens), tuple(one.beams)) for one in found]


def assert_same(found, expected):
    assert [one[1:] for one in found] == [one[1:] for one in expected]
    assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], **SCORES)


def search_toy(toy, longest, rules, process=None):
    prompts = torch.tensor([PROMPT] * len(toy.sentences))
    mask = torch.stack([toy.mask_of(sentence) for sentence in toy.sentences])
    return beam_search(toy, prompts, longest, rules, process, mask)


# A number and the divisor that it means, for a hypothesis of a number of tokens.
GNMT = {f"gnmt {alpha}": (GNMTLengthPenalty(alpha), functools.partial(gnmt_divisor, alpha=alpha)) for alpha in (0.6,)}
PENALTIES = GNMT | {f"length {p}": (p, lambda length, p=p: length**p) for p in (1.5, -1.0)}


@pytest.mark.parametrize("coverage", [0.0, 0.3])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_never_stops_only_where_going_on_changes_nothing(penalty, coverage):
    number, divisor = PENALTIES[penalty]
    stopped = 0
    for seed, num_beams, ends in itertools.product(range(4), (1, 2, 4), ([0], [0, 3])):
        toy = Toy(seed, 5, end=1.0)
        rules = plan_of(num_beams, ends, number, "never", coverage)
        (search,) = search_toy(toy, [9], rules)
        assert_same(hypotheses(search), plain_beam_search(toy, 0, 9, replace(rules, early_stopping=None), divisor))
        stopped += toy.steps < len(PROMPT) - 1 + 9
    assert stopped > 3


@pytest.mark.parametrize("process", [None, no_repetition, barring(-0.5)], ids=["plain", "processed", "barred"])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("penalty", ["gnmt 0.6", "length 1.5", "length -1.0"])
def test_beam_search_is_the_plain_one(penalty, early_stopping, process):
    """Of whole batches, where sentences leave at different steps."""
    number, divisor = PENALTIES[penalty]
    longest = [7, 1, 9, 4, 6]
    for seed, num_beams, ends in itertools.product(range(2), (1, 3), ([0], [0, 2, 3])):
        toy = Toy(seed, 6, range(len(longest)), end=1.0)
        rules = plan_of(num_beams, ends, number, early_stopping, coverage_penalty=0.2 * seed)
        searches = search_toy(toy, longest, rules, process)
        for sentence, search in enumerate(searches):
            expected = plain_beam_search(toy, sentence, longest[sentence], rules, divisor, process)
            assert_same(hypotheses(search), expected)


@pytest.mark.parametrize("level", [0.0, math.inf])
def test_fewer_continuations_than_beams(level):
    """With half of the tokens impossible the beam is never full; with all of them there is nothing to find."""
    rules, counts = plan_of(8, [0]), []
    for seed in range(8):
        toy, process = Toy(seed, 3, range(2)), barring(level, seed)
        searches = search_toy(toy, [4, 4], rules, process)
        for sentence, search in enumerate(searches):
            expected = plain_beam_search(toy, sentence, 4, rules, float, process)
            assert_same(hypotheses(search), expected)
            counts.append(len(expected))
    assert max(counts) < 8
    assert (max(counts) == 0) == (level == math.inf)


def _plain_greedy(toy, sentence, longest, ends, process):
    tokens = ()
    while len(tokens) < longest and tokens[-1:] not in [(end,) for end in ends]:
        row = toy.log_probabilities(sentence, (*PROMPT, *tokens))
        row = row if process is None else process(torch.tensor([(*PROMPT, *tokens)]), row[None])[0]
        tokens = (*tokens, int(row.argmax()))
    return list(tokens)


@pytest.mark.parametrize("process", [None, no_repetition])
@pytest.mark.parametrize("ends", [[], [0], [0, 3]])
def test_greedy_search_is_the_plain_one(ends, process):
    order, longest = [3, 0, 5, 4, 1, 2], [9, 1, 4, 9, 7, 3]
    for seed in range(4):
        toy = Toy(seed, 6, order)
        prompts = torch.tensor([PROMPT] * len(order))
        found = [one.tokens for (one,) in greedy_search(toy, prompts, longest, plan_of(1, ends), process)]
        pairs = zip(order, longest, strict=True)
        assert found == [_plain_greedy(toy, number, most, ends, process) for number, most in pairs]


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
    assert isinstance(ours, BeamSearchOutput) == ("sequences_scores" in theirs)
    if isinstance(ours, BeamSearchOutput):
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


WIDE = [[7, 3], [EOS], [(5 * i) % 21 + 3 for i in range(29)], [12, 22, 4, 10, 16, 9, 8, 3, 20, 11, EOS], [21, 6, EOS]]
BATCHES = {"left": padded(SOURCES, "left"), "right": padded(SOURCES), "wide": padded(WIDE)}


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(("batch", "extra"), [("left", 0), ("right", 3), ("wide", 12)])
def test_sentences_of_very_different_lengths(model, batch, extra, num_beams):
    """The longest of them get 41 new tokens, for which the caches have no room at first."""
    options = {"num_beams": num_beams, "num_return_sequences": num_beams, "max_extra_length": extra}
    found = assert_same_output(model, **BATCHES[batch], **options, suppress_tokens=[EOS]).sequences
    assert found.shape[1] == 1 + BATCHES[batch]["input_ids"].shape[1] + extra
    for rows in found.view(len(SOURCES), num_beams, -1).tolist():
        assert len({tuple(row) for row in rows}) == num_beams


SETTINGS = {
    "forced end": {"forced_eos_token_id": EOS, "max_new_tokens": 4},
    "forced first token": {"forced_bos_token_id": 9},
    "minimal new tokens": {"min_new_tokens": 7},
    "no repetition": {"no_repeat_ngram_size": 2, "max_extra_length": 20},
    "repetition penalty": {"repetition_penalty": 1.8},
    "unwanted at first": {"begin_suppress_tokens": [5, 13]},
    "unwanted words": {"bad_words_ids": [[5], [9, 14], [3, 7]]},
    "OPUS-MT's": {
        "bad_words_ids": [[5]],
        "forced_eos_token_id": EOS,
        "renormalize_logits": True,
        "max_new_tokens": 5,
        "gnmt_length_penalty": None,
        "early_stopping": False,
    },
    "several ends": {"eos_token_id": [EOS, 5, 17]},
    "other padding": {"pad_token_id": 23},
    "one new token": {"max_new_tokens": 1},
    "prefix": {"decoder_input_ids": torch.tensor([[BOS, 9, 6], [BOS, 4, 4], [BOS, 13, 20], [BOS, 9, 6], [BOS, 3, 8]])},
    "prefix, forced end": {
        "decoder_input_ids": torch.tensor([[BOS, 9], [BOS, 4], [BOS, 13], [BOS, 9], [BOS, 3]]),
        "forced_eos_token_id": EOS,
        "max_new_tokens": 4,
    },
    "nearly everything unwanted": {"suppress_tokens": [token for token in range(24) if token not in (EOS, 7, 11)]},
}


@functools.cache
def _usual(side, **beams):
    return by_us(exact_model(), **BATCHES[side], max_extra_length=4, **beams).sequences


@pytest.mark.parametrize("beams", [{"num_beams": 1}, {"num_beams": 4, "num_return_sequences": 3}], ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_are_those_of_transformers(model, setting, beams):
    side = "left" if len(setting) % 2 else "right"
    options = {"max_extra_length": 4, **beams, **SETTINGS[setting]}
    found = assert_same_output(model, **BATCHES[side], **options).sequences
    usual = _usual(side, **beams)
    assert not torch.equal(found, usual)  # each of the settings changes something here


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("kind", ["no mask", "boolean mask", "encoded", "one token"])
@torch.no_grad()
def test_sources_of_every_kind(model, kind, num_beams):
    ids, mask = BATCHES["right"]["input_ids"], BATCHES["right"]["attention_mask"]
    inputs = {
        "no mask": lambda: {"input_ids": ids},
        "boolean mask": lambda: {"input_ids": ids, "attention_mask": mask.bool()},
        "encoded": lambda: {"encoder_outputs": model.get_encoder()(ids, mask), "attention_mask": mask},
        "one token": lambda: {"input_ids": ids[:, :1]},
    }[kind]()
    assert_same_output(model, **inputs, num_beams=num_beams, max_extra_length=4)


@pytest.mark.parametrize(("token", "sources"), [("eos_token_id", SOURCES), ("pad_token_id", SOURCES[:1])])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_without_an_end_of_sentence_or_padding(token, sources, num_beams):
    """One sentence needs no padding."""
    assert_same_output(exact_model(**{token: None}), **padded(sources), num_beams=num_beams, max_extra_length=3)


@pytest.mark.parametrize("longest", [1, 2, 4])
def test_fewer_tokens_than_beams(longest):
    """Four tokens, one of them the end: transformers fills the list up itself."""
    small, options = exact_model(vocab_size=4, seed=5), {"num_beams": 6, "num_return_sequences": 6}
    options.update(input_ids=torch.tensor([[3, EOS]]), max_new_tokens=longest, length_penalty=0.0)
    theirs = by_transformers(small, **options)
    attached = engine.Engine(small)
    ours = attached.generate(
        small, {**SHOWN, **options} if longest == 1 else {**options, "return_dict_in_generate": True}
    )
    assert (attached.calls, attached.fallbacks) == (longest > 1, longest == 1)
    assert (theirs.sequences_scores > -1e8).sum() == (4 if longest == 1 else 6)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.equal(ours.beam_indices, theirs.beam_indices)
    assert ours.sequences_scores.tolist() == pytest.approx(theirs.sequences_scores.tolist(), **SCORES)


# ---- processors ----


@pytest.mark.parametrize("length", [1, 2, 4, 5, 6])
def test_scores_are_changed_as_by_transformers(length):
    """Here, tokens are barred in place."""
    begin, ends = 1, [3, 9]
    settings = {
        "repetition_penalty": (1.7, logits_process.RepetitionPenaltyLogitsProcessor(1.7)),
        "no_repeat_ngram_size": (1, logits_process.NoRepeatNGramLogitsProcessor(1)),
        "bad_words_ids": ([[5], [8]], logits_process.NoBadWordsLogitsProcessor([[5], [8]], torch.tensor(ends))),
        "min_length": (5, logits_process.MinLengthLogitsProcessor(5, ends)),
        "min_new_tokens": (3, logits_process.MinNewTokensLengthLogitsProcessor(begin, 3, ends)),
        "forced_bos_token_id": (4, logits_process.ForcedBOSTokenLogitsProcessor(4)),
        "forced_eos_token_id": (3, logits_process.ForcedEOSTokenLogitsProcessor(begin + 5, 3)),
        "suppress_tokens": ([2, 40], logits_process.SuppressTokensLogitsProcessor([2, 40])),
        "begin_suppress_tokens": ([6], logits_process.SuppressTokensAtBeginLogitsProcessor([6], begin)),
        "renormalize_logits": (True, logits_process.LogitNormalization()),
    }
    tokens, scores = torch.randint(10, (3, length)), torch.randn(3, 10).log_softmax(dim=-1)
    for names in (*([name] for name in settings), [*settings][1:5:3] + [*settings][7:]):
        values, processors = zip(*map(settings.__getitem__, names), strict=True)
        plan = Plan.of({**dict(zip(names, values, strict=True)), "eos_token_id": ends}, {})
        assert not plan.others
        expected = logits_process.LogitsProcessorList(processors)(tokens, scores.clone())
        process = score_processor(plan, 10, tokens[:, :begin], longest=5)
        assert torch.equal(process(tokens, scores.clone()), expected)
    assert score_processor(Plan(), 10, tokens[:, :begin], longest=5) is None


# ---- a sentence's translation is its own ----


@pytest.mark.parametrize(("num_beams", "early_stopping"), [(1, True), (2, False), (4, True), (5, "never")])
@pytest.mark.parametrize("batch", ["left", "wide"])
def test_a_translation_does_not_depend_on_the_batch(model, batch, num_beams, early_stopping):
    options = {"num_beams": num_beams, "max_extra_length": 6, "early_stopping": early_stopping}
    options["num_return_sequences"] = min(num_beams, 3)
    together = by_us(model, **BATCHES[batch], **options)
    for i, source in enumerate(WIDE if batch == "wide" else SOURCES):
        alone = by_us(model, input_ids=torch.tensor([source]), **options)
        for number, row in enumerate(alone.sequences):
            place = i * len(alone.sequences) + number
            assert new_tokens(together.sequences[place], len(source) + 6) == new_tokens(row, len(source) + 6)
            if num_beams > 1:
                score = alone.sequences_scores[number].item()
                assert together.sequences_scores[place].item() == pytest.approx(score, **SCORES)


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


# ---- who looks on ----


@pytest.mark.parametrize("prefix", [[BOS], [BOS, 9, 6]], ids=str)
def test_a_streamer_gets_what_it_gets_from_transformers(model, prefix):
    options = {"input_ids": torch.tensor([SOURCES[0]]), "decoder_input_ids": torch.tensor([prefix])}
    options.update(num_beams=1, max_extra_length=4)
    ours, theirs = Recorder(), Recorder()
    output = by_us(model, **options, streamer=ours)
    by_transformers(model, **options, streamer=theirs)
    assert [piece.tolist() for piece in ours.pieces] == [piece.tolist() for piece in theirs.pieces]
    assert [piece.shape for piece in ours.pieces] == [piece.shape for piece in theirs.pieces]
    assert torch.cat([piece.view(-1) for piece in ours.pieces]).tolist() == output.sequences[0].tolist()
    assert ours.ended == 1
