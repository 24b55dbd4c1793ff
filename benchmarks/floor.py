"""The matmul floor: only the matrix products of the same work, on real tokens, called one by one from Python.

The products are as large as possible: queries, keys and values are one product, the cross keys and values of all layers
another. In attention, all sentences of a batch have the same length, chosen so that the number of operations is right.
Who computes with fewer bits, or calls products with less overhead than torch, can be faster than the floor.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vanilla_transformer.engine.cpu import CPU

from .work import Batch, Case, Size
from .workers import Facts, Timing, synchronize

Call = Callable[[], Tensor]
Linear = Callable[[Tensor], Call]  # input -> the call that multiplies it by a matrix
Multiply = Callable[[Tensor, Tensor, Tensor], Call]  # two matrices and a buffer -> the call that multiplies them


class Multiplier(NamedTuple):
    """One implementation of products of large matrices.

    Attributes:
        multiply: x (N, in) and W (out, in) -> x W^T.
        multiply_gradient: g (N, out) and x (N, in) -> g^T x.
    """

    multiply: Multiply
    multiply_gradient: Multiply


@dataclass(frozen=True)
class Product:
    """(rows, inner) times `count` different matrices of (inner, outer)."""

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


def source_products(size: Size, tokens: int) -> list[Product]:
    """Products of the encoder, then of the decoder's keys and values of its output."""
    d, f, layers = size.d_model, size.ffn_dim, size.encoder_layers
    shapes = [(d, 3 * d, layers), (d, d, layers), (d, f, layers), (f, d, layers), (d, 2 * size.decoder_layers * d, 1)]
    return [Product(tokens, *shape) for shape in shapes]


def target_products(size: Size, tokens: int) -> list[Product]:
    """Products of the decoder, and last the projection to the vocabulary."""
    d, f, layers = size.d_model, size.ffn_dim, size.decoder_layers
    shapes = [(d, 3 * d, layers), (d, d, 3 * layers), (d, f, layers), (f, d, layers), (d, size.vocab_size, 1)]
    return [Product(tokens, *shape) for shape in shapes]


def training_attentions(size: Size, batch: Batch) -> list[Attention]:
    """Attention of encoder, decoder and cross-attention, for sentences of the root mean square length."""
    groups, width = len(batch.source) * size.heads, size.d_model // size.heads
    source, target = _typical(batch.source_lengths), _typical(batch.target_lengths)
    shapes = [(source, source, size.encoder_layers), (target, target, size.decoder_layers)]
    shapes += [(target, source, size.decoder_layers)]
    return [Attention(groups, queries, keys, width, count) for queries, keys, count in shapes]


def _typical(lengths: np.ndarray) -> int:
    return max(round(math.sqrt((lengths.astype(float) ** 2).mean())), 1)


class _Floor:
    """Products by several implementations, of which the first run of a case selects the fastest for each product.

    Args:
        cases: What can be run.
        device: "cpu" or "cuda".
        kinds: Names of the implementations.
    """

    def __init__(self, cases: tuple[Case, ...], device: str, kinds: Iterable[str]) -> None:
        self.cases, self.device, self.kind_names = {case.name: case for case in cases}, device, tuple(kinds)
        self.fastest: dict[str, list[Call]] = {}

    def facts(self, case: str = "") -> Facts:
        """Describes how it multiplies."""
        return Facts(note=f"matrix products alone, each by the fastest of {' and '.join(self.kind_names)}")

    @torch.inference_mode()
    def run(self, case: str) -> Timing:
        """Times all batches of a case."""
        if case not in self.fastest:
            self.fastest[case] = self._find_fastest(self.cases[case])
        return Timing(_time(self.fastest[case], self.device), self.cases[case].tokens)

    def _find_fastest(self, case: Case) -> list[Call]:
        kinds = [
            [call for batch in case.batches for call in self._calls(batch, case, kind)] for kind in self.kind_names
        ]
        if len(kinds) == 1:
            return kinds[0]
        # Time each product by each implementation, three times in turns.
        turns = [[[_time([call], self.device) for call in calls] for calls in kinds] for _ in range(3)]
        seconds = [list(map(min, zip(*of_kind, strict=True))) for of_kind in zip(*turns, strict=True)]
        choices = zip(zip(*kinds, strict=True), zip(*seconds, strict=True), strict=True)
        return [calls[times.index(min(times))] for calls, times in choices]

    def _calls(self, batch: Batch, case: Case, kind: str) -> Iterable[Call]:
        """Yields the calls of all products of a batch."""
        raise NotImplementedError


class TrainingFloor(_Floor):
    """Each product forward, and two of the same size backward: by `torch.mm` into buffers, or by oneDNN.

    Args:
        size: Of the model.
        cases: What can be run.
        device: "cpu" or "cuda".
        dtype: Of all matrices.
    """

    def __init__(self, size: Size, cases: tuple[Case, ...], device: str, dtype: torch.dtype) -> None:
        self.size, self.dtype, self.kinds = size, dtype, products_of(device, dtype)
        super().__init__(cases, device, self.kinds)
        batches = [batch for case in cases for batch in case.batches]
        self.most = max(max(batch.source_tokens, batch.target_tokens) for batch in batches)
        self.buffer = cache(self._buffer)
        # Every product has its own matrix, with its gradient.
        self.matrices = [
            [tuple(self._buffer(role, product.outer, product.inner) for role in "WG") for _ in range(product.count)]
            for product in self._products(1, 1)
        ]

    def flops(self, batch: Batch) -> int:
        """Operations of an update: three times those of the forward pass."""
        products = self._products(batch.source_tokens, batch.target_tokens)
        return 3 * sum(part.flops for part in (*products, *training_attentions(self.size, batch)))

    def _products(self, source_tokens: int, target_tokens: int) -> list[Product]:
        return source_products(self.size, source_tokens) + target_products(self.size, target_tokens)

    def _buffer(self, role: str, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device).mul_(0.05)

    def _rows(self, role: str, rows: int, width: int) -> Tensor:
        return self.buffer(role, self.most, width)[:rows]

    def _calls(self, batch: Batch, case: Case, kind: str) -> list[Call]:
        multiplier = self.kinds[kind]
        products = self._products(batch.source_tokens, batch.target_tokens)
        forwards: list[Call] = []
        backwards: list[Call] = []
        *pairs, (projection, ((table, of_table),)) = zip(products, self.matrices, strict=True)
        for product, matrices in pairs:
            x, of_x = (self._rows(role, product.rows, product.inner) for role in ("x", "dx"))
            y = self._rows("y", product.rows, product.outer)
            for weight, of_weight in matrices:
                forwards.append(multiplier.multiply(x, weight, y))
                backwards.append(multiplier.multiply_gradient(y, x, of_weight))
                backwards.append(multiplier.multiply(y, weight.t(), of_x))
        for part in training_attentions(self.size, batch):
            forwards += self._attention_calls(part)
        return [*forwards, *self._projection_calls(multiplier, projection, table, of_table), *reversed(backwards)]

    def _projection_calls(
        self, multiplier: Multiplier, product: Product, table: Tensor, of_table: Tensor
    ) -> Iterator[Call]:
        """Calls of the logits, forward and backward; on a CPU in chunks, as the training loss computes them."""
        step = max(CPU.logits_per_chunk // product.outer, CPU.rows_per_chunk) if self.device == "cpu" else product.rows
        x, of_x = (self._rows(role, product.rows, product.inner) for role in ("x", "dx"))
        logits = self.buffer("logits", min(step, product.rows), product.outer)
        for start in range(0, product.rows, step):
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


def step_rows(sentences: int, beams: int, new_tokens: int) -> Iterator[tuple[int, int]]:
    """Yields (step from 1, rows); in the first step, a sentence has one row for all of its beams."""
    for step in range(1, new_tokens + 1):
        yield step, sentences * (1 if step == 1 else beams)


def step_attentions(size: Size, batch: Batch, step: int, rows: int) -> list[Attention]:
    """Attention in one step: to the translation so far, and to the source, which a sentence's beams share."""
    sentences, width, layers = len(batch.source), size.d_model // size.heads, size.decoder_layers
    source = max(round(float(batch.source_lengths.mean())), 1)
    return [
        Attention(rows * size.heads, 1, step, width, layers),
        Attention(sentences * size.heads, rows // sentences, source, width, layers),
    ]


def encoder_attention(size: Size, batch: Batch) -> Attention:
    """Attention of the encoder."""
    length, width = _typical(batch.source_lengths), size.d_model // size.heads
    return Attention(len(batch.source) * size.heads, length, length, width, size.encoder_layers)


class DecodingFloor(_Floor):
    """Encoder, cross keys and values once per sentence, and each step: by `F.linear`, or with packed weights.

    Args:
        size: Of the model.
        cases: What can be run.
        device: "cpu" or "cuda".
        dtype: Of all matrices.
    """

    def __init__(self, size: Size, cases: tuple[Case, ...], device: str, dtype: torch.dtype) -> None:
        self.size, self.device, self.dtype = size, device, dtype
        self.input = cache(self._input)
        self.linears = {"F.linear": self._linears(_plain)}
        if device == "cpu" and dtype == torch.float32 and _has_packed_products():
            self.linears["oneDNN-packed products"] = self._linears(_packed)
        super().__init__(cases, device, self.linears)

    def flops(self, batch: Batch, beams: int, new_tokens: int) -> int:
        """Operations of the translation of a batch."""
        parts: list[Product | Attention] = [*source_products(self.size, batch.source_tokens)]
        parts.append(encoder_attention(self.size, batch))
        for step, rows in step_rows(len(batch.source), beams, new_tokens):
            parts += target_products(self.size, rows)
            parts += step_attentions(self.size, batch, step, rows)
        return sum(part.flops for part in parts)

    def _linears(self, kind: Callable[[Tensor], Linear]) -> dict[str, list[Linear]]:
        """All linear maps, in the order of their use."""
        parts = {"source": source_products(self.size, 1), "target": target_products(self.size, 1)}
        return {
            side: [
                kind(self._input(product.outer, product.inner)) for product in products for _ in range(product.count)
            ]
            for side, products in parts.items()
        }

    def _input(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device).mul_(0.05)

    def _calls(self, batch: Batch, case: Case, kind: str) -> Iterator[Call]:
        linears = self.linears[kind]
        yield from self._product_calls(linears["source"], source_products(self.size, batch.source_tokens))
        yield from self._attention_calls(encoder_attention(self.size, batch))
        for step, rows in step_rows(len(batch.source), case.beams, batch.new_tokens):
            yield from self._product_calls(linears["target"], target_products(self.size, rows))
            for attention in step_attentions(self.size, batch, step, rows):
                yield from self._attention_calls(attention)

    def _product_calls(self, linears: list[Linear], products: list[Product]) -> Iterator[Call]:
        inputs = [self.input(product.rows, product.inner) for product in products for _ in range(product.count)]
        return (linear(x) for linear, x in zip(linears, inputs, strict=True))

    def _attention_calls(self, part: Attention) -> list[Call]:
        room = 1 << (part.keys - 1).bit_length()  # so that steps share their caches
        query = self.input(part.groups, part.queries, part.width)
        keys = self.input(part.groups, part.width, room)[:, :, : part.keys]
        scores = self.input(part.groups, part.queries, part.keys)
        values = self.input(part.groups, room, part.width)[:, : part.keys]
        return [partial(torch.bmm, query, keys), partial(torch.bmm, scores, values)] * part.count


def _plain(weight: Tensor) -> Linear:
    return lambda x: partial(F.linear, x, weight)


def _has_packed_products() -> bool:
    operators = torch.ops.mkldnn
    return torch._C._get_mkldnn_enabled() and all(
        hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )


def _packed(weight: Tensor) -> Linear:
    packed, linear = torch.ops.mkldnn._reorder_linear_weight(weight), torch.ops.mkldnn._linear_pointwise.default
    return lambda x: partial(linear, x, packed, None, "none", [], "")


def products_of(device: str, dtype: torch.dtype) -> dict[str, Multiplier]:
    """Implementations of products of large matrices on this machine: name -> implementation."""
    kinds = {"torch.mm": Multiplier(_by_mm, _gradient_by_mm)}
    if device == "cpu" and dtype == torch.float32 and _has_packed_products():
        kinds["oneDNN's products"] = Multiplier(_by_onednn, _gradient_by_onednn)
    return kinds


def _by_mm(x: Tensor, weight: Tensor, out: Tensor) -> Call:
    return partial(torch.mm, x, weight.t(), out=out)


def _gradient_by_mm(gradient: Tensor, x: Tensor, out: Tensor) -> Call:
    return partial(torch.mm, gradient.t(), x, out=out)


def _by_onednn(x: Tensor, weight: Tensor, out: Tensor) -> Call:  # which has no use for room of ours
    return partial(torch.ops.mkldnn._linear_pointwise.default, x, weight, None, "none", [], "")


def _gradient_by_onednn(gradient: Tensor, x: Tensor, out: Tensor) -> Call:
    if len(out) <= out.shape[1]:
        return _by_onednn(gradient.t(), x.t(), out)
    return _by_onednn(x.t(), gradient.t(), out)  # transposed: faster with the narrower one first


def _time(calls: list[Call], device: str) -> float:
    synchronize(device)
    began = time.perf_counter()
    for call in calls:
        call()
    synchronize(device)
    return time.perf_counter() - began
