"""The work of a benchmark: sizes of models, batches of random sentences, and their numbers of operations."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.benchmark import Timer

from hf_vanilla_transformer.data.batching import TokenBudgetBatchSampler
from hf_vanilla_transformer.engine import torch_private

Ints = NDArray[np.int64]

SEED = 0
MEAN, DEVIATION, CORRELATION, LONGEST, PAIRS = 14, 5, 0.85, 250, 29_000  # of the lengths of sentences, as Multi30k's
TEST_SENTENCES = 1_000
FIRST_WORD = 2  # ids below are the end of sentence and the unknown word, as in Marian's vocabularies
PEAK_SIDES = {"cpu": (1024, 2048), "cuda": (4096, 8192, 16384)}

TRAINING_FORMULA = (
    "model FLOPs of an update = 6 (M_S S + M_T T) + 12 d sum(N_e L_S^2 + N_d L_T^2 / 2 + N_d L_S L_T), with "
    "M_S = N_e (4 d^2 + 2 d f) + 2 N_d d^2, M_T = N_d (6 d^2 + 2 d f) + V d, for S source and T target tokens in "
    "sentences of L_S and L_T; utilisation = model FLOPs / seconds / peak"
)


@dataclass(frozen=True)
class Size:
    """The sizes of a model: post-norm, one matrix for all embeddings, biases everywhere.

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
        """The last token, as in Marian's vocabularies; targets start with it, too."""
        return self.vocab_size - 1


SIZES = {
    "tiny": Size(128, 4, 4, 4, 256, 5_000),
    "small": Size(256, 4, 4, 4, 1024, 10_000),
    "base": Size(512, 8, 6, 6, 2048, 37_000),
    "big": Size(1024, 16, 6, 6, 4096, 37_000),
    "opus": Size(512, 8, 6, 6, 2048, 58_101, is_opus_mt=True),
}


def draw_lengths() -> tuple[Ints, Ints]:
    """Draws the lengths of sources and of their targets, (PAIRS) each: log-normal, with correlated logarithms."""
    variance = math.log(1 + (DEVIATION / MEAN) ** 2)
    source, other = np.random.default_rng(SEED).standard_normal((2, PAIRS))
    target = CORRELATION * source + math.sqrt(1 - CORRELATION**2) * other
    logarithms = math.log(MEAN) - variance / 2 + math.sqrt(variance) * np.stack([source, target])
    lengths = np.rint(np.exp(logarithms)).astype(np.int64).clip(2, LONGEST)
    return lengths[0], lengths[1]


@dataclass(frozen=True)
class SentencePairs:
    """Sentence pairs of random token ids; targets are for training."""

    sources: list[list[int]]
    targets: list[list[int]]

    def tensors(self, size: Size, device: str) -> dict[str, Tensor]:
        """Returns what a collator would pass to a model."""
        source, labels = (
            pad_sequence([torch.tensor(ids) for ids in side], batch_first=True, padding_value=padding).to(device)
            for side, padding in ((self.sources, size.pad), (self.targets, -100))
        )
        return {"input_ids": source, "attention_mask": (source != size.pad).long(), "labels": labels}


@dataclass(frozen=True)
class Case:
    """Batches that are timed, one after the other, as `name`: `beams` and `new_tokens` of decoding, or of training."""

    name: str
    batches: tuple[SentencePairs, ...]
    beams: int = 0
    new_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Number of target tokens that are trained on or generated."""
        if self.beams:
            return sum(len(batch.sources) for batch in self.batches) * self.new_tokens
        return sum(len(ids) for batch in self.batches for ids in batch.targets)

    @property
    def padding(self) -> float:
        """Share of all positions that are padding."""
        sides = [side for one in self.batches for side in ([one.sources] if self.beams else [one.sources, one.targets])]
        positions = sum(len(side) * max(map(len, side)) for side in sides)
        return 1 - sum(len(ids) for side in sides for ids in side) / positions

    def training_flops(self, size: Size) -> float:
        """Model FLOPs by TRAINING_FORMULA."""
        d, f, encoder, decoder = size.d_model, size.ffn_dim, size.encoder_layers, size.decoder_layers
        source, target = (
            np.array([len(ids) for one in self.batches for ids in getattr(one, side)], dtype=float)
            for side in ("sources", "targets")
        )
        of_source = encoder * (4 * d * d + 2 * d * f) + 2 * decoder * d * d
        of_target = decoder * (6 * d * d + 2 * d * f) + size.vocab_size * d
        attention = encoder * source @ source + decoder * target @ target / 2 + decoder * source @ target
        return float(6 * (of_source * source.sum() + of_target * target.sum()) + 12 * d * attention)


def training_batches(size: Size, tokens: int, count: int) -> tuple[SentencePairs, ...]:
    """Makes batches of sentences of similar length with about `tokens` target tokens, in random order.

    Raises:
        BatchingError: A sentence is longer than `tokens`.
    """
    source, target = draw_lengths()
    sampler = TokenBudgetBatchSampler(source, target, tokens, seed=SEED)
    # The budget includes padding, so batches have fewer real tokens.
    budget = round(tokens * tokens * len(sampler) / target.sum())
    chosen = list(TokenBudgetBatchSampler(source, target, budget, seed=SEED))[:count]
    return _batches(source, target, chosen, size)


def decoding_batches(size: Size, sentences: int, count: int) -> tuple[SentencePairs, ...]:
    """Makes batches of consecutive sentences of a test set sorted by length."""
    source, target = (side[:TEST_SENTENCES] for side in draw_lengths())
    order = np.argsort(source, kind="stable")
    starts = np.random.default_rng(SEED).integers(0, len(order) - sentences + 1, size=count)
    return _batches(source, target, [order[start : start + sentences] for start in starts], size)


def _batches(source: Ints, target: Ints, places: Iterable[Ints | list[int]], size: Size) -> tuple[SentencePairs, ...]:
    random = np.random.default_rng(SEED)

    def sentences(lengths: Ints) -> list[list[int]]:
        return [random.integers(FIRST_WORD, size.pad, size=length).tolist() for length in lengths]

    return tuple(SentencePairs(sentences(source[some]), sentences(target[some])) for some in places)


def synchronize(device: str) -> None:
    """Waits until the device has computed everything."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure_peak(device: str, dtype: torch.dtype) -> tuple[float, str]:
    """Returns the most FLOP/s that this machine reaches in products of large square matrices, and which these were."""
    products: list[Callable[[Tensor, Tensor], Tensor]] = [torch.mm]
    if device == "cpu" and dtype == torch.float32 and (operators := torch_private.onednn_linear()):
        onednn = operators[0].default
        products.append(lambda a, b: onednn(a, b, None, "none", [], ""))
    found = []
    for side in PEAK_SIDES[device]:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in "ab")
        for product in products:
            names = {"product": product, "a": a, "b": b}
            timer = Timer("product(a, b)", globals=names, num_threads=torch.get_num_threads())
            found.append((2 * side**3 / min(timer.timeit(1).median for _ in range(10)), side))
    flops, side = max(found)
    return flops, f"the best product of {side} x {side} matrices in {str(dtype).removeprefix('torch.')}"
