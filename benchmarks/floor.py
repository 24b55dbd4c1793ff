"""The matmul floor: only the matrix products of the same work, on real tokens, called one by one from Python.

The products are as large as possible: queries, keys and values are one product, the cross keys and values of all layers
another. In attention, all sentences of a batch have the same length, chosen so that the number of operations is right.
Who computes with fewer bits, or calls products with less overhead than torch, can be faster than the floor.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vanilla_transformer.engine import torch_private
from hf_vanilla_transformer.engine.cpu import CPU

from .work import Batch, Case, Size, synchronize
from .workers import Facts, Timing

Call = Callable[[], Tensor]
Multiply = Callable[[Tensor, Tensor, Tensor], Call]  # two matrices and a buffer -> the call that multiplies them


class Multiplier(NamedTuple):
    """One implementation of products of large matrices."""

    multiply: Multiply  # x (N, in) and W (out, in) -> x W^T
    multiply_gradient: Multiply  # g (N, out) and x (N, in) -> g^T x
    prepare: Callable[[Tensor], Tensor]  # makes of W, once, what a step of decoding multiplies by
    map: Callable[[Tensor, Tensor], Call]  # x and that -> x W^T


@dataclass(frozen=True)
class Product:
    """(rows, inner) times `count` different matrices of (inner, outer); `name` tells them from others."""

    name: str
    rows: int
    inner: int
    outer: int
    count: int

    @property
    def flops(self) -> int:
        """Operations of all of them, in the forward pass."""
        return 2 * self.rows * self.inner * self.outer * self.count


@dataclass(frozen=True)
class Attention:
    """Scores and weighted sums of `groups` heads of sentences, `count` times."""

    groups: int
    queries: int
    keys: int
    width: int
    count: int

    @property
    def flops(self) -> int:
        """Operations of all of them, in the forward pass."""
        return 4 * self.groups * self.queries * self.keys * self.width * self.count


Part = Product | Attention


def source_parts(size: Size, batch: Batch) -> list[Part]:
    """Products of the encoder, the decoder's keys and values of its output, and the encoder's attention."""
    d, f, layers = size.d_model, size.ffn_dim, size.encoder_layers
    shapes = [(d, 3 * d, layers), (d, d, layers), (d, f, layers), (f, d, layers), (d, 2 * size.decoder_layers * d, 1)]
    products = [Product(f"source {number}", batch.source_tokens, *shape) for number, shape in enumerate(shapes)]
    length = _typical(batch.source_lengths)
    return [*products, Attention(len(batch.source) * size.heads, length, length, d // size.heads, layers)]


def target_products(size: Size, tokens: int) -> list[Product]:
    """Products of the decoder, and last the projection to the vocabulary."""
    d, f, layers = size.d_model, size.ffn_dim, size.decoder_layers
    shapes = [(d, 3 * d, layers), (d, d, 3 * layers), (d, f, layers), (f, d, layers), (d, size.vocab_size, 1)]
    return [Product(f"target {number}", tokens, *shape) for number, shape in enumerate(shapes)]


def training_parts(size: Size, batch: Batch) -> list[Part]:
    """The forward pass of an update: attention is to sentences of the root mean square length."""
    groups, width = len(batch.source) * size.heads, size.d_model // size.heads
    source, target = _typical(batch.source_lengths), _typical(batch.target_lengths)
    looks = [Attention(groups, target, keys, width, size.decoder_layers) for keys in (target, source)]
    return [*source_parts(size, batch), *looks, *target_products(size, batch.target_tokens)]


def decoding_parts(size: Size, batch: Batch, beams: int) -> Iterator[Part]:
    """Yields the encoder's parts, and those of each step, in which a sentence's beams share the source.

    In the first step, a sentence has one row for all of its beams.
    """
    yield from source_parts(size, batch)
    sentences, width, layers = len(batch.source), size.d_model // size.heads, size.decoder_layers
    source = max(round(float(batch.source_lengths.mean())), 1)
    for step in range(1, batch.new_tokens + 1):
        rows = sentences * (1 if step == 1 else beams)
        yield from target_products(size, rows)
        yield Attention(rows * size.heads, 1, step, width, layers)
        yield Attention(sentences * size.heads, rows // sentences, source, width, layers)


def _typical(lengths: np.ndarray) -> int:
    return max(round(math.sqrt((lengths.astype(float) ** 2).mean())), 1)


class Floor:
    """Products by several implementations, of which the first run of a case selects the fastest for each product.

    An update has two products of the same size backward for each one forward; a step of decoding has packed weights.
    """

    def __init__(self, size: Size, cases: tuple[Case, ...], device: str, dtype: torch.dtype) -> None:
        self.size, self.cases, self.device, self.dtype = size, {case.name: case for case in cases}, device, dtype
        self.kinds = products_of(device, dtype)
        self.buffer = cache(self._buffer)
        self.prepared = cache(self._prepared)
        self.fastest: dict[str, list[Call]] = {}

    def facts(self, case: str = "") -> Facts:
        """Describes how it multiplies."""
        return Facts(note=f"matrix products alone, each by the fastest of {' and '.join(self.kinds)}")

    def flops(self, batch: Batch, beams: int = 0) -> int:
        """Operations of an update, three times those of its forward pass, or of the translation of a batch."""
        if beams:
            return sum(part.flops for part in decoding_parts(self.size, batch, beams))
        return 3 * sum(part.flops for part in training_parts(self.size, batch))

    @torch.inference_mode()
    def run(self, case: str) -> Timing:
        """Times all batches of a case."""
        if case not in self.fastest:
            self.fastest[case] = self._find_fastest(self.cases[case])
        return Timing(_time(self.fastest[case], self.device))

    def _find_fastest(self, case: Case) -> list[Call]:
        kinds = [[call for batch in case.batches for call in self.calls(batch, case, kind)] for kind in self.kinds]
        if len(kinds) == 1:
            return kinds[0]
        # Time each product by each implementation, three times in turns.
        turns = [[[_time([call], self.device) for call in calls] for calls in kinds] for _ in range(3)]
        seconds = [list(map(min, zip(*of_kind, strict=True))) for of_kind in zip(*turns, strict=True)]
        choices = zip(zip(*kinds, strict=True), zip(*seconds, strict=True), strict=True)
        return [calls[times.index(min(times))] for calls, times in choices]

    def calls(self, batch: Batch, case: Case, kind: str) -> list[Call]:
        """Returns the calls of all products of a batch, by one implementation."""
        if case.beams:
            parts = decoding_parts(self.size, batch, case.beams)
            return [call for part in parts for call in self._decoding_calls(part, kind)]
        forwards: list[Call] = []
        backwards: list[Call] = []
        *parts, projection = training_parts(self.size, batch)
        for part in parts:
            if isinstance(part, Attention):
                forwards += self._attention_calls(part)
            else:
                self._add_training_calls(part, self.kinds[kind], forwards, backwards)
        assert isinstance(projection, Product)
        return [*forwards, *self._projection_calls(self.kinds[kind], projection), *reversed(backwards)]

    def _buffer(self, role: str, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device).mul_(0.05)

    def _prepared(self, kind: str, name: str, *shape: int) -> Tensor:
        return self.kinds[kind].prepare(self.buffer(name, *shape))

    def _decoding_calls(self, part: Part, kind: str) -> list[Call]:
        if isinstance(part, Product):
            x, names = self.buffer("x", part.rows, part.inner), [f"{part.name} {i}" for i in range(part.count)]
            weights = [self.prepared(kind, name, part.outer, part.inner) for name in names]
            return [self.kinds[kind].map(x, weight) for weight in weights]
        room = 1 << (part.keys - 1).bit_length()  # so that steps share their caches
        query = self.buffer("q", part.groups, part.queries, part.width)
        keys = self.buffer("k", part.groups, part.width, room)[:, :, : part.keys]
        scores = self.buffer("s", part.groups, part.queries, part.keys)
        values = self.buffer("v", part.groups, room, part.width)[:, : part.keys]
        return [partial(torch.bmm, query, keys), partial(torch.bmm, scores, values)] * part.count

    def _add_training_calls(
        self, part: Product, multiplier: Multiplier, forwards: list[Call], backwards: list[Call]
    ) -> None:
        x, of_x = (self.buffer(role, part.rows, part.inner) for role in ("x", "dx"))
        y = self.buffer("y", part.rows, part.outer)
        for number in range(part.count):  # every product has its own matrix, with its gradient
            weight, of_weight = (self.buffer(f"{part.name} {number}{d}", part.outer, part.inner) for d in ("", " d"))
            forwards.append(multiplier.multiply(x, weight, y))
            backwards.append(multiplier.multiply_gradient(y, x, of_weight))
            backwards.append(multiplier.multiply(y, weight.t(), of_x))

    def _projection_calls(self, multiplier: Multiplier, part: Product) -> Iterator[Call]:
        """Calls of the logits, forward and backward; on a CPU in chunks, as the training loss computes them."""
        step = max(CPU.logits_per_chunk // part.outer, CPU.rows_per_chunk) if self.device == "cpu" else part.rows
        x, of_x = (self.buffer(role, part.rows, part.inner) for role in ("x", "dx"))
        table, of_table = (self.buffer(role, part.outer, part.inner) for role in ("table", "dtable"))
        logits = self.buffer("logits", min(step, part.rows), part.outer)
        for start in range(0, part.rows, step):
            rows = slice(start, start + step)
            y = logits[: len(x[rows])]
            yield multiplier.multiply(x[rows], table, y)
            yield multiplier.multiply(y, table.t(), of_x[rows])
            yield multiplier.multiply_gradient(y, x[rows], of_table)

    def _attention_calls(self, part: Attention) -> list[Call]:
        queries, keys = (part.groups, part.queries, part.width), (part.groups, part.keys, part.width)
        q, o, of_q = (self.buffer(role, *queries) for role in ("q", "o", "dq"))
        k, v, of_k, of_v = (self.buffer(role, *keys) for role in ("k", "v", "dk", "dv"))
        s, of_s = (self.buffer(role, part.groups, part.queries, part.keys) for role in ("s", "ds"))
        calls = [(q, k.transpose(1, 2), s), (s, v, o), (s.transpose(1, 2), o, of_v)]
        calls += [(o, v.transpose(1, 2), of_s), (of_s, k, of_q), (of_s.transpose(1, 2), q, of_k)]
        return [partial(torch.bmm, left, right, out=out) for left, right, out in calls] * part.count


def products_of(device: str, dtype: torch.dtype) -> dict[str, Multiplier]:
    """Implementations of products of large matrices on this machine: name -> implementation."""
    kinds = {
        "torch's products": Multiplier(
            lambda x, weight, out: partial(torch.mm, x, weight.t(), out=out),
            lambda gradient, x, out: partial(torch.mm, gradient.t(), x, out=out),
            lambda weight: weight,
            lambda x, weight: partial(F.linear, x, weight),
        )
    }
    has_onednn = torch.backends.mkldnn.enabled and torch_private.has_onednn()
    if device == "cpu" and dtype == torch.float32 and has_onednn:
        kinds["oneDNN's products, of packed weights in decoding"] = Multiplier(
            _by_onednn, _gradient_by_onednn, torch_private.onednn_weight(), _by_onednn
        )
    return kinds


def _by_onednn(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Call:  # which has no use for room of ours
    return partial(torch_private.onednn_linear().default, x, weight, None, "none", [], "")


def _gradient_by_onednn(gradient: Tensor, x: Tensor, out: Tensor) -> Call:
    if len(out) <= out.shape[1]:
        return _by_onednn(gradient.t(), x.t())
    return _by_onednn(x.t(), gradient.t())  # transposed: faster with the narrower one first


def _time(calls: list[Call], device: str) -> float:
    synchronize(device)
    began = time.perf_counter()
    for call in calls:
        call()
    synchronize(device)
    return time.perf_counter() - began
