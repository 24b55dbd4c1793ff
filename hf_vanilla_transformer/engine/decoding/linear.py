"""Linear maps for few rows: x W^T + b, with weights laid out for the matrix products of a step of decoding.

How a weight is kept depends on its size: small ones for MKL, medium ones for MKL or oneDNN by the number of rows,
large ones for oneDNN (`engine.cpu`).
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import logging

from .. import torch_private
from ..cpu import CPU

logger = logging.get_logger(__name__)

SMALLEST = 1e-30  # that 8-bit numbers are scaled by: its reciprocal has room in float32


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
    """The map with a copy of its weight in oneDNN's own order, which products of few rows read several times faster."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        operator = torch_private.onednn_linear()
        self.map, self.map_and_add = operator.default, operator.binary
        self.weight, self.bias = torch_private.onednn_weight()(weight), bias

    def __call__(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Maps (rows, in) to (rows, out)."""
        if residual is not None:
            return self.map_and_add(x, residual, self.weight, self.bias, "add")
        return self.map(x, self.weight, self.bias, "relu" if relu else "none", [], "")


class ColumnLinear(PlainLinear):
    """The map with a copy of its weight by columns, which is what MKL reads fastest."""

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

    So what a row becomes doesn't depend on the others of its batch.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        operators = torch_private.int8_linear()
        assert operators is not None
        pack, self.product = operators
        scale = _int8_scale(weight)
        self.packed = pack((weight.float() / scale[:, None]).round_().to(torch.int8), None)
        self.bias = None if bias is None else bias.float()
        # Inputs are stored as what they are above the lowest.
        self.highest = 63 if CPU.reduce_range else 127
        self.scale, self.no_shift = scale / self.highest, torch.zeros(len(weight), dtype=torch.long)
        self.one, self.zero = torch.tensor(1.0), torch.tensor(self.highest + 1)

    def __call__(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Maps (rows, in) to (rows, out)."""
        largest = torch.linalg.vector_norm(x, math.inf, dim=1, keepdim=True).clamp_(min=SMALLEST)  # (rows, 1)
        rounded = (x * (self.highest / largest)).round_().add_(self.highest + 1).to(torch.uint8)
        inputs = (rounded, self.one, self.zero, self.packed, self.scale, self.no_shift, None)
        y = self.product(*inputs, 1.0, 0, torch.float32, "none", [], "")
        y = y.mul_(largest) if self.bias is None else torch.addcmul(self.bias, y, largest, out=y)
        return _finish(y, residual, relu)


class RoundedLinear(PlainLinear):
    """What replaces `Int8Linear` where torch lacks its operators: its rounded weights, multiplied in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        scale = _int8_scale(weight)[:, None]
        super().__init__((weight.float() / scale).round_().mul_(scale), None if bias is None else bias.float())


def _int8_scale(weight: Tensor) -> Tensor:
    """Returns what each row's step of 8 bits stands for, (out,)."""
    return (weight.float().abs().amax(dim=1) / 127).clamp(min=SMALLEST)


def _finish(y: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    y = y if residual is None else y.add_(residual)
    return y.relu_() if relu else y


def kind_of_linear(compute_type: str, weight: Tensor) -> Callable[[Tensor, Tensor | None], Linear]:
    """Returns how a model with such weights keeps them, as a function of weight, (out, in), and bias, (out)."""
    if compute_type == "int8":
        if torch_private.int8_linear() is not None:
            return Int8Linear
        logger.warning_once(
            f'`compute_type="int8"` rounds the weights to 8 bits, but takes as long as "default": torch '
            f"{torch.__version__} lacks products of 8 bits. Install torch 2.13, or use another compute type."
        )
        return RoundedLinear
    return _by_mkl_or_onednn if _can_be_packed(weight) else PlainLinear


def _by_mkl_or_onednn(weight: Tensor, bias: Tensor | None) -> Linear:
    if weight.dtype != torch.float32 or weight.numel() > CPU.elements_for_both:
        return PackedLinear(weight, bias)
    return (ColumnLinear if weight.numel() <= CPU.elements_for_mkl else MixedLinear)(weight, bias)


def _can_be_packed(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not CPU.has_onednn or not torch.backends.mkldnn.enabled:
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and CPU.has_fast_bfloat16)
