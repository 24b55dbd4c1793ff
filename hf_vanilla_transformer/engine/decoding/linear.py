"""Linear maps for few rows: x W^T + b, with weights laid out for the matrix products of a step of decoding.

Which library multiplies fastest, and from which layout of a weight, depends on the processor, the weight's shape and
the number of rows. It is measured, once for each shape (`fastest`).
"""

import functools
import math
import time
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import torch_private

SMALLEST = 1e-30  # that 8-bit numbers are scaled by: its reciprocal is finite in float32
HAS_VNNI = bool(torch.cpu.get_capabilities().get("avx512_vnni"))
HIGHEST = 127 if HAS_VNNI else 63  # of an input in 8 bits: without VNNI, FBGEMM's sums in 16 bits overflow above
# Rounding a row of inputs takes as long as a product of this many elements saves without VNNI, in a step for one line.
ELEMENTS_FOR_INT8 = 0 if HAS_VNNI else 2**18

# What a product is measured for: rows of a sentence, of its beams, and of a batch; and up to how many rows each
# measurement counts.
ROWS = (1, 4, 32)
UP_TO = (2, 11)
MEASURED_ELEMENTS = 2**20  # of a larger weight, this many are measured
MEASURED_BYTES = 40 * 2**20  # of weights that are multiplied by in turn: as many as a model has, or caches don't hold
ELEMENTS_FOR_BOTH = 2**18  # up to which a weight is kept in two layouts, as a second copy of a larger one is too large
MEASURED_SECONDS = 0.25  # of a shape, at most: on a machine so busy that it takes longer, the first layout is taken
CLEARLY = 0.85  # of the time of the first layout, another one may take at most: close calls keep the first


class Linear(ABC):
    """x W^T + b, then a ReLU or a residual: x is (rows, in), the result (rows, out)."""

    @abstractmethod
    def __call__(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Maps (rows, in) to (rows, out)."""

    def __repr__(self) -> str:
        return type(self).__name__


class PlainLinear(Linear):
    """The map with its parameters as they are."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Maps (rows, in) to (rows, out)."""
        return _finish(F.linear(x, self.weight, self.bias), residual, relu)


class PackedLinear(Linear):
    """The map with a copy of its weight in oneDNN's own order: products of few rows read it several times faster."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        operator, reordered = torch_private.onednn_linear()
        self.map, self.map_and_add = operator.default, operator.binary
        self.weight, self.bias = reordered(weight), bias

    def __call__(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Maps (rows, in) to (rows, out)."""
        if residual is not None:
            return self.map_and_add(x, residual, self.weight, self.bias, "add")
        return self.map(x, self.weight, self.bias, "relu" if relu else "none", [], "")


class ColumnLinear(PlainLinear):
    """The map with a copy of its weight by columns, the order that MKL reads fastest."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.t().contiguous().t(), bias)


class ByRows(Linear):
    """A map that keeps its weight in several layouts, and takes the fastest one for the number of rows."""

    def __init__(self, maps: Sequence[Linear]) -> None:
        self.maps = maps  # one for each of ROWS

    def __call__(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Maps (rows, in) to (rows, out)."""
        return self.maps[bisect_left(UP_TO, len(x))](x, residual, relu)

    def __repr__(self) -> str:
        return ", ".join(f"{one} for {rows}" for rows, one in zip(ROWS, self.maps, strict=True))


class Int8Linear(Linear):
    """The map with weights in 8 bits, scaled for each output, and inputs rounded to 8 bits, scaled for each row.

    So the result of a row doesn't depend on the others of its batch.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias = None if bias is None else bias.float()
        self._pack(*rounded_weight(weight.float()))

    @abstractmethod
    def _pack(self, weight: Tensor, step: Tensor) -> None:
        """Keeps what `rounded_weight` returns."""

    @abstractmethod
    def _multiply(self, x: Tensor) -> Tensor:
        """Multiplies numbers up to 1, (rows, in), which it rounds to 1 / HIGHEST, by the weights: (rows, out)."""

    def __call__(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Maps (rows, in) to (rows, out)."""
        return _finish(self.of_scaled(*scaled(x)), residual, relu)

    def of_scaled(self, x: Tensor, largest: Tensor) -> Tensor:
        """Maps inputs that are scaled already to (rows, out)."""
        y = self._multiply(x)
        return y.mul_(largest) if self.bias is None else torch.addcmul(self.bias, y, largest, out=y)


def rounded_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a weight, (out, in), for each output to integers up to 127: these, and what one is worth, (out,)."""
    step = (weight.abs().amax(dim=1) / 127).clamp(min=SMALLEST)
    return (weight / step[:, None]).round_().to(torch.int8), step


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales each row of inputs to numbers from -1 to 1: (rows, in), and what 1 is worth, (rows, 1)."""
    largest = x.abs().amax(dim=1, keepdim=True).clamp_(min=SMALLEST)
    return x / largest, largest


class OneDNNLinear(Int8Linear):
    """The map in 8 bits by oneDNN, which some processors multiply many rows faster with."""

    def _pack(self, weight: Tensor, step: Tensor) -> None:
        pack, self.product = torch_private.int8_linear()
        self.packed, self.step, self.no_shift = pack(weight, None), step, torch.zeros(len(weight), dtype=torch.long)
        # Inputs are stored as their distance from the lowest: oneDNN has no fast product of two signed ones.
        self.zero, self.input_step = torch.tensor(HIGHEST + 1), step.new_tensor(1 / HIGHEST)

    def _multiply(self, x: Tensor) -> Tensor:
        integers = (x * HIGHEST).round_()
        # torch makes signed bytes of float32 five times as fast as unsigned ones.
        unsigned = integers.to(torch.int8).view(torch.uint8).add_(HIGHEST + 1)
        inputs = (unsigned, self.input_step, self.zero, self.packed, self.step, self.no_shift, None)
        return self.product(*inputs, 1.0, 0, torch.float32, "none", [], "")


class FBGEMMLinear(Int8Linear):
    """The map in 8 bits by FBGEMM, which takes less time to start.

    It rounds inputs with a scale for all rows; one more row keeps that at 1 / HIGHEST.
    """

    def _pack(self, weight: Tensor, step: Tensor) -> None:
        quantized, pack, self.product = torch_private.int8_linear_of_few_rows()
        with warnings.catch_warnings():  # that torch means to remove these types; then there is oneDNN's product
            warnings.simplefilter("ignore", UserWarning)
            self.packed = pack(quantized(weight, step, torch.zeros(len(weight), dtype=torch.long), 0), None)
        self.range = step.new_zeros(1, weight.shape[1])
        self.range[0, :2] = step.new_tensor([-1 - 1 / HIGHEST, 1.0])

    def _multiply(self, x: Tensor) -> Tensor:
        return self.product(torch.cat([x, self.range]), self.packed, reduce_range=not HAS_VNNI)[:-1]


def _finish(y: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    y = y if residual is None else y.add_(residual)
    return y.relu_() if relu else y


# ---- Choosing ----
Layout = Callable[[Tensor, Tensor | None], Linear]
Layouts = tuple[Layout, ...]


def linear_map(weight: Tensor, bias: Tensor | None, is_int8: bool = False, model_bytes: int = 0) -> Linear:
    """Returns the map of weight, (out, in), and bias, (out,), in the layouts that are fastest for it.

    With `is_int8`, its weight is in 8 bits if it is large enough for these to pay (`ELEMENTS_FOR_INT8`): for any number
    of rows, so that a sentence's translation doesn't depend on its batch. `model_bytes` are those of all weights.
    """
    layouts = _layouts(weight, is_int8 and weight.numel() >= ELEMENTS_FOR_INT8)
    if len(layouts) > 1:
        shape = (min(len(weight), max(MEASURED_ELEMENTS // weight.shape[1], 1)), weight.shape[1])
        copies = min(model_bytes, MEASURED_BYTES) // (math.prod(shape) * weight.element_size())
        if FBGEMMLinear in layouts:
            copies = 0  # to pack weights in 8 bits takes much longer than to multiply by them
        copies = max(2 ** copies.bit_length() // 2, 4)  # few different numbers, as each is measured
        layouts = fastest(shape, weight.dtype, layouts, copies, torch.get_num_threads())
    if weight.numel() > ELEMENTS_FOR_BOTH:
        layouts = layouts[:1]
    maps = {layout: layout(weight, bias) for layout in {*layouts}}
    return maps[layouts[0]] if len(maps) == 1 else ByRows([maps[layout] for layout in layouts[1:]])


def _layouts(weight: Tensor, is_int8: bool) -> Layouts:
    """Returns what a weight may be kept as here; of layouts that are about as fast, the first one is taken."""
    if is_int8:
        has_fbgemm = torch_private.int8_linear_of_few_rows() is not None
        return (FBGEMMLinear, OneDNNLinear) if has_fbgemm else (OneDNNLinear,)
    if weight.device.type != "cpu" or torch_private.onednn_linear() is None or not torch.backends.mkldnn.enabled:
        return (PlainLinear,)
    if weight.dtype == torch.float32:
        return (PackedLinear, ColumnLinear)
    if weight.dtype == torch.bfloat16 and torch_private.has_onednn_bfloat16():
        return (PackedLinear, PlainLinear)
    return (PlainLinear,)


@functools.cache
def fastest(shape: tuple[int, int], dtype: torch.dtype, layouts: Layouts, copies: int, threads: int) -> Layouts:
    """Measures which layout of a weight is the fastest: for all ROWS together, and then for each of them.

    `copies` of a weight are multiplied by in turn, as in a model; `threads` are those that torch has.
    """
    deadline = time.perf_counter() + MEASURED_SECONDS
    weight, bias = torch.ones(shape, dtype=dtype), torch.ones(shape[0], dtype=dtype)  # a user's seed isn't used up
    maps = [[layout(weight, bias) for _ in range(copies)] for layout in layouts]
    seconds = dict(zip(layouts, _measure(maps, shape[1], dtype), strict=True))
    if time.perf_counter() > deadline:
        return layouts[:1] * (1 + len(ROWS))
    best = layouts[0]
    for layout in layouts[1:]:
        ratios = [own / other for own, other in zip(seconds[layout], seconds[best], strict=True)]
        best = layout if math.prod(ratios) < CLEARLY ** len(ROWS) else best
    by_rows = [min(layouts, key=lambda layout: seconds[layout][number]) for number in range(len(ROWS))]
    is_clear = [seconds[own][number] < CLEARLY * seconds[best][number] for number, own in enumerate(by_rows)]
    return best, *(own if clear else best for own, clear in zip(by_rows, is_clear, strict=True))


def _measure(maps: list[list[Linear]], width: int, dtype: torch.dtype) -> list[list[float]]:
    """Returns the seconds of a product for each of ROWS by each of several layouts, of which `maps` has some weights.

    They take turns, weight by weight, and the least of all turns counts: other processes may use the processor, too.
    """
    least = [[math.inf] * len(ROWS) for _ in maps]
    for number, rows in enumerate(ROWS):
        x = torch.ones(rows, width, dtype=dtype)
        for turn in (*zip(*maps, strict=True), *zip(*maps, strict=True)):  # a layout's first product takes longer
            for own, linear in zip(least, turn, strict=True):
                began = time.perf_counter()
                linear(x)
                own[number] = min(own[number], time.perf_counter() - began)
    return least
