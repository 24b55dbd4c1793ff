"""Forced decoding: how probable a model finds given translations."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .decoding import OtherModel, batches, check_model, no_gradients, source_limit, texts_of
from .limits import check_limit
from .pieces import tokenize
from .sources import encoder

logger = logging.get_logger(__name__)

# Padded tokens of a batch, which has a row of the vocabulary's width for each target token at once.
SCORED_TOKENS_PER_BATCH = 2_048


@dataclass(frozen=True)
class Likelihood:
    """How probable a model finds given translations.

    Attributes:
        negative_log_probability: Of all target tokens together, in nats: plain cross-entropy, without label smoothing.
        num_tokens: Target tokens, each sentence's `</s>` included.
        num_left_out: Pairs that are too long and not counted.
    """

    negative_log_probability: float
    num_tokens: int
    num_left_out: int = 0

    @property
    def perplexity(self) -> float:
        """Perplexity per token, as in Table 3 (there per word-piece); of other tokens it can't be compared."""
        try:
            return math.exp(self.negative_log_probability / self.num_tokens)
        except OverflowError:
            return math.inf


class TargetScore(NamedTuple):
    """How probable a model finds one given translation.

    Attributes:
        log_probability: Of all its tokens together, in nats.
        num_tokens: Its tokens, `</s>` included.
    """

    log_probability: float
    num_tokens: int


def score_targets(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Iterable[str],
    targets: Iterable[str],
    **options: Any,
) -> Likelihood:
    """Forces the model to write given targets and sums up how improbable it finds them.

    Args:
        model: As for `score_pairs`, like all others.
        tokenizer: Its tokenizer.
        sources: The sentences.
        targets: Their translations.
        **options: `batch_size`, `max_tokens`, `progress`, `on_omission`.

    Returns:
        Log-probability and number of target tokens, hence perplexity, and the number of pairs left out.

    Raises:
        TypeError: As for `score_pairs`.
        ValueError: As for `score_pairs`.
    """
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
) -> list[TargetScore | None]:
    """Forces the model to write given targets, and tells how probable it finds each.

    Args:
        model: A model, or what `ensemble` made of several.
        tokenizer: Its tokenizer.
        sources: The sentences; an empty one is a source of `</s>` alone.
        targets: Their translations, in the same order; an empty one is `</s>` alone.
        batch_size: Sentences at a time at most; fewer where they are long.
        max_tokens: Tokens of a source and of a target at most, as `max_source_tokens` of `translate`. Pairs that have
            more are left out.
        progress: Called with the number of sentences done since its last call.
        on_omission: Called with the index of each pair that is left out; None: a warning is logged.

    Returns:
        The score of each pair, in their order; None: it is left out.

    Raises:
        TypeError: `sources` or `targets` is one string, a set, a dictionary or nothing, or has what is not a string.
        ValueError: They aren't equally many, there is none, all are left out, `batch_size` or `max_tokens` is beyond
            its limit, or the model is in training mode.
    """
    texts, references = texts_of("sources", sources), texts_of("targets", targets)
    check_model(model)
    check_limit("batch_size", batch_size)
    check_limit("max_tokens", max_tokens)
    if len(texts) != len(references):
        raise ValueError(f"{len(texts)} sources but {len(references)} targets; give one target for each source")
    if not texts:
        raise ValueError("sources and targets are empty; a likelihood needs at least one sentence")
    pairs = _pairs(tokenizer, texts, references, source_limit(model, max_tokens, tokenizer), on_omission)
    scores: list[TargetScore | None] = [None] * len(texts)
    if progress is not None and len(pairs) < len(texts):
        progress(len(texts) - len(pairs))
    indices = list(pairs)
    for batch in batches([max(map(len, pair)) for pair in pairs.values()], batch_size, SCORED_TOKENS_PER_BATCH):
        chosen = [indices[i] for i in batch]
        inputs, labels = ([pairs[index][side] for index in chosen] for side in (0, 1))
        for index, target, log_probability in zip(
            chosen, labels, _log_probabilities(model, tokenizer, inputs, labels), strict=True
        ):
            scores[index] = TargetScore(log_probability, len(target))
        if progress is not None:
            progress(len(batch))
    return scores


def _pairs(
    tokenizer: PreTrainedTokenizerBase,
    sources: list[str],
    targets: list[str],
    limit: int,
    on_omission: Callable[[int], object] | None,
) -> dict[int, tuple[list[int], list[int]]]:
    """Tokenizes pairs, by their indices, and leaves out those of which one side has more than `limit` tokens."""
    source_ids = tokenize(encoder(tokenizer), sources, limit)
    target_ids = tokenize(lambda some: tokenizer(text_target=some)["input_ids"], targets, limit)
    pairs = {}
    for index, (source, target) in enumerate(zip(source_ids, target_ids, strict=True)):
        if source is not None and target is not None:
            pairs[index] = source, target
        elif on_omission is not None:
            on_omission(index)
        else:
            logger.warning(f"Pair {index} is left out: its source or its target has more than {limit:,} tokens.")
    if not pairs:
        raise ValueError(
            f"every pair has a side of more than {limit:,} tokens, so there is nothing to score; give a sentence per "
            "line, or raise the limit"
        )
    return pairs


def _log_probabilities(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sources: list[list[int]], targets: list[list[int]]
) -> list[float]:
    if isinstance(model, OtherModel):
        return model.log_probabilities(sources, targets)
    inputs = tokenizer.pad({"input_ids": sources}, return_tensors="pt").to(model.device)
    rows = [torch.tensor(ids) for ids in targets]
    labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100).to(model.device)  # (B, T)
    with no_gradients(model):
        logits = model(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels),
            use_cache=False,
        ).logits  # (B, T, V)
        losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="none")
    return (-losses.double().view(labels.shape).sum(dim=1)).tolist()
