"""What is computed: sizes of models, batches of random sentences, and their numbers of operations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_vanilla_transformer.data.batching import TokenBudgetBatchSampler

Ints = NDArray[np.int64]

LONGEST = 250  # tokens of a sentence
TEST_SENTENCES = 1_000
FIRST_WORD = 2  # ids below are the end of sentence and the unknown word, as in Marian's vocabularies

TRAINING_FORMULA = (
    "model FLOPs of an update = 6 (M_S S + M_T T) + 12 d sum(N_e L_S^2 + N_d L_T^2 / 2 + N_d L_S L_T), with "
    "M_S = N_e (4 d^2 + 2 d f) + 2 N_d d^2, M_T = N_d (6 d^2 + 2 d f) + V d, for S source and T target tokens in "
    "sentences of L_S and L_T; utilisation = model FLOPs / seconds / peak"
)
DECODING_FORMULA = (
    "model FLOPs of a batch = 2 (M_S S + M_T R) + 4 d (N_e sum(L_S^2) + N_d sum(r (t + L_S))), with M_S and M_T as in "
    "training, R = all rows r of all steps t: a row for each sentence in the first step, one for each beam in the "
    "others; utilisation = model FLOPs / seconds / peak"
)


@dataclass(frozen=True)
class Size:
    """What fixes a model: post-norm, one matrix for all embeddings, biases everywhere.

    `is_opus_mt`: whether it has OPUS-MT's activation function, trained output bias and generation settings.
    """

    d_model: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    ffn_dim: int
    vocab_size: int
    is_opus_mt: bool = False

    @property
    def pad(self) -> int:
        """The padding, which targets start with too, is the last token, as in Marian's vocabularies."""
        return self.vocab_size - 1

    @property
    def source_matrices(self) -> int:
        """M_S: elements of the matrices that a source token is multiplied with."""
        d, f = self.d_model, self.ffn_dim
        return self.encoder_layers * (4 * d * d + 2 * d * f) + 2 * self.decoder_layers * d * d

    @property
    def target_matrices(self) -> int:
        """M_T: elements of the matrices that a target token is multiplied with."""
        d, f = self.d_model, self.ffn_dim
        return self.decoder_layers * (6 * d * d + 2 * d * f) + self.vocab_size * d


SIZES = {
    "tiny": Size(128, 4, 4, 4, 256, 5_000),
    "small": Size(256, 4, 4, 4, 1024, 10_000),
    "base": Size(512, 8, 6, 6, 2048, 37_000),
    "big": Size(1024, 16, 6, 6, 4096, 37_000),
    "opus": Size(512, 8, 6, 6, 2048, 58_101, is_opus_mt=True),
}


@dataclass(frozen=True)
class Lengths:
    """The lengths of `pairs` sentences: log-normal, with the correlation of the logarithms of both sides."""

    mean: float
    deviation: float
    correlation: float
    pairs: int

    def draw(self, seed: int) -> tuple[Ints, Ints]:
        """Draws the lengths of all sources and of their targets, (pairs) each."""
        variance = math.log(1 + (self.deviation / self.mean) ** 2)
        source, other = np.random.default_rng(seed).standard_normal((2, self.pairs))
        target = self.correlation * source + math.sqrt(1 - self.correlation**2) * other
        logarithms = math.log(self.mean) - variance / 2 + math.sqrt(variance) * np.stack([source, target])
        lengths = np.rint(np.exp(logarithms)).astype(np.int64).clip(2, LONGEST)
        return lengths[0], lengths[1]


LENGTHS = {"multi30k": Lengths(14, 5, 0.85, 29_000), "wmt": Lengths(27, 15, 0.9, 200_000)}


@dataclass(frozen=True)
class Batch:
    """Sentence pairs of random tokens: sources (B, S), padded with the last token, and targets (B, T), with -100."""

    source: Ints
    source_lengths: Ints
    target: Ints
    target_lengths: Ints

    @property
    def source_tokens(self) -> int:
        """Number of source tokens, padding aside."""
        return int(self.source_lengths.sum())

    @property
    def target_tokens(self) -> int:
        """Number of target tokens, padding aside."""
        return int(self.target_lengths.sum())

    @property
    def new_tokens(self) -> int:
        """Tokens of each translation in decoding: those of the longest target."""
        return self.target.shape[1]

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        """Returns what a collator would pass to a model."""
        places = np.arange(self.source.shape[1])
        arrays = {
            "input_ids": self.source,
            "attention_mask": (places < self.source_lengths[:, None]).astype(np.int64),
            "labels": self.target,
        }
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


@dataclass(frozen=True)
class Case:
    """Batches that are timed, one after the other, as `name`; `beams` of decoding, or 0: training."""

    name: str
    batches: tuple[Batch, ...]
    beams: int = 0

    @property
    def tokens(self) -> int:
        """Number of target tokens that are trained on or generated."""
        if self.beams:
            return sum(len(batch.source) * batch.new_tokens for batch in self.batches)
        return sum(batch.target_tokens for batch in self.batches)

    @property
    def padding(self) -> float:
        """Share of all positions that are padding."""
        sides = [side for batch in self.batches for side in ((batch.source, batch.source_lengths),)]
        if not self.beams:
            sides += [(batch.target, batch.target_lengths) for batch in self.batches]
        return 1 - sum(int(lengths.sum()) for _, lengths in sides) / sum(tokens.size for tokens, _ in sides)

    def flops(self, size: Size) -> float:
        """Model FLOPs by the printed formula."""
        if self.beams:
            return sum(
                decoding_flops(size, batch.source_lengths, self.beams, batch.new_tokens) for batch in self.batches
            )
        return sum(training_flops(size, batch.source_lengths, batch.target_lengths) for batch in self.batches)


def training_flops(size: Size, source_lengths: Ints, target_lengths: Ints) -> float:
    """TRAINING_FORMULA for one batch."""
    matrices = size.source_matrices * source_lengths.sum() + size.target_matrices * target_lengths.sum()
    source, target = source_lengths.astype(float), target_lengths.astype(float)
    own = size.encoder_layers * source @ source + size.decoder_layers * target @ target / 2
    return float(6 * matrices + 12 * size.d_model * (own + size.decoder_layers * source @ target))


def decoding_flops(size: Size, source_lengths: Ints, beams: int, new_tokens: int) -> float:
    """DECODING_FORMULA for one batch."""
    source, sentences = source_lengths.astype(float), len(source_lengths)
    rows = np.array([1] + [beams] * (new_tokens - 1))  # of each sentence in each step
    steps = np.arange(1, new_tokens + 1)
    matrices = size.source_matrices * source.sum() + size.target_matrices * sentences * rows.sum()
    looks = sentences * (rows @ steps) + rows.sum() * source.sum()
    return float(
        2 * matrices + 4 * size.d_model * (size.encoder_layers * source @ source + size.decoder_layers * looks)
    )


def training_batches(lengths: Lengths, size: Size, tokens: int, count: int, seed: int) -> tuple[Batch, ...]:
    """Makes batches of sentences of similar length with about `tokens` target tokens, in random order.

    Raises:
        BatchingError: A sentence is longer than `tokens`.
    """
    source, target = lengths.draw(seed)
    sampler = TokenBudgetBatchSampler(source, target, tokens, seed=seed)
    # The budget includes padding, so batches have fewer real tokens.
    budget = round(tokens * tokens * len(sampler) / target.sum())
    chosen = list(TokenBudgetBatchSampler(source, target, budget, seed=seed))[:count]
    return _batches(source, target, chosen, size, seed)


def random_batches(lengths: Lengths, size: Size, tokens: int, count: int, seed: int) -> tuple[Batch, ...]:
    """Makes batches of as many tokens, of random sentences: at Multi30k's lengths, about half of them is padding."""
    source, target = lengths.draw(seed)
    random, sentences = np.random.default_rng(seed), max(round(tokens / target.mean()), 1)
    chosen = [random.choice(len(source), size=sentences, replace=False) for _ in range(count)]
    return _batches(source, target, chosen, size, seed)


def decoding_batches(
    lengths: Lengths, size: Size, sentences: int, count: int, seed: int, new_tokens: int | None = None
) -> tuple[Batch, ...]:
    """Makes batches of consecutive sentences of a test set sorted by length, or with targets of `new_tokens` each."""
    source, target = (side[:TEST_SENTENCES] for side in lengths.draw(seed))
    if new_tokens is not None:
        target = np.full_like(target, new_tokens)
    order = np.argsort(source, kind="stable")
    starts = np.random.default_rng(seed).integers(0, len(order) - sentences + 1, size=count)
    return _batches(source, target, [order[start : start + sentences] for start in starts], size, seed)


def _batches(source: Ints, target: Ints, places: Sequence[Any], size: Size, seed: int) -> tuple[Batch, ...]:
    random = np.random.default_rng(seed)
    return tuple(_batch(source[some], target[some], size, random) for some in map(np.array, places))


def _batch(source_lengths: Ints, target_lengths: Ints, size: Size, random: np.random.Generator) -> Batch:
    def sentences(lengths: Ints, padding: int) -> Ints:
        shape = (len(lengths), int(lengths.max()))
        tokens = random.integers(FIRST_WORD, size.pad, size=shape)
        return np.where(np.arange(shape[1]) < lengths[:, None], tokens, padding)

    source, target = sentences(source_lengths, size.pad), sentences(target_lengths, -100)
    return Batch(source, source_lengths, target, target_lengths)


def synchronize(device: str) -> None:
    """Waits until the device has computed everything."""
    if device == "cuda":
        torch.cuda.synchronize()
