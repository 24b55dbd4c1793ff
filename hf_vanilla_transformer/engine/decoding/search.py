"""Greedy and beam search as in section 6.1 of "Attention Is All You Need", over anything that decodes step by step."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Candidate = tuple[float, int, int]  # log-probability of the hypothesis, number of its beam, next token


class Step(NamedTuple):
    """A token of a hypothesis, and how it came there.

    Attributes:
        token: Its id.
        beam: Rank, before it, of the beam that it continues, among its sentence's.
        row: The decoder's row of that beam, at this step.
        before: The step before; None: the prompt.
    """

    token: int
    beam: int
    row: int
    before: "Step | None"

    def path(self) -> "list[Step]":
        """Returns the steps from the first one to this one."""
        steps, step = [], self
        while step is not None:
            steps.append(step)
            step = step.before  # type: ignore[assignment]
        return steps[::-1]


@dataclass
class BeamRules:
    """How hypotheses are compared and when a sentence's search ends.

    Attributes:
        num_beams: Beams per sentence, and hypotheses that are kept.
        ends: Tokens that end a hypothesis.
        length_penalty: Scores are log-probabilities / length ** length_penalty; see `GNMTLengthPenalty`.
        early_stopping: True: as soon as `num_beams` hypotheses have ended (the paper's). "never": as soon as no beam
            can become better than the worst of them, whatever follows. False: as soon as no beam would be if
            it ended now.
        coverage_penalty: beta of Wu et al. 2016 (eq. 15); 0: none.
    """

    num_beams: int
    ends: frozenset[int]
    length_penalty: float = 1.0
    early_stopping: bool | str = True
    coverage_penalty: float = 0.0


class BeamSearch:
    """The search for one sentence's translation: section 6.1.

    Args:
        index: The sentence's number in its batch.
        max_new_tokens: Length at which every hypothesis ends.
        rules: The same for all sentences.
    """

    def __init__(self, index: int, max_new_tokens: int, rules: BeamRules) -> None:
        self.index, self.max_new_tokens, self.rules = index, max_new_tokens, rules
        self.finished: list[tuple[float, Step]] = []  # score and last step, the best first
        # The running beams, one per row of the decoder: log-probability, rank, last step.
        self.beams: list[tuple[float, int, Step | None]] = [(0.0, 0, None)]
        self.parents = [0]  # which of the former beams each one continues

    def extend(self, candidates: Iterable[Candidate], length: int, first_row: int, coverage: Sequence[float]) -> bool:
        """Takes the best continuations, of `length` tokens each, and tells whether the search continues.

        `first_row` is the decoder's row of this sentence's first beam; coverage penalties are numbers up to 0.
        """
        rules = self.rules
        running: list[tuple[float, int, Step]] = []
        for rank, (log_probability, beam, token) in enumerate(candidates):
            # After the first `num_beams`, candidates only replace those that end.
            if log_probability == -math.inf or rank >= rules.num_beams == len(running):
                break
            step = Step(token, self.beams[beam][1], first_row + beam, self.beams[beam][2])
            if token in rules.ends or length >= self.max_new_tokens:
                if rank < rules.num_beams:
                    self.finished.append((log_probability / length**rules.length_penalty + coverage[beam], step))
            elif len(running) < rules.num_beams:
                running.append((log_probability, beam, step))
        self.finished.sort(key=lambda hypothesis: -hypothesis[0])
        del self.finished[rules.num_beams :]
        if not running or self._is_decided(running[0][0], length):
            return False
        self._place(running)
        return True

    def _is_decided(self, best: float, length: int) -> bool:
        if len(self.finished) < self.rules.num_beams:
            return False
        if self.rules.early_stopping is True:
            return True
        penalty = self.rules.length_penalty
        # More tokens only lower the log-probability; but a higher length divides by more.
        final_length = self.max_new_tokens if self.rules.early_stopping == "never" and penalty > 0 else length
        return best / final_length**penalty <= self.finished[-1][0]

    def _place(self, running: list[tuple[float, int, Step]]) -> None:
        """Gives each beam a place: that of the beam which it continues, if it is the first to do so."""
        places: list[tuple[float, int, Step | None] | None] = [None] * self.rules.num_beams
        parents, displaced = [0] * self.rules.num_beams, []
        for rank, (log_probability, beam, step) in enumerate(running):
            if places[beam] is None:
                places[beam], parents[beam] = (log_probability, rank, step), beam
            else:
                displaced.append((beam, (log_probability, rank, step)))
        # Places stay empty where the vocabulary is too small for all beams; no hypothesis continues from them.
        displaced += [(running[0][1], (-math.inf, len(running), running[0][2]))] * (len(places) - len(running))
        for place, kept in enumerate(places):
            if kept is None:
                parents[place], places[place] = displaced.pop(0)
        self.beams, self.parents = places, parents  # type: ignore[assignment]


class Coverage:
    """How much each beam has attended to each position of the source so far (Wu et al. 2016, section 7).

    Args:
        penalty: beta of eq. 15.
    """

    def __init__(self, penalty: float) -> None:
        self.penalty, self.sums = penalty, torch.zeros(1, dtype=torch.float32)

    def add(self, attention: Tensor, source_mask: Tensor) -> list[float]:
        """Adds a step's attention, (rows, S), and computes the penalty of each row, a number up to 0.

        It is beta * sum_i log(min(sums_i, 1)) over the positions of `source_mask`, (B, S).
        """
        self.sums = self.sums.to(attention) + attention
        real = source_mask.repeat_interleave(len(attention) // len(source_mask), dim=0)
        logs = self.sums.clamp(torch.finfo(self.sums.dtype).tiny, 1.0).log() * real
        penalties: list[float] = (self.penalty * logs.sum(dim=1)).tolist()
        return penalties

    def move(self, rows: list[int]) -> None:
        """Gives each beam the sums of the beam that it continues."""
        self.sums = self.sums[rows]


ScoreProcessor = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def beam_search(
    decoder: Any,
    prompts: Tensor,
    max_new_tokens: Sequence[int],
    rules: BeamRules,
    process: ScoreProcessor | None = None,
    keep_attention: bool = False,
) -> tuple[list[BeamSearch], list[Tensor]]:
    """Searches for the translations of a batch, each sentence by itself; finished ones leave the batch.

    Args:
        decoder: An `IncrementalDecoder`, or another one with its `move`, with a row for each sentence.
        prompts: What each hypothesis begins with, (B, P).
        max_new_tokens: Longest hypothesis of each sentence, from 1 up.
        rules: How to search.
        process: Changes log-probabilities, (rows, V), in view of tokens so far, (rows, length); row by row. The
            tensor's memory is used again in the next step.
        keep_attention: Whether to keep `decoder.attention` of each step.

    Returns:
        The searches, in order, with `finished` hypotheses; and attention, (rows, S) of each step, if it is kept.
    """
    coverage = Coverage(rules.coverage_penalty) if rules.coverage_penalty else None
    tokens = _last_of(prompts, decoder, coverage)
    scores = torch.zeros(len(prompts), dtype=torch.float32, device=prompts.device)
    searches = live = [BeamSearch(index, longest, rules) for index, longest in enumerate(max_new_tokens)]
    kept_attention: list[Tensor] = []
    buffer: Tensor | None = None  # fresh memory for each step's log-probabilities would take longer than these
    num_candidates = max(2, 1 + len(rules.ends)) * rules.num_beams
    for length in range(1, max(max_new_tokens) + 1):
        logits = decoder.step(tokens)  # (rows, V)
        if buffer is None or len(buffer) < len(logits):
            buffer = torch.empty_like(logits, dtype=torch.float32)
        log_probabilities = torch.log_softmax(logits, -1, torch.float32, out=buffer[: len(logits)])
        if process is not None:
            log_probabilities = process(prompts, log_probabilities)
        if keep_attention:
            kept_attention.append(decoder.attention)
        penalties = (
            coverage.add(decoder.attention, decoder.source_mask) if coverage is not None else [0.0] * len(scores)
        )
        candidates = best_continuations(log_probabilities, scores, len(live), num_candidates)
        width = len(scores) // len(live)
        running = [
            place
            for place, (search, best) in enumerate(zip(live, candidates, strict=True))
            if search.extend(best, length, place * width, penalties[place * width : (place + 1) * width])
        ]
        if not running:
            break
        places = closed_up(running)
        rows = [place * width + parent for place in places for parent in live[place].parents]
        decoder.move(rows, places)
        live = [live[place] for place in places]
        beams = [beam for search in live for beam in search.beams]
        tokens = torch.tensor([0 if step is None else step.token for _, _, step in beams], device=prompts.device)
        scores = torch.tensor([score for score, _, _ in beams], dtype=torch.float32, device=prompts.device)
        if coverage is not None:
            coverage.move(rows)
        if process is not None:
            prompts = torch.cat([prompts[rows], tokens[:, None]], dim=1)
    return searches, kept_attention


@torch.no_grad()
def greedy_search(
    decoder: Any,
    prompts: Tensor,
    max_new_tokens: Sequence[int],
    ends: frozenset[int],
    process: ScoreProcessor | None = None,
    on_token: Callable[[int], object] | None = None,
    keep_attention: bool = False,
) -> tuple[list[list[int]], list[list[Tensor]]]:
    """Takes the most probable token at each step; sentences that are at their end leave the batch.

    Args:
        decoder: As in `beam_search`.
        prompts: What each translation begins with, (B, P).
        max_new_tokens: Longest translation of each sentence, from 1 up.
        ends: Tokens that end a translation.
        process: Changes logits, as in `beam_search`.
        on_token: Called with each token of a batch of one sentence.
        keep_attention: Whether to keep `decoder.attention`.

    Returns:
        New tokens of each sentence; and the attention of each of them, (S,), if it is kept.
    """
    tokens = _last_of(prompts, decoder)
    translations: list[list[int]] = [[] for _ in max_new_tokens]
    kept_attention: list[list[Tensor]] = [[] for _ in max_new_tokens]
    live = list(range(len(translations)))  # the sentence of each row
    while live:
        logits = decoder.step(tokens)
        if process is not None:
            logits = process(prompts, logits.float())
        tokens = logits.argmax(dim=-1)
        running = []
        attention = decoder.attention if keep_attention else None
        for row, (sentence, token) in enumerate(zip(live, tokens.tolist(), strict=True)):
            translations[sentence].append(token)
            if attention is not None:
                kept_attention[sentence].append(attention[row])
            if token not in ends and len(translations[sentence]) < max_new_tokens[sentence]:
                running.append(row)
            if on_token is not None:
                on_token(token)
        if process is not None:
            prompts = torch.cat([prompts, tokens[:, None]], dim=1)
        rows = closed_up(running)
        if 0 < len(rows) < len(live):
            decoder.move(rows, rows)
            tokens, prompts = tokens[rows], prompts[rows]
        live = [live[row] for row in rows]
    return translations, kept_attention


def _last_of(prompts: Tensor, decoder: Any, coverage: Coverage | None = None) -> Tensor:
    """Reads prompts, (B, P), but for their last tokens, (B,), and returns these; what they translate is covered."""
    for position in range(prompts.shape[1] - 1):
        decoder.step(prompts[:, position])
        if coverage is not None:
            coverage.add(decoder.attention, decoder.source_mask)
    return prompts[:, -1]


def closed_up(kept: Sequence[int]) -> list[int]:
    """Returns the old place of each new one if some places are kept, in ascending order, and few of them move."""
    staying = {place for place in kept if place < len(kept)}
    moving = iter(kept[len(staying) :])
    return [place if place in staying else next(moving) for place in range(len(kept))]


def best_continuations(
    log_probabilities: Tensor, scores: Tensor, num_sentences: int, num_candidates: int
) -> list[list[Candidate]]:
    """Finds the best next tokens of each sentence's beams.

    Args:
        log_probabilities: Of each token, (rows, V), in float32, to be overwritten; equally many rows for each sentence.
        scores: Log-probability of each row so far, (rows,).
        num_sentences: B.
        num_candidates: K.

    Returns:
        For each sentence K candidates, or as many as there are tokens, the best first.
    """
    width, totals = log_probabilities.shape[1], log_probabilities.add_(scores[:, None]).reshape(num_sentences, -1)
    best = totals.topk(min(num_candidates, totals.shape[1]))
    parts = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [[(value, *divmod(place, width)) for value, place in zip(*one, strict=True)] for one in parts]
