"""What a plan changes about the scores of a step: tokens that are barred or forced, repetitions."""

import math
from functools import partial

import torch
from torch import Tensor
from transformers.generation import logits_process

from ...plan_vanilla_transformer import Plan
from .search import ScoreProcessor


def least(plan: Plan, prompt_length: int) -> int:
    """Returns how many new tokens there are before an end at least; of both settings, new tokens count."""
    return max(plan.min_length - prompt_length, 0) if plan.min_new_tokens is None else plan.min_new_tokens


def barred(plan: Plan, vocab_size: int, prompt_length: int) -> list[list[int]]:
    """Returns the tokens that are barred always, in the first step, and before the least length."""
    words = [word[0] for word in plan.barred_words if len(word) == 1]
    ends = plan.ends if least(plan, prompt_length) else ()
    groups = ((*plan.barred, *words), plan.barred_at_begin, ends)
    return [[token for token in group if token < vocab_size] for group in groups]


def other_words(plan: Plan, vocab_size: int) -> list[list[int]]:
    """Returns the barred words of several tokens, and those outside the vocabulary: transformers refuses these."""
    return [list(word) for word in plan.barred_words if len(word) > 1 or word[0] >= vocab_size]


def score_processor(plan: Plan, vocab_size: int, prompts: Tensor, longest: int) -> ScoreProcessor | None:
    """Returns what changes the scores of a step, (rows, V), to what transformers makes of them; None: nothing.

    Barred tokens are filled in place: copies of all scores, as transformers makes them, take up to a third of a step.
    The plan forces no token that it bars; prompts are (B, P), and `longest` is new tokens at most.
    """
    device, begin = prompts.device, prompts.shape[1]
    first = begin + (begin == 1 and plan.forced_begin is not None)  # the length at which tokens are barred as the first
    lengths = ((0, math.inf), (first, first + 1), (0, begin + least(plan, begin)))
    steps: list[ScoreProcessor] = []
    if plan.repetition_penalty != 1:
        steps.append(logits_process.RepetitionPenaltyLogitsProcessor(plan.repetition_penalty))
    if plan.no_repeat_ngram_size:
        steps.append(logits_process.NoRepeatNGramLogitsProcessor(plan.no_repeat_ngram_size))
    if words := other_words(plan, vocab_size):
        steps.append(logits_process.NoBadWordsLogitsProcessor(words))
    for tokens, between in zip(barred(plan, vocab_size, begin), lengths, strict=True):
        if tokens:
            steps.append(partial(_bar, torch.tensor(tokens, device=device), between))
    if plan.forced_begin is not None:
        steps.append(logits_process.ForcedBOSTokenLogitsProcessor(plan.forced_begin))
    if plan.forced_end:
        forced = list(plan.forced_end)
        steps.append(logits_process.ForcedEOSTokenLogitsProcessor(begin + longest, forced, device=str(device)))
    if plan.renormalize:
        steps.append(lambda tokens, scores: torch.log_softmax(scores, -1, out=scores))
    return partial(_process, steps) if steps else None


def _process(steps: list[ScoreProcessor], tokens: Tensor, scores: Tensor) -> Tensor:
    for step in steps:
        scores = step(tokens, scores)
    return scores


def _bar(barred: Tensor, between: tuple[int, float], tokens: Tensor, scores: Tensor) -> Tensor:
    """Bars tokens from a length on and below another one, in the scores' memory."""
    return scores.index_fill_(1, barred, -math.inf) if between[0] <= tokens.shape[1] < between[1] else scores
