"""Forced decoding: how probable a model finds given translations."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..data.symbols import warn_of_unknown
from .backend import Call, batches, check_number
from .decoding import backend_of, target_encoder, texts_of
from .languages import begun, check_target_codes
from .reading import encode_within, encoder

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
    model: PreTrainedModel,
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
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Iterable[str],
    targets: Iterable[str],
    *,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    progress: Callable[[int], object] | None = None,
    on_omission: Callable[[int], object] | None = None,
    **languages: str | None,
) -> list[TargetScore | None]:
    """Forces the model to write given targets, and tells how probable it finds each; None: the pair is left out.

    Args:
        model: A model, or what `ensemble` made of several.
        tokenizer: Its tokenizer.
        sources: The sentences; an empty one is a source of `</s>` alone.
        targets: Their translations, in the same order; an empty one is `</s>` alone.
        batch_size: Sentences at a time at most; fewer where they are long.
        max_tokens: As `max_source_tokens` of a `Call`, of source and target. Pairs that have more are left out.
        progress: Called with the number of sentences done since its last call.
        on_omission: Called with the index of each pair that is left out; None: a warning is logged.
        **languages: `src_lang`, `tgt_lang` and `source_prefix` as for a `Call`.

    Raises:
        TypeError: `sources` or `targets` isn't a list of strings.
        ValueError: Their numbers differ, there are none, all are left out, `batch_size` or `max_tokens` is too small or
            too large, the model is in training mode, or it lacks a language.
    """
    texts, references = texts_of("sources", sources), texts_of("targets", targets)
    backend = backend_of(model, tokenizer)
    check_number("batch_size", batch_size)
    check_number("max_tokens", max_tokens)
    if len(texts) != len(references):
        raise ValueError(f"{len(texts)} sources but {len(references)} targets; give one target for each source")
    if not texts:
        raise ValueError("sources and targets are empty; a likelihood needs at least one sentence")
    call = Call.of(backend, tokenizer, languages)
    limit, begin = backend.source_limit(tokenizer, max_tokens), call.languages.begin
    check_target_codes(tokenizer, texts, needed=call.languages.asked["tgt_lang"] is None)
    with call.languages.read_by(tokenizer):
        source_ids = encode_within(encoder(tokenizer), [begun(tokenizer, text, begin) for text in texts], limit)
        target_ids = encode_within(target_encoder(call.plan, tokenizer), references, limit)
    warn_of_unknown(tokenizer, texts, source_ids)
    warn_of_unknown(tokenizer, references, target_ids, is_target=True)
    pairs: list[tuple[int, list[int], list[int]]] = []
    for index, (source, target) in enumerate(zip(source_ids, target_ids, strict=True)):
        if source is not None and target is not None:
            pairs.append((index, source, target))
        elif on_omission is not None:
            on_omission(index)
        else:
            logger.warning(f"Pair {index} is left out: its source or its target has more than {limit:,} tokens.")
    if not pairs:
        raise ValueError(
            f"every pair has a side of more than {limit:,} tokens, so there is nothing to score; give a sentence per "
            "line, or raise the limit"
        )
    scores: list[TargetScore | None] = [None] * len(texts)
    tell = progress or (lambda number: None)
    if len(pairs) < len(texts):
        tell(len(texts) - len(pairs))
    lengths = [max(len(source), len(target)) for _, source, target in pairs]
    for batch in batches(lengths, batch_size, SCORED_TOKENS_PER_BATCH):
        indices, inputs, labels = zip(*(pairs[place] for place in batch), strict=True)
        found = backend.log_probabilities(list(inputs), list(labels))
        for index, target, log_probability in zip(indices, labels, found, strict=True):
            scores[index] = TargetScore(log_probability, len(target))
        tell(len(batch))
    return scores
