"""Forced decoding: how probable a model finds given translations."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..data.symbols import warn_of_unknown
from .backend import Backend, Call, batches
from .decoding import backend_of, read_pairs, texts_of

logger = logging.get_logger(__name__)

# Padded tokens of a batch: all its target tokens have a row of the vocabulary's width at once.
SCORED_TOKENS_PER_BATCH = 2_048


@dataclass(frozen=True)
class Likelihood:
    """How probable a model finds given translations."""

    negative_log_probability: float  # of all target tokens, in nats, without label smoothing
    num_tokens: int  # of targets, each sentence's `</s>` included
    num_left_out: int = 0  # pairs that are too long and not counted

    @property
    def perplexity(self) -> float:
        """Perplexity per token, as in Table 3 (there per word-piece); only comparable for the same tokens."""
        try:
            return math.exp(self.negative_log_probability / self.num_tokens)
        except OverflowError:
            return math.inf


class TargetScore(NamedTuple):
    """How probable a model finds one given translation."""

    log_probability: float  # of all its tokens together, in nats
    num_tokens: int  # `</s>` included


def score_targets(
    model: PreTrainedModel | Backend,
    tokenizer: PreTrainedTokenizerBase,
    sources: Iterable[str],
    targets: Iterable[str],
    **options: Any,
) -> Likelihood:
    """Sums up `score_pairs`: log-probability and number of target tokens, hence perplexity, and of pairs left out."""
    scores = score_pairs(model, tokenizer, sources, targets, **options)
    counted = [score for score in scores if score is not None]
    total, num_tokens = math.fsum(one.log_probability for one in counted), sum(one.num_tokens for one in counted)
    return Likelihood(-total, num_tokens, len(scores) - len(counted))


def score_pairs(
    model: PreTrainedModel | Backend,  # or what `ensemble` made of several
    tokenizer: PreTrainedTokenizerBase,
    sources: Iterable[str],  # an empty one is a source of `</s>` alone, as an empty target
    targets: Iterable[str],  # their translations, in the same order
    *,
    batch_size: int | None = None,  # sentences at a time at most; fewer where they are long
    max_tokens: int | None = None,  # `max_source_tokens` of a `Call`, for source and target
    progress: Callable[[int], object] = lambda number: None,  # called with the number of sentences done since
    on_omission: Callable[[int], object] | None = None,  # called with the index of each pair; None: a warning
    **languages: str | None,  # `src_lang`, `tgt_lang` and `source_prefix` of a `Call`
) -> list[TargetScore | None]:
    """Forces the model to write given targets, and tells how probable it finds each; None: the pair is too long.

    Raises:
        ValueError: Numbers of sources and targets differ, there are none, or all pairs are left out.
    """
    texts, references = texts_of("sources", sources), texts_of("targets", targets)
    if len(texts) != len(references):
        raise ValueError(f"{len(texts)} sources but {len(references)} targets; give one target for each source")
    if not texts:
        raise ValueError("sources and targets are empty; a likelihood needs at least one sentence")
    options = {**languages, "batch_size": batch_size, "max_source_tokens": max_tokens}
    call = Call.of(backend_of(model, tokenizer), tokenizer, options)
    source_ids, target_ids = read_pairs(call, texts, references)
    warn_of_unknown(tokenizer, texts, source_ids)
    warn_of_unknown(tokenizer, references, target_ids, is_target=True)
    pairs: list[tuple[int, list[int], list[int]]] = []
    for index, (source, target) in enumerate(zip(source_ids, target_ids, strict=True)):
        if source is not None and target is not None:
            pairs.append((index, source, target))
        elif on_omission is not None:
            on_omission(index)
        else:
            logger.warning(f"Pair {index} is left out: its source or its target has more than {call.limit:,} tokens.")
    if not pairs:
        raise ValueError(
            f"every pair has a side of more than {call.limit:,} tokens, so there is nothing to score; give a sentence "
            "per line, or raise the limit"
        )
    scores: list[TargetScore | None] = [None] * len(texts)
    if len(pairs) < len(texts):
        progress(len(texts) - len(pairs))
    lengths = [max(len(source), len(target)) for _, source, target in pairs]
    for batch in batches(lengths, batch_size, SCORED_TOKENS_PER_BATCH):
        indices, inputs, labels = zip(*(pairs[place] for place in batch), strict=True)
        found = call.backend.log_probabilities(list(inputs), list(labels))
        for index, target, log_probability in zip(indices, labels, found, strict=True):
            scores[index] = TargetScore(log_probability, len(target))
        progress(len(batch))
    return scores
