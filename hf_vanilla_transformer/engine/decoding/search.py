"""Greedy and beam search as in section 6.1 of "Attention Is All You Need", on tensors, over anything that decodes.

A search asks a decoder for the next step's logits and tells it where its rows move. It never looks at a value on the
way, so that a GPU isn't waited for, but to see whether a sentence has ended: at each step on a CPU, where finished
sentences leave the batch, and every few steps elsewhere.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...plan_vanilla_transformer import Plan

STEPS_UNSEEN = 8  # on a device that would have to be waited for
BLOCK = 128  # scores of which the largest is looked for first, on a CPU
SCORES_FOR_BLOCKS = 2**17  # from which that takes less time
NONE = -torch.inf  # the log-probability of a beam that isn't there

ScoreProcessor = Callable[[Tensor, Tensor], Tensor]
Bar = Callable[[Tensor], Tensor]  # fills scores, (rows, V), of tokens that may not be chosen with -inf


class Decoder(Protocol):
    """A batch that is decoded step by step: rows are hypotheses, equally many for each sentence, in their order."""

    attention: Tensor | None  # what each row attended to in the last step, (rows, S); None: it isn't kept
    keeps_places: bool  # whether a beam had better stay in the row of the beam that it continues

    def step(self, tokens: Tensor) -> Tensor:
        """Advances by one position, with the token of each row, (rows,); returns logits of the next, (rows, V)."""
        ...

    def best(self, tokens: Tensor, bar: Bar | None = None) -> Tensor:
        """Advances as `step` does; returns the most probable next token of each row, (rows,), of those not barred."""
        logits = self.step(tokens)
        return first_largest(logits if bar is None else bar(logits.float()))

    def move(self, rows: Tensor, sentences: Tensor) -> None:
        """Gives each row the past of a former row, and each sentence the source of a former one."""
        ...


class Hypothesis(NamedTuple):
    """A translation that a search has found."""

    tokens: list[int]  # with the end but without the prompt
    score: float | None = None  # log-probability / length penalty + coverage penalty; None: of a greedy search
    beams: Sequence[int] = ()  # the rank, before each token, of the beam that it continues, in its sentence
    attention: Tensor | None = None  # what each token attended to, (T, S); None: it isn't kept


class Beams(NamedTuple):
    """Where the searches for B sentences stand; all K beams have a place, one for each row of the decoder.

    A choice is a continuation: the place of a beam, times V, plus the next token. A code is what happened to a beam in
    a step: the choice, times K, plus the rank of the beam that it continues.
    """

    scores: Tensor  # log-probabilities of running beams, (B, K), or (B, 1) before the first step; -inf: none
    ranks: Tensor  # their ranks among their sentence's, from 0 up
    limits: Tensor  # the longest hypothesis of each sentence, (B,)
    bounds: Tensor  # for `early_stopping` "never": the divisors of scores at the limits, (B,)
    active: Tensor  # whether the search for each sentence goes on, (B,)
    finished_scores: Tensor  # of the K best hypotheses so far, the best first, (B, K); -inf: there are fewer
    finished_codes: Tensor  # of their last steps
    finished_steps: Tensor  # the numbers of these steps, from 0 up

    @classmethod
    def start(cls, plan: Plan, limits: Tensor, width: int = 1) -> "Beams":
        """Begins with one beam for each sentence, in the first of `width` places."""
        size, places = (len(limits), plan.num_beams), (len(limits), width)
        scores = torch.full(places, NONE, dtype=torch.float32, device=limits.device)
        scores[:, 0] = 0.0
        divisors = torch.tensor([length**plan.length_penalty for length in range(1, int(limits.max()) + 1)])
        none = torch.zeros(size, dtype=torch.long, device=limits.device)
        return cls(
            scores=scores,
            ranks=torch.zeros(places, dtype=torch.long, device=limits.device),
            limits=limits,
            bounds=divisors.to(limits.device)[limits - 1],
            active=torch.ones(len(limits), dtype=torch.bool, device=limits.device),
            finished_scores=torch.full(size, NONE, dtype=torch.float32, device=limits.device),
            finished_codes=none,
            finished_steps=none.clone(),
        )


def is_in(tokens: Tensor, ends: Tensor) -> Tensor:
    """Tells which tokens are ends; there is nearly always one, for which a comparison is enough."""
    return tokens == ends if len(ends) == 1 else torch.isin(tokens, ends)


def first_largest(scores: Tensor) -> Tensor:
    """Returns the place of the largest of each row's scores, (N, V), the first one of equal ones: (N,)."""
    blocks = _blocks(scores)
    if blocks is None:
        return scores.argmax(dim=1)
    maxima = torch.cat([blocks.amax(dim=2), scores[:, -BLOCK:].amax(dim=1, keepdim=True)], dim=1)
    starts = (maxima.argmax(dim=1, keepdim=True) * BLOCK).clamp_(max=scores.shape[1] - BLOCK)
    inside = scores.gather(1, starts + torch.arange(BLOCK))
    return starts[:, 0] + inside.argmax(dim=1)


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest of each row's scores, (N, V), descending, and their places, as `topk` does.

    On a CPU, topk looks at one score after the other. So it is given those of the blocks with the largest maxima.
    """
    blocks = _blocks(scores)
    if blocks is None or blocks.shape[1] < count:
        return scores.topk(min(count, scores.shape[1]))
    size = blocks[0].numel()
    chosen = blocks.amax(dim=2).topk(count).indices
    candidates = blocks.gather(1, chosen[..., None].expand(-1, -1, BLOCK)).flatten(1)
    values, places = torch.cat([candidates, scores[:, size:]], dim=1).topk(count)
    starts = F.pad(chosen * BLOCK, (0, 1), value=size).gather(1, places // BLOCK)
    return values, starts + places % BLOCK


def _blocks(scores: Tensor) -> Tensor | None:
    """Returns the scores of each row in blocks, but for the last ones: a view, (N, V // BLOCK, BLOCK), or None."""
    size = scores.shape[1] // BLOCK * BLOCK
    is_many = scores.device.type == "cpu" and size and scores.numel() >= SCORES_FOR_BLOCKS
    return scores[:, :size].unflatten(1, (-1, BLOCK)) if is_many else None  # type: ignore[no-untyped-call]


def num_candidates(plan: Plan) -> int:
    """Returns how many continuations a sentence's next beams are among, however many of them end."""
    return max(2, 1 + len(plan.ends)) * plan.num_beams


def advance(
    plan: Plan,
    beams: Beams,
    candidates: tuple[Tensor, Tensor],  # log-probabilities, descending, and choices, (B, `num_candidates` or less)
    vocab_size: int,
    ends: Tensor,  # tokens that end a hypothesis, (E,)
    limited: Tensor | None,  # which sentences are at their limit, (B,); None: none is
    length: int | Tensor,  # tokens of each hypothesis with this step's
    divided_by: float | Tensor,  # the divisor of their log-probabilities
    coverage: Tensor | None = None,  # the coverage penalty of each row, (B, K or 1), a number up to 0
    *,
    looks: bool = False,  # whether values may be looked at, to leave out what isn't needed
    keeps_places: bool = False,  # as a decoder's
) -> tuple[Beams, Tensor, Tensor, Tensor]:
    """Takes the best continuations of all sentences' beams: a step of section 6.1.

    Returns where the searches stand then; and for each beam, (B, K), its token, its code, and the place of the beam
    that it continues.
    """
    num_beams, (scores, choices) = plan.num_beams, candidates
    if (missing := num_candidates(plan) - scores.shape[1]) > 0:  # a vocabulary too small for all candidates
        scores, choices = F.pad(scores, (0, missing), value=NONE), F.pad(choices, (0, missing))
    ended = is_in(choices % vocab_size, ends)
    if limited is not None:
        ended = ended | limited[:, None]
    finished, active = beams[-3:], beams.active
    if looks and not ended.any() and not scores[:, num_beams - 1].isneginf().any():  # the usual case
        scores, choices = scores[:, :num_beams], choices[:, :num_beams]
    else:
        ending = choices[:, :num_beams]  # others replace these
        parents, shown = ending // vocab_size, scores[:, :num_beams] / divided_by
        if coverage is not None:
            shown = shown + coverage.gather(1, parents)
        shown = torch.where(ended[:, :num_beams] & active[:, None], shown, NONE)
        codes = ending * num_beams + beams.ranks.gather(1, parents)
        finished = _best(finished, shown, codes, torch.zeros_like(codes) + (length - 1))
        scores, choices = _going_on(scores, choices, ended, num_beams)
        active = active & (scores[:, 0] > NONE)
        if plan.early_stopping is True:
            active = active & (finished[0][:, -1] == NONE)
    if plan.early_stopping is not True:
        # More tokens only lower the log-probability; but a higher length divides by more.
        by = beams.bounds if plan.early_stopping == "never" and plan.length_penalty > 0 else divided_by
        worst = finished[0][:, -1]
        active = active & ((worst == NONE) | (scores[:, 0] / by > worst))
    if keeps_places:
        ranks = _ranks_by_place(choices // vocab_size)
        scores, choices = scores.gather(1, ranks), choices.gather(1, ranks)
    else:
        ranks = torch.arange(num_beams, device=scores.device).expand_as(scores)
    parents = choices // vocab_size
    codes = choices * num_beams + beams.ranks.gather(1, parents)
    return Beams(scores, ranks, beams.limits, beams.bounds, active, *finished), choices % vocab_size, codes, parents


def _best(finished: tuple[Tensor, ...], scores: Tensor, codes: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns scores, codes and steps of the K best among finished hypotheses and those that end now, (B, K) each."""
    scores, codes, steps = (
        torch.cat([before, now], dim=1) for before, now in zip(finished, (scores, codes, steps), strict=True)
    )
    # Of equal scores, the hypothesis that was finished first comes first.
    scores, order = (one[:, : scores.shape[1] // 2] for one in scores.sort(dim=1, descending=True, stable=True))
    return scores, codes.gather(1, order), steps.gather(1, order)


def _going_on(scores: Tensor, choices: Tensor, ended: Tensor, num_beams: int) -> tuple[Tensor, Tensor]:
    """Returns the best of the candidates that haven't ended; a beam that isn't there continues the first one."""
    left = (ended | (scores == NONE)).to(torch.int8).sort(dim=1, stable=True)
    chosen, is_none = left.indices[:, :num_beams], left.values[:, :num_beams] > 0
    scores, choices = scores.gather(1, chosen).masked_fill_(is_none, NONE), choices.gather(1, chosen)
    return scores, torch.where(is_none, choices[:, :1], choices)


def _ranks_by_place(parents: Tensor) -> Tensor:
    """Returns the rank of the beam at each place, (B, K), from the places of their parents, (B, K) by rank.

    A beam gets the place of its parent, if it is the first there.
    """
    found = []
    for row in parents.tolist():  # on a CPU, where a loop takes less time than the tensor operations in its place
        ranks: list[int | None] = [None] * len(row)
        displaced = []
        for rank, parent in enumerate(row):
            if ranks[parent] is None:
                ranks[parent] = rank
            else:
                displaced.append(rank)
        left = iter(displaced)
        found.append([next(left) if rank is None else rank for rank in ranks])
    return torch.tensor(found, device=parents.device)


def coverage_penalty(beta: float, covered: Tensor) -> Tensor:
    """Computes the penalty of Wu et al. 2016 (eq. 15) of each row, a number up to 0.

    It is beta * sum_i log(min(covered_i, 1)), of how much each position of the source was attended to, (rows, S).
    """
    return beta * covered.clamp(torch.finfo(covered.dtype).tiny, 1.0).log().sum(dim=1)


class History:
    """The codes of all steps, or the tokens of a greedy search, and what was attended to."""

    def __init__(self, num_sentences: int, num_beams: int) -> None:
        self.num_sentences, self.num_beams = num_sentences, num_beams
        self.live: list[list[int]] = []  # the sentences that were searched for in each step
        self.codes: list[Tensor] = []  # (sentences, K), or (sentences,)
        self.shown: list[Tensor] = []  # (sentences, K, S)

    def add(self, live: list[int], codes: Tensor, attention: Tensor | None) -> None:
        """Keeps a step: the numbers of its sentences, their codes or tokens, and the attention of its rows."""
        self.live.append(live)
        self.codes.append(codes)
        if attention is not None:  # of one row for each sentence in the first step
            rows = attention.reshape(len(live), -1, attention.shape[-1])
            self.shown.append(rows.expand(-1, self.num_beams, -1))

    def of_all_sentences(self) -> tuple[Tensor, Tensor | None]:
        """Returns codes, (T, B, K) or (T, B), and attention, (T, B, K, S); 0 where a sentence had left the batch."""
        places = [step * self.num_sentences + own for step, live in enumerate(self.live) for own in live]
        return self._spread(self.codes, places), self._spread(self.shown, places) if self.shown else None

    def _spread(self, parts: list[Tensor], places: list[int]) -> Tensor:
        flat = torch.cat(parts)
        spread = flat.new_zeros(len(parts) * self.num_sentences, *flat.shape[1:])
        spread[places] = flat
        return spread.view(len(parts), self.num_sentences, *flat.shape[1:])


def trace(
    beams: Beams, codes: Tensor, count: int, vocab_size: int, attention: Tensor | None = None
) -> list[list[Hypothesis]]:
    """Traces hypotheses back, for all sentences at once: at most `count` of each, the best first.

    Codes of all steps are (T, B, K), or of the first sentences; attention, if it is asked for, is (T, B, K, S).
    """
    by_step = codes.cpu().numpy()
    length, sentences, num_beams = by_step.shape
    scores, last, steps = (one[:sentences, :count].cpu().numpy() for one in beams[-3:])
    code, paths = np.zeros_like(last), np.zeros((3, *last.shape, length), dtype=np.int64)
    for number in range(length - 1, -1, -1):
        code = np.where(steps == number, last, code)
        choice, rank = np.divmod(code, num_beams)
        place, token = np.divmod(choice, vocab_size)
        paths[..., number] = token, rank, place
        code = np.take_along_axis(by_step[number - 1], place, axis=1)
    found: list[list[Hypothesis]] = [[] for _ in range(sentences)]
    for sentence, number in np.argwhere(scores > NONE).tolist():
        tokens, ranks, places = paths[:, sentence, number, : steps[sentence, number] + 1].tolist()
        shown = None if attention is None else attention[list(range(len(places))), sentence, places]
        found[sentence].append(Hypothesis(tokens, float(scores[sentence, number]), ranks, shown))
    return found


def cut(
    tokens: Tensor, plan: Plan, max_new_tokens: Sequence[int], attention: Tensor | None = None
) -> list[list[Hypothesis]]:
    """Cuts what a greedy search has found behind each sentence's end or at its limit; steps may have gone beyond.

    Tokens of all steps are (T, B); attention, if it is asked for, is (T, B, 1, S).
    """
    found = []
    for sentence, (row, limit) in enumerate(zip(tokens.t().tolist(), max_new_tokens, strict=True)):
        own = row[:limit]
        length = next((place for place, token in enumerate(own, start=1) if token in plan.ends), len(own))
        shown = None if attention is None else attention[:length, sentence, 0]
        found.append([Hypothesis(own[:length], attention=shown)])
    return found


@torch.no_grad()
def beam_search(
    decoder: Decoder,  # with a row for each sentence
    prompts: Tensor,  # what each hypothesis begins with, (B, P)
    max_new_tokens: Sequence[int],  # of each sentence, from 1 up
    plan: Plan,
    process: ScoreProcessor | None = None,
    attention_mask: Tensor | None = None,  # (B, S), 0 for padding, which needs no coverage
) -> list[list[Hypothesis]]:
    """Searches for the best hypotheses of each sentence by itself: `num_hypotheses`, or as many as there are.

    `process` changes log-probabilities, (rows, V), in view of tokens so far, (rows, length), row by row. The tensor's
    memory is used again in the next step.
    """
    device, on_cpu = prompts.device, prompts.device.type == "cpu"
    tokens, covered = _read(prompts, decoder)  # how much was attended to each position of the source, (rows, S)
    if attention_mask is not None:
        covered = covered + (attention_mask == 0).float()
    ends = torch.tensor(plan.ends, dtype=torch.long, device=device)
    every = beams = Beams.start(plan, torch.tensor(max_new_tokens, device=device))  # of all sentences, and of the live
    live, places, soonest = list(range(len(prompts))), torch.arange(len(prompts), device=device), min(max_new_tokens)
    history, vocab_size = History(len(prompts), plan.num_beams), 0
    buffer: Tensor | None = None  # fresh memory for each step's log-probabilities would take longer than these
    for length in range(1, max(max_new_tokens) + 1):
        logits = decoder.step(tokens)  # (rows, V)
        if buffer is None or len(buffer) < len(logits):
            buffer, vocab_size = torch.empty_like(logits, dtype=torch.float32), logits.shape[1]
        log_probabilities = torch.log_softmax(logits, -1, torch.float32, out=buffer[: len(logits)])
        if process is not None:
            log_probabilities = process(prompts, log_probabilities)
        totals = log_probabilities.add_(beams.scores.reshape(-1, 1)).reshape(len(live), -1)
        penalties = None
        if plan.coverage_penalty:
            assert decoder.attention is not None, "it is kept for a plan that needs it"
            covered = covered + decoder.attention
            penalties = coverage_penalty(plan.coverage_penalty, covered).view(len(live), -1)
        width = beams.scores.shape[1]
        beams, new, codes, parents = advance(
            plan,
            beams,
            largest(totals, num_candidates(plan)),
            vocab_size,
            ends,
            None if length < soonest else beams.limits <= length,
            length,
            length**plan.length_penalty,
            penalties,
            looks=on_cpu,
            keeps_places=decoder.keeps_places,
        )
        history.add(live, codes, decoder.attention if plan.alignments else None)
        moved = places[: len(live)]
        if (on_cpu or length % STEPS_UNSEEN == 0) and not beams.active.all():
            every = _put(every, live, beams)
            kept = closed_up(beams.active.nonzero().flatten().tolist())
            if not kept:
                break
            moved = torch.tensor(kept, device=device)
            live = [live[place] for place in kept]
            beams, new, parents = Beams(*(one[moved] for one in beams)), new[moved], parents[moved]
        rows = (moved[:, None] * width + parents).flatten()
        decoder.move(rows, moved)
        tokens = new.flatten()
        if plan.coverage_penalty:
            covered = covered[rows]
        if process is not None:
            prompts = torch.cat([prompts[rows], tokens[:, None]], dim=1)
    else:
        every = _put(every, live, beams)
    all_codes, attention = history.of_all_sentences()
    return trace(every, all_codes, plan.num_hypotheses, vocab_size, attention)


def _put(every: Beams, live: list[int], beams: Beams) -> Beams:
    """Returns what all sentences have found, with what those found that are still searched for."""
    if len(live) == len(every.limits):
        return beams
    for found, now in zip(every[-3:], beams[-3:], strict=True):
        found[live] = now
    return every


@torch.no_grad()
def greedy_search(
    decoder: Decoder,
    prompts: Tensor,
    max_new_tokens: Sequence[int],
    plan: Plan,
    process: ScoreProcessor | None = None,  # changes logits
) -> list[list[Hypothesis]]:
    """Takes the most probable token at each step: for each sentence one hypothesis, without a score."""
    device, on_cpu = prompts.device, prompts.device.type == "cpu"
    ends = torch.tensor(plan.ends, dtype=torch.long, device=device)
    limits, soonest = torch.tensor(max_new_tokens, device=device), min(max_new_tokens)
    changes_scores = plan.repetition_penalty != 1 or plan.renormalize  # else they stay or are barred
    best = partial(Decoder.best, decoder) if changes_scores else decoder.best
    tokens, _ = _read(prompts, decoder)
    live, history = list(range(len(prompts))), History(len(prompts), num_beams=1)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for length in range(1, max(max_new_tokens) + 1):
        tokens = best(tokens, None if process is None else partial(process, prompts))
        history.add(live, tokens, decoder.attention if plan.alignments else None)
        ended = ended | is_in(tokens, ends)
        if length >= soonest:
            ended = ended | (limits <= length)
        if process is not None:
            prompts = torch.cat([prompts, tokens[:, None]], dim=1)
        if (on_cpu or length % STEPS_UNSEEN == 0) and ended.any():
            kept = closed_up((~ended).nonzero().flatten().tolist())
            if not kept:
                break
            rows = torch.tensor(kept, device=device)
            decoder.move(rows, rows)
            tokens, prompts, ended, limits = tokens[rows], prompts[rows], ended[rows], limits[rows]
            live = [live[row] for row in kept]
    all_tokens, attention = history.of_all_sentences()
    return cut(all_tokens, plan, max_new_tokens, attention)


def _read(prompts: Tensor, decoder: Decoder) -> tuple[Tensor, Tensor]:
    """Reads prompts, (B, P), but for their last tokens, (B,); returns these, and the attention so far, (B, S) or 0."""
    attended = torch.zeros((), device=prompts.device)
    for position in range(prompts.shape[1] - 1):
        decoder.step(prompts[:, position])
        if decoder.attention is not None:
            attended = attended + decoder.attention
    return prompts[:, -1], attended


def closed_up(kept: Sequence[int]) -> list[int]:
    """Returns the old place of each new one if some places are kept, in ascending order, and few of them move."""
    staying = {place for place in kept if place < len(kept)}
    moving = iter(kept[len(staying) :])
    return [place if place in staying else next(moving) for place in range(len(kept))]
