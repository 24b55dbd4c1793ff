"""What a plan changes about the scores of a step: tokens that are barred or forced, repetitions."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from transformers.generation import logits_process

from ...plan_vanilla_transformer import Plan
from .search import ScoreProcessor

Step = Callable[[Tensor, Tensor], Tensor]


def score_processor(plan: Plan, vocab_size: int, prompts: Tensor, longest: int) -> ScoreProcessor | None:
    """Returns what changes the scores of a step, (rows, V), in transformers' order; None: nothing.

    Barred tokens are filled in place: copies of all scores, as transformers makes them, take up to a third of a step.

    Args:
        plan: The plan.
        vocab_size: V.
        prompts: (B, P).
        longest: New tokens at most.
    """
    steps = [
        *_repetitions(plan),
        *_lengths(plan, vocab_size, prompts, longest),
        *_bars(plan, vocab_size, prompts),
    ]
    if plan.renormalize:
        steps.append(lambda tokens, scores: torch.log_softmax(scores, -1, out=scores))
    return partial(_process, steps) if steps else None


def _repetitions(plan: Plan) -> Iterator[Step]:
    if plan.repetition_penalty != 1:
        yield logits_process.RepetitionPenaltyLogitsProcessor(plan.repetition_penalty)
    if plan.no_repeat_ngram_size:
        yield logits_process.NoRepeatNGramLogitsProcessor(plan.no_repeat_ngram_size)


def _lengths(plan: Plan, vocab_size: int, prompts: Tensor, longest: int) -> Iterator[Step]:
    """Bars words, the end below the least length, and all but what is forced at the beginning and at the end."""
    device, begin = prompts.device, prompts.shape[1]
    ends = torch.tensor([end for end in plan.ends if end < vocab_size], dtype=torch.long, device=device)
    if plan.barred_words:
        bars = logits_process.NoBadWordsLogitsProcessor(list(map(list, plan.barred_words)), ends)
        words = list(bars.sequence_bias)
        if any(len(one) > 1 or one[0] >= vocab_size for one in words):  # the latter is an error of the processor's
            yield bars
        else:
            yield partial(_bar, torch.tensor(words, dtype=torch.long, device=device).flatten(), math.inf)
    # With both, transformers lets the new tokens count.
    least = plan.min_length if plan.min_new_tokens is None else begin + plan.min_new_tokens
    if least and len(ends):
        yield partial(_bar, ends, least)
    if plan.forced_begin is not None:
        yield logits_process.ForcedBOSTokenLogitsProcessor(plan.forced_begin)
    if plan.forced_end:
        forced = list(plan.forced_end)
        yield logits_process.ForcedEOSTokenLogitsProcessor(begin + longest, forced, device=str(device))


def _bars(plan: Plan, vocab_size: int, prompts: Tensor) -> Iterator[Step]:
    """Bars tokens everywhere, and tokens at the beginning."""
    device, begin = prompts.device, prompts.shape[1]
    if barred := [token for token in plan.barred if token < vocab_size]:
        yield partial(_bar, torch.tensor(barred, device=device), math.inf)
    if plan.barred_at_begin:
        place = begin if begin > 1 or plan.forced_begin is None else begin + 1
        barred = list(plan.barred_at_begin)
        yield logits_process.SuppressTokensAtBeginLogitsProcessor(barred, place, device=str(device))


def _process(steps: list[Step], tokens: Tensor, scores: Tensor) -> Tensor:
    for step in steps:
        scores = step(tokens, scores)
    return scores


def _bar(barred: Tensor, below: float, tokens: Tensor, scores: Tensor) -> Tensor:
    """Bars tokens below a length, in the scores' memory."""
    return scores.index_fill_(1, barred, -math.inf) if tokens.shape[1] < below else scores
