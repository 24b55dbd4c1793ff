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
from transformers.utils import logging

from .. import torch_private
from ..cpu import CPU

logger = logging.get_logger(__name__)


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
    """The map with 8-bit weights, scaled for each output, and inputs rounded to 8 bits as they come (FBGEMM)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        operators = torch_private.int8_linear()
        assert operators is not None
        pack, self.map, self.map_with_relu = operators
        weight, scale = weight.float(), _int8_scale(weight)
        no_shift = torch.zeros(len(weight), dtype=torch.long)
        with warnings.catch_warnings():  # that torch means to replace these types, without saying yet by what
            warnings.simplefilter("ignore", UserWarning)
            quantized = torch.quantize_per_channel(weight, scale, no_shift, axis=0, dtype=torch.qint8)
        self.packed = pack(quantized, None if bias is None else bias.float())

    def __call__(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Maps (rows, in) to (rows, out)."""
        if relu:
            return self.map_with_relu(x, self.packed, reduce_range=CPU.reduce_range)
        return _finish(self.map(x, self.packed, reduce_range=CPU.reduce_range), residual, False)


class RoundedLinear(PlainLinear):
    """What replaces `Int8Linear` where torch lacks its operators: its rounded weights, multiplied in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        scale = _int8_scale(weight)[:, None]
        super().__init__((weight.float() / scale).round_().mul_(scale), None if bias is None else bias.float())


def _int8_scale(weight: Tensor) -> Tensor:
    """Returns what each row's step of 8 bits stands for, (out,)."""
    return (weight.float().abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)


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
