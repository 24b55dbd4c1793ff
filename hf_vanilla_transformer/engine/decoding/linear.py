"""Linear maps for few rows: x W^T + b, with weights laid out for the matrix products of a step of decoding.

How a weight is kept depends on its size: small ones for MKL, medium ones for MKL or oneDNN by the number of rows,
large ones for oneDNN (`engine.cpu`).
"""

import warnings
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import torch_private
from ..cpu import CPU

SMALLEST = 1e-30  # that 8-bit numbers are scaled by: its reciprocal is finite in float32


class Linear(Protocol):
    """x W^T + b, then a ReLU or a residual: x is (rows, in), the result (rows, out)."""

    def __call__(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Maps (rows, in) to (rows, out)."""
        ...


class PlainLinear:
    """The map with its parameters as they are."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Maps (rows, in) to (rows, out)."""
        return _finish(F.linear(x, self.weight, self.bias), residual, relu)


class PackedLinear:
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


class MixedLinear:
    """A map that takes longer to start in oneDNN than MKL needs for few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.elements = weight.numel()
        self.of_few_rows, self.of_many_rows = ColumnLinear(weight, bias), PackedLinear(weight, bias)

    def __call__(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Maps (rows, in) to (rows, out)."""
        are_few = len(x) * self.elements <= CPU.multiplications_for_mkl
        return (self.of_few_rows if are_few else self.of_many_rows)(x, residual, relu)


class Int8Linear:
    """The map with weights in 8 bits, scaled for each output, and inputs rounded to 8 bits, scaled for each row.

    So the result of a row doesn't depend on the others of its batch, nor on the library that multiplies the integers:
    FBGEMM takes less time to start and multiplies few rows; oneDNN is faster for many.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        step = (weight.float().abs().amax(dim=1) / 127).clamp(min=SMALLEST)  # of an integer, for each output: (out,)
        rounded = (weight.float() / step[:, None]).round_().to(torch.int8)
        self.bias = None if bias is None else bias.float()
        self.highest = 63 if CPU.reduce_range else 127
        self.of_many_rows = OneDNNProduct(rounded, step / self.highest, self.highest)
        self.of_few_rows: Callable[[Tensor], Tensor] = self.of_many_rows
        if torch_private.int8_linear_of_few_rows() is not None:
            self.of_few_rows = FBGEMMProduct(rounded, step / self.highest, self.highest)

    def __call__(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Maps (rows, in) to (rows, out)."""
        largest = x.abs().amax(dim=1, keepdim=True).clamp_(min=SMALLEST)  # (rows, 1)
        integers = (x * (self.highest / largest)).round_()
        y = (self.of_few_rows if len(x) <= CPU.rows_for_fbgemm else self.of_many_rows)(integers)
        y = y.mul_(largest) if self.bias is None else torch.addcmul(self.bias, y, largest, out=y)
        return _finish(y, residual, relu)


class OneDNNProduct:
    """Products of integers from -highest to highest with 8-bit weights, (out, in), scaled by `scale`, (out,)."""

    def __init__(self, weight: Tensor, scale: Tensor, highest: int) -> None:
        pack, self.product = torch_private.int8_linear()
        self.packed, self.scale, self.no_shift = pack(weight, None), scale, torch.zeros(len(weight), dtype=torch.long)
        # Inputs are stored as their distance from the lowest: oneDNN has no fast product of two signed ones.
        self.above, self.zero, self.one = highest + 1, torch.tensor(highest + 1), torch.tensor(1.0)

    def __call__(self, integers: Tensor) -> Tensor:
        """Maps (rows, in), integers in float32, to (rows, out)."""
        # torch makes signed bytes of float32 five times as fast as unsigned ones.
        unsigned = integers.to(torch.int8).view(torch.uint8).add_(self.above)
        inputs = (unsigned, self.one, self.zero, self.packed, self.scale, self.no_shift, None)
        product: Tensor = self.product(*inputs, 1.0, 0, torch.float32, "none", [], "")
        return product


class FBGEMMProduct:
    """The same product. FBGEMM finds a scale for all rows; two more rows keep it at 1."""

    def __init__(self, weight: Tensor, scale: Tensor, highest: int) -> None:
        pack, self.product = torch_private.int8_linear_of_few_rows()
        with warnings.catch_warnings():  # that torch means to remove these types; then there is oneDNN's product
            warnings.simplefilter("ignore", UserWarning)
            no_shift = torch.zeros(len(weight), dtype=torch.long)
            exact = weight * scale[:, None]  # which is rounded to the same integers
            quantized = torch.quantize_per_channel(exact, scale, no_shift, axis=0, dtype=torch.qint8)
        self.packed = pack(quantized, None)
        self.range = torch.zeros(2, weight.shape[1])
        self.range[:, 0] = torch.tensor([-highest - 1.0, highest])

    def __call__(self, integers: Tensor) -> Tensor:
        """Maps (rows, in), integers in float32, to (rows, out)."""
        rows = torch.cat([integers, self.range])
        product: Tensor = self.product(rows, self.packed, reduce_range=CPU.reduce_range)
        return product[:-2]


def _finish(y: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    y = y if residual is None else y.add_(residual)
    return y.relu_() if relu else y


def kind_of_linear(is_int8: bool, weight: Tensor) -> Callable[[Tensor, Tensor | None], Linear]:
    """Returns how a model with such weights keeps them, as a function of weight, (out, in), and bias, (out)."""
    if is_int8:
        return Int8Linear
    return _by_mkl_or_onednn if _can_be_packed(weight) else PlainLinear


def _by_mkl_or_onednn(weight: Tensor, bias: Tensor | None) -> Linear:
    if weight.dtype != torch.float32 or weight.numel() > CPU.elements_for_both:
        return PackedLinear(weight, bias)
    return (ColumnLinear if weight.numel() <= CPU.elements_for_mkl else MixedLinear)(weight, bias)


def _can_be_packed(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not CPU.has_onednn or not torch.backends.mkldnn.enabled:
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and CPU.has_fast_bfloat16)
