"""Greedy and beam search as in section 6.1 of "Attention Is All You Need", on tensors, over anything that decodes.

A search asks a decoder for the next step's logits and tells it where its rows move. It never looks at a value on the
way, so that a GPU isn't waited for, but to see whether a sentence has ended: at each step on a CPU, where finished
sentences leave the batch, and every few steps elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...plan_vanilla_transformer import Plan

STEPS_UNSEEN = 8  # on a device that would have to be waited for
NONE = -torch.inf  # the log-probability of a beam that isn't there

ScoreProcessor = Callable[[Tensor, Tensor], Tensor]


class Decoder(Protocol):
    """A batch that is decoded step by step: rows are hypotheses, equally many for each sentence, in their order.

    Attributes:
        source_mask: Which positions of the sources are no padding, (B, S).
        attention: What each row attended to in the last step, (rows, S); None: it isn't kept.
        keeps_places: Whether a beam had better stay in the row of the beam that it continues.
    """

    source_mask: Tensor
    attention: Tensor | None
    keeps_places: bool

    def step(self, tokens: Tensor) -> Tensor:
        """Advances by one position, with the token of each row, (rows,); returns logits of the next, (rows, V)."""
        ...

    def move(self, rows: Tensor, sentences: Tensor) -> None:
        """Gives each row the past of a former row, and each sentence the source of a former one."""
        ...


class Hypothesis(NamedTuple):
    """A translation that a search has found.

    Attributes:
        tokens: Its tokens, with the end but without the prompt.
        score: Its log-probability divided by the length penalty, plus the coverage penalty; of a greedy search None.
        beams: The rank, before each token, of the beam that it continues, among its sentence's.
        attention: What each token attended to, (T, S); None: it isn't kept.
    """

    tokens: list[int]
    score: float | None = None
    beams: Sequence[int] = ()
    attention: Tensor | None = None


@dataclass
class Beams:
    """Where the searches for B sentences stand; all K beams have a place, one for each row of the decoder.

    A choice is a continuation: the place of a beam, times V, plus the next token. A code is what happened to a beam in
    a step: the choice, times K, plus the rank of the beam that it continues.

    Attributes:
        scores: Log-probability of each running beam, (B, K), or (B, 1) before the first step; -inf: there is none.
        ranks: Their ranks among their sentence's, from 0 up.
        limits: The longest hypothesis of each sentence, (B,).
        bounds: What a score is divided by at least by the time that its sentence ends, (B,); for `early_stopping`
            "never".
        active: Whether the search for each sentence goes on, (B,).
        finished_scores: Of the K best hypotheses so far, the best first, (B, K); -inf: there are fewer.
        finished_codes: Of their last steps.
        finished_steps: The numbers of these steps, from 0 up.
    """

    scores: Tensor
    ranks: Tensor
    limits: Tensor
    bounds: Tensor
    active: Tensor
    finished_scores: Tensor
    finished_codes: Tensor
    finished_steps: Tensor

    @classmethod
    def start(cls, plan: Plan, limits: Tensor, width: int = 1) -> "Beams":
        """Begins with one beam for each sentence, in the first of `width` places."""
        size, places = (len(limits), plan.num_beams), (len(limits), width)
        scores = torch.full(places, NONE, dtype=torch.float32, device=limits.device)
        scores[:, 0] = 0.0
        divisors = torch.tensor([divisor(plan, length) for length in range(1, int(limits.max()) + 1)])
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

    def select(self, sentences: Tensor) -> "Beams":
        """Returns the searches for some of the sentences."""
        return Beams(*(getattr(self, one.name)[sentences] for one in fields(self)))

    def to(self, device: torch.device) -> "Beams":
        """Returns the searches on another device."""
        return Beams(*(getattr(self, one.name).to(device) for one in fields(self)))


def divisor(plan: Plan, length: int) -> float:
    """Returns what the log-probability of a hypothesis of `length` tokens is divided by."""
    return length**plan.length_penalty


def is_in(tokens: Tensor, ends: Tensor) -> Tensor:
    """Tells which tokens are ends; there is nearly always one, for which a comparison is enough."""
    return tokens == ends if len(ends) == 1 else torch.isin(tokens, ends)


def num_candidates(plan: Plan) -> int:
    """Returns how many continuations a sentence's next beams are among, however many of them end."""
    return max(2, 1 + len(plan.ends)) * plan.num_beams


def best_choices(plan: Plan, beams: Beams, log_probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the best continuations of each sentence: log-probabilities, in descending order, and choices, (B, C).

    Args:
        plan: How to search.
        beams: Where the searches stand.
        log_probabilities: Of each token, (rows, V), in float32, to be overwritten.
    """
    totals = log_probabilities.add_(beams.scores.reshape(-1, 1)).reshape(len(beams.scores), -1)
    return totals.topk(min(num_candidates(plan), totals.shape[1]))


def advance(
    plan: Plan,
    beams: Beams,
    candidates: tuple[Tensor, Tensor],
    vocab_size: int,
    ends: Tensor,
    limited: Tensor | None,
    length: int | Tensor,
    divided_by: float | Tensor,
    coverage: Tensor | None = None,
    *,
    keeps_places: bool = True,
) -> tuple[Beams, Tensor, Tensor, Tensor]:
    """Takes the best continuations of all sentences' beams: a step of section 6.1.

    Args:
        plan: How to search.
        beams: Where the searches stand.
        candidates: What `best_choices` found.
        vocab_size: V.
        ends: Tokens that end a hypothesis, (E,).
        limited: Which sentences are at their limit, (B,); None: none is.
        length: Tokens of each hypothesis with this step's. A number on a CPU, where what isn't needed is left out.
        divided_by: The divisor of their log-probabilities.
        coverage: The coverage penalty of each row, (B, K or 1), a number up to 0.
        keeps_places: As a decoder's.

    Returns:
        Where the searches stand then; and for each beam, (B, K), its token, its code, and the place of the beam that it
        continues.
    """
    num_beams, (scores, choices), looks = plan.num_beams, candidates, isinstance(length, int)
    if (missing := num_candidates(plan) - scores.shape[1]) > 0:  # a vocabulary too small for all candidates
        scores, choices = F.pad(scores, (0, missing), value=NONE), F.pad(choices, (0, missing))
    tokens = choices % vocab_size
    ended = is_in(tokens, ends)
    if limited is not None:
        ended = ended | limited[:, None]
    finished = (beams.finished_scores, beams.finished_codes, beams.finished_steps)
    active = beams.active
    if looks and not ended.any() and not scores[:, num_beams - 1].isneginf().any():  # the usual case
        scores, choices = scores[:, :num_beams], choices[:, :num_beams]
    else:
        finished = _finish(plan, beams, scores, choices, vocab_size, ended, length, divided_by, coverage)
        # Of the others, the best go on. A beam that isn't there continues the first one.
        left = (ended | (scores == NONE)).to(torch.int8).sort(dim=1, stable=True)
        chosen, is_none = left.indices[:, :num_beams], left.values[:, :num_beams] > 0
        scores, choices = scores.gather(1, chosen).masked_fill_(is_none, NONE), choices.gather(1, chosen)
        choices = torch.where(is_none, choices[:, :1], choices)
        active = active & (scores[:, 0] > NONE)
        if plan.early_stopping is True:
            active = active & (finished[0][:, -1] == NONE)
    if plan.early_stopping is not True:
        # More tokens only lower the log-probability; but a higher length divides by more.
        by = beams.bounds if plan.early_stopping == "never" and plan.length_penalty > 0 else divided_by
        worst = finished[0][:, -1]
        active = active & ((worst == NONE) | (scores[:, 0] / by > worst))
    if keeps_places and beams.scores.shape[1] > 1:
        ranks = _ranks_by_place(choices // vocab_size)
        scores, choices = scores.gather(1, ranks), choices.gather(1, ranks)
    else:
        ranks = torch.arange(num_beams, device=scores.device).expand_as(scores)
    parents = choices // vocab_size
    codes = choices * num_beams + beams.ranks.gather(1, parents)
    after = Beams(scores, ranks, beams.limits, beams.bounds, active, *finished)
    return after, choices % vocab_size, codes, parents


def _finish(
    plan: Plan,
    beams: Beams,
    scores: Tensor,
    choices: Tensor,
    vocab_size: int,
    ended: Tensor,
    length: int | Tensor,
    divided_by: float | Tensor,
    coverage: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns scores, codes and steps of the best finished hypotheses, with those of candidates that end now."""
    before, num_beams = (beams.finished_scores, beams.finished_codes, beams.finished_steps), plan.num_beams
    ended, choices = ended[:, :num_beams] & beams.active[:, None], choices[:, :num_beams]  # others replace these
    parents, scores = choices // vocab_size, scores[:, :num_beams] / divided_by
    if coverage is not None:
        scores = scores + coverage.gather(1, parents)
    # Of equal scores, the hypothesis that was finished first comes first.
    all_scores = torch.cat([before[0], torch.where(ended, scores, NONE)], dim=1)
    best, order = (one[:, :num_beams] for one in all_scores.sort(dim=1, descending=True, stable=True))
    steps = torch.zeros_like(before[2]) + (length - 1)
    codes = choices * num_beams + beams.ranks.gather(1, parents)
    all_codes, all_steps = torch.cat([before[1], codes], dim=1), torch.cat([before[2], steps], dim=1)
    return best, all_codes.gather(1, order), all_steps.gather(1, order)


def _ranks_by_place(parents: Tensor) -> Tensor:
    """Gives each beam, by the places of their parents, (B, K) by rank, a place: its parent's, if it is the first there.

    Returns:
        The rank of the beam at each place, (B, K).
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


class Coverage:
    """How much each beam has attended to each position of the source so far (Wu et al. 2016, section 7).

    Args:
        penalty: beta of eq. 15.
    """

    def __init__(self, penalty: float) -> None:
        self.penalty, self.sums = penalty, torch.zeros(1, dtype=torch.float32)

    def add(self, attention: Tensor, source_mask: Tensor) -> Tensor:
        """Adds a step's attention, (rows, S), and computes the penalty of each row, (B, rows per sentence).

        It is beta * sum_i log(min(sums_i, 1)), a number up to 0, over the positions of `source_mask`, (B, S).
        """
        self.sums = self.sums.to(attention) + attention
        real = source_mask.repeat_interleave(len(attention) // len(source_mask), dim=0)
        logs = self.sums.clamp(torch.finfo(self.sums.dtype).tiny, 1.0).log() * real
        return self.penalty * logs.sum(dim=1).view(len(source_mask), -1)

    def move(self, rows: Tensor) -> None:
        """Gives each beam the sums of the beam that it continues."""
        self.sums = self.sums[rows]


class History:
    """The codes of all steps, and what is kept beside them.

    Args:
        num_sentences: B.
        num_beams: K.
        vocab_size: V.
    """

    def __init__(self, num_sentences: int, num_beams: int, vocab_size: int) -> None:
        self.num_sentences, self.num_beams, self.vocab_size = num_sentences, num_beams, vocab_size
        self.codes: list[Tensor] = []  # (sentences, K) of each step
        self.live: list[list[int]] = []  # the sentences that were searched for in it
        self.attention: list[Tensor] = []  # (rows, S)

    def hypotheses(self, beams: Beams, count: int) -> list[list[Hypothesis]]:
        """Traces the best hypotheses of all sentences back, `count` of each at most."""
        flat = torch.cat([one.flatten() for one in self.codes]).cpu()  # one wait for the device
        codes = np.zeros((len(self.codes), self.num_sentences, self.num_beams), dtype=np.int64)
        begin = 0
        for step, live in enumerate(self.live):
            end = begin + len(live) * self.num_beams
            codes[step, live] = flat[begin:end].view(len(live), -1).numpy()
            begin = end
        found, places = trace(beams, codes, count, self.vocab_size)
        if not self.attention:
            return found
        rows = zip(found, places.tolist(), strict=True)
        return [
            [
                one._replace(attention=self._shown(sentence, path[: len(one.tokens)]))
                for one, path in zip(own, paths, strict=False)
            ]
            for sentence, (own, paths) in enumerate(rows)
        ]

    def _shown(self, sentence: int, places: list[int]) -> Tensor:
        """Returns what a hypothesis attended to, (T, S), by the places of its beams before each step."""
        shown = []
        for place, kept, live in zip(places, self.attention, self.live, strict=False):
            width = len(kept) // len(live)
            shown.append(kept[live.index(sentence) * width + place])
        return torch.stack(shown)


def trace(
    beams: Beams, codes: "np.ndarray[Any, Any]", count: int, vocab_size: int
) -> tuple[list[list[Hypothesis]], "np.ndarray[Any, Any]"]:
    """Traces hypotheses back, for all sentences at once.

    Args:
        beams: What the sentences have found.
        codes: Of all steps, (T, B, K); or of the first sentences.
        count: Hypotheses of a sentence at most.
        vocab_size: V.

    Returns:
        The hypotheses of each sentence, the best first; and the place of each one's beam before each step,
        (B, count, T).
    """
    length, sentences, num_beams = codes.shape
    finished = (beams.finished_scores, beams.finished_codes, beams.finished_steps)
    scores, last, steps = (one[:sentences, :count].cpu().numpy() for one in finished)
    code, paths = np.zeros_like(last), np.zeros((3, *last.shape, length), dtype=np.int64)
    for number in range(length - 1, -1, -1):
        code = np.where(steps == number, last, code)
        choice, rank = np.divmod(code, num_beams)
        place, token = np.divmod(choice, vocab_size)
        paths[..., number] = token, rank, place
        code = np.take_along_axis(codes[number - 1], place, axis=1)
    found = zip(scores.tolist(), steps.tolist(), *paths[:2].tolist(), strict=True)
    return [
        [
            Hypothesis(tokens[: step + 1], score, ranks[: step + 1])
            for score, step, tokens, ranks in zip(*own, strict=True)
            if score > NONE
        ]
        for own in found
    ], paths[2]


@torch.no_grad()
def beam_search(
    decoder: Decoder,
    prompts: Tensor,
    max_new_tokens: Sequence[int],
    plan: Plan,
    process: ScoreProcessor | None = None,
) -> list[list[Hypothesis]]:
    """Searches for the translations of a batch, each sentence by itself.

    Args:
        decoder: With a row for each sentence.
        prompts: What each hypothesis begins with, (B, P).
        max_new_tokens: Longest hypothesis of each sentence, from 1 up.
        plan: How to search: its beams, penalties, ends, number of hypotheses and alignments.
        process: Changes log-probabilities, (rows, V), in view of tokens so far, (rows, length); row by row. The
            tensor's memory is used again in the next step.

    Returns:
        For each sentence the best hypotheses, `num_hypotheses` or as many as there are.
    """
    device, on_cpu = prompts.device, prompts.device.type == "cpu"
    coverage = Coverage(plan.coverage_penalty) if plan.coverage_penalty else None
    tokens = _last_of(prompts, decoder, coverage)
    ends = torch.tensor(plan.ends, dtype=torch.long, device=device)
    beams = Beams.start(plan, torch.tensor(max_new_tokens, device=device))
    every = beams  # what all sentences have found
    live, places, soonest = list(range(len(prompts))), torch.arange(len(prompts), device=device), min(max_new_tokens)
    starts = places[:, None]  # the first row of each sentence
    history: History | None = None
    buffer: Tensor | None = None  # fresh memory for each step's log-probabilities would take longer than these
    for length in range(1, max(max_new_tokens) + 1):
        logits = decoder.step(tokens)  # (rows, V)
        if buffer is None or len(buffer) < len(logits):
            buffer = torch.empty_like(logits, dtype=torch.float32)
        log_probabilities = torch.log_softmax(logits, -1, torch.float32, out=buffer[: len(logits)])
        if process is not None:
            log_probabilities = process(prompts, log_probabilities)
        penalties = None if coverage is None else coverage.add(_shown(decoder), decoder.source_mask)
        history = history or History(len(prompts), plan.num_beams, logits.shape[1])
        if plan.alignments:
            history.attention.append(_shown(decoder))
        number = length if on_cpu else torch.tensor(length, device=device)
        beams, new, codes, parents = advance(
            plan,
            beams,
            best_choices(plan, beams, log_probabilities),
            history.vocab_size,
            ends,
            None if length < soonest else beams.limits <= length,
            number,
            divisor(plan, length),
            penalties,
            keeps_places=decoder.keeps_places,
        )
        history.codes.append(codes)
        history.live.append(live)
        moved = places[: len(live)]
        if (on_cpu or length % STEPS_UNSEEN == 0) and not beams.active.all():
            every = _put(every, live, beams)
            kept = closed_up(beams.active.nonzero().flatten().tolist())
            if not kept:
                break
            moved = torch.tensor(kept, device=device)
            live = [live[place] for place in kept]
            beams, new, parents, starts = beams.select(moved), new[moved], parents[moved], starts[moved]
        rows = (starts + parents).flatten()
        decoder.move(rows, moved)
        if length == 1 or len(live) < len(history.live[-1]):
            starts = places[: len(live), None] * plan.num_beams
        tokens = new.flatten()
        if coverage is not None:
            coverage.move(rows)
        if process is not None:
            prompts = torch.cat([prompts[rows], tokens[:, None]], dim=1)
    else:
        every = _put(every, live, beams)
    assert history is not None, "there is a step"
    return history.hypotheses(every, plan.num_hypotheses)


def _put(every: Beams, live: list[int], beams: Beams) -> Beams:
    """Returns what all sentences have found, with what those found that are still searched for."""
    if len(live) == len(every.limits):
        return beams
    for name in ("finished_scores", "finished_codes", "finished_steps"):
        getattr(every, name)[live] = getattr(beams, name)
    return every


@torch.no_grad()
def greedy_search(
    decoder: Decoder,
    prompts: Tensor,
    max_new_tokens: Sequence[int],
    plan: Plan,
    process: ScoreProcessor | None = None,
    on_token: Callable[[int], object] | None = None,
) -> list[list[Hypothesis]]:
    """Takes the most probable token at each step.

    Args:
        decoder: As in `beam_search`, like the others.
        prompts: What each translation begins with, (B, P).
        max_new_tokens: Longest translation of each sentence, from 1 up.
        plan: Its ends and alignments.
        process: Changes logits.
        on_token: Called with each token of a batch of one sentence.

    Returns:
        For each sentence its hypothesis, without a score.
    """
    device, looks = prompts.device, prompts.device.type == "cpu" or on_token is not None
    ends = torch.tensor(plan.ends, dtype=torch.long, device=device)
    limits, soonest = torch.tensor(max_new_tokens, device=device), min(max_new_tokens)
    tokens = _last_of(prompts, decoder)
    live = list(range(len(prompts)))  # the sentence of each row
    steps: list[tuple[list[int], Tensor, Tensor | None]] = []
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for length in range(1, max(max_new_tokens) + 1):
        logits = decoder.step(tokens)
        if process is not None:
            logits = process(prompts, logits.float())
        tokens = logits.argmax(dim=-1)
        steps.append((live, tokens, decoder.attention if plan.alignments else None))
        ended = ended | is_in(tokens, ends)
        if length >= soonest:
            ended = ended | (limits <= length)
        if on_token is not None:
            on_token(int(tokens[0]))
        if process is not None:
            prompts = torch.cat([prompts, tokens[:, None]], dim=1)
        if (looks or length % STEPS_UNSEEN == 0) and ended.any():
            kept = closed_up((~ended).nonzero().flatten().tolist())
            if not kept:
                break
            rows = torch.tensor(kept, device=device)
            decoder.move(rows, rows)
            tokens, prompts, ended, limits = tokens[rows], prompts[rows], ended[rows], limits[rows]
            live = [live[row] for row in kept]
    return _greedy_hypotheses(steps, max_new_tokens, set(plan.ends))


def _greedy_hypotheses(
    steps: list[tuple[list[int], Tensor, Tensor | None]], max_new_tokens: Sequence[int], ends: set[int]
) -> list[list[Hypothesis]]:
    """Cuts each sentence's tokens behind its end or at its limit; steps may have gone beyond."""
    tokens: list[list[int]] = [[] for _ in max_new_tokens]
    shown: list[list[Tensor]] = [[] for _ in max_new_tokens]
    flat = iter(torch.cat([new for _, new, _ in steps]).tolist())
    for live, new, attention in steps:
        for row, (sentence, token) in enumerate(zip(live, islice(flat, len(new)), strict=True)):
            own = tokens[sentence]
            if len(own) == max_new_tokens[sentence] or (own and own[-1] in ends):
                continue
            own.append(token)
            if attention is not None:
                shown[sentence].append(attention[row])
    return [
        [Hypothesis(own, attention=torch.stack(kept) if kept else None)]
        for own, kept in zip(tokens, shown, strict=True)
    ]


def _last_of(prompts: Tensor, decoder: Decoder, coverage: Coverage | None = None) -> Tensor:
    """Reads prompts, (B, P), but for their last tokens, (B,), and returns these; what they translate is covered."""
    for position in range(prompts.shape[1] - 1):
        decoder.step(prompts[:, position])
        if coverage is not None:
            coverage.add(_shown(decoder), decoder.source_mask)
    return prompts[:, -1]


def _shown(decoder: Decoder) -> Tensor:
    assert decoder.attention is not None, "a decoder that is asked for attention keeps it"
    return decoder.attention


def closed_up(kept: Sequence[int]) -> list[int]:
    """Returns the old place of each new one if some places are kept, in ascending order, and few of them move."""
    staying = {place for place in kept if place < len(kept)}
    moving = iter(kept[len(staying) :])
    return [place if place in staying else next(moving) for place in range(len(kept))]
