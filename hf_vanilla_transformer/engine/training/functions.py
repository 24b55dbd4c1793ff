"""Autograd functions for training on a CPU: linear maps and dropout.

Each computes what the module or function of torch beside it does, with less memory traffic. None of them can be
differentiated twice: that raises an error.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import torch_private
from ..cpu import CPU

# Dropout compares 16 random bits with a threshold.
DROPOUT_LEVELS = 2**16


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a backward pass raise where its result is to be differentiated once more.

    torch's `once_differentiable` lets it pass as a constant where the gradient that comes in is one, as the first is.
    """

    @wraps(backward)
    def raise_or_go_back(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Training shortcuts have no gradients of gradients (create_graph=True). Train without them: "
                "`training_shortcuts=False` in the trainer's arguments, or `paused_shortcuts(model)`."
            )
        return backward(ctx, *grads)

    return raise_or_go_back


def without_autocast() -> AbstractContextManager[Any]:
    """Lets what is inside compute in the types that it is given; where that is so already, at no cost."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the type that a matrix product of x is computed in: autocast's, where that applies."""
    is_cast = x.dtype == torch.float32 and torch.is_autocast_enabled("cpu")
    return torch.get_autocast_dtype("cpu") if is_cast else x.dtype


def temporary(dtype: torch.dtype, *shape: int) -> Tensor:
    """Makes an uninitialised tensor for what is needed for a moment, with some memory to spare.

    Before 2.38, glibc can't give a freed block to the next tensor of the same size, as aligning it might take more.
    Where freed memory is kept, such blocks would be lost until their neighbours are freed.
    """
    return torch.empty(math.prod(shape) + 64, dtype=dtype, device="cpu").resize_(shape)


# ---- Matrix products ----
def _is_for_onednn(x: Tensor) -> bool:
    return x.dtype == torch.float32 and CPU.has_onednn and not CPU.mkl_is_fastest


def _onednn_linear(*arguments: Any) -> Tensor:
    product: Tensor = torch_private.onednn_linear()(*arguments)
    return product


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """Computes x W^T + b, or max(0, x W^T + b): (N, out) of (N, in), (out, in) and (out)."""
    if not _is_for_onednn(x):
        y = F.linear(x, weight, bias)
        return y.relu_() if relu else y
    if not weight.is_contiguous() and not weight.t().is_contiguous():  # gaps in memory make it a thousand times slower
        weight = weight.contiguous()
    return _onednn_linear(x, weight, bias, "relu" if relu else "none", [], "")


def gradient_of_weight(gradient: Tensor, x: Tensor, so_far: Tensor | None = None) -> Tensor:
    """Computes G^T x: (out, in) of (N, out) and (N, in); it may lie in memory as its transpose does.

    With the gradient of earlier rows, `so_far`, which may be overwritten: the sum of both.
    """
    is_narrow = max(gradient.shape[1], x.shape[1]) < CPU.width_for_onednn_gradient
    if not _is_for_onednn(x) or not len(x) or is_narrow:
        return gradient.t() @ x if so_far is None else so_far.addmm_(gradient.t(), x)
    gradient, x = gradient.contiguous(), x.contiguous()
    # oneDNN is faster with the narrower one as its input.
    is_transposed = gradient.shape[1] > x.shape[1]
    left, right = (x.t(), gradient.t()) if is_transposed else (gradient.t(), x.t())
    if so_far is None:
        total = product(left, right)
    else:
        total = _onednn_linear(left, so_far.t() if is_transposed else so_far, right, None, "add")
    return total.t() if is_transposed else total


# ---- Linear maps ----
def fused_linear(x: Tensor, *maps: nn.Linear, relu: bool = False) -> tuple[Tensor, ...]:
    """Computes `tuple(map(x) for map in maps)` as one product.

    Args:
        x: What the maps have in common, (..., in).
        *maps: Plain linear maps, all of them with a bias or none.
        relu: Whether negative outputs become 0.

    Returns:
        Their outputs, (..., out) each.
    """
    biases = [one.bias for one in maps if one.bias is not None]
    return _FusedLinear.apply(x, len(maps), relu, *(one.weight for one in maps), *biases)  # type: ignore[no-untyped-call]


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int, relu: bool, *parameters: Tensor) -> tuple[Tensor, ...]:
        dtype = compute_dtype(x)
        weights = [weight.to(dtype) for weight in parameters[:number]]
        biases = [bias.to(dtype) for bias in parameters[number:]]
        with without_autocast():
            y = product(x.to(dtype).flatten(0, -2), _joined(weights), _joined(biases) if biases else None, relu)
        ctx.save_for_backward(x, y if relu else None, *weights)  # which are joined twice rather than kept
        ctx.sizes, ctx.dtypes = [len(one) for one in weights], [one.dtype for one in parameters]
        return tuple(y.view(*x.shape[:-1], y.shape[-1]).split_with_sizes(ctx.sizes, dim=-1))

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, positive, *weights = ctx.saved_tensors
        parts = [grad.reshape(-1, size) for grad, size in zip(grads, ctx.sizes, strict=True)]
        gradient = _joined(parts, dim=1)
        if positive is not None:
            gradient = torch_private.relu_backward(gradient, positive)
        of_x = None
        with without_autocast():
            if ctx.needs_input_grad[0]:
                of_x = product(gradient, _joined(weights).t()).view(x.shape).to(x.dtype)
            if not any(ctx.needs_input_grad[3:]):  # frozen
                return of_x, None, None, *(None for _ in ctx.dtypes)
            of_weight = gradient_of_weight(gradient, x.to(gradient.dtype).flatten(0, -2))
        of_parameters = list(of_weight.split_with_sizes(ctx.sizes))
        if len(ctx.dtypes) > len(grads):
            of_parameters += gradient.sum(dim=0).split_with_sizes(ctx.sizes)
        return of_x, None, None, *(one.to(dtype) for one, dtype in zip(of_parameters, ctx.dtypes, strict=True))


def _joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


# ---- Dropout ----
def add_dropout(dropout: nn.Dropout, y: Tensor, residual: Tensor | None = None) -> Tensor:
    """Computes `dropout(y)`, or `residual + dropout(y)` (3.1 and 5.4).

    The mask is drawn from 16 random bits per element: the probability is rounded to a multiple of 2^-16, and what is
    kept is scaled to match.

    Args:
        dropout: Its probability and mode.
        y: Any shape.
        residual: Of the same shape, or None.
    """
    dropped = round(dropout.p * DROPOUT_LEVELS)
    if not dropout.training or not 0 < dropped < DROPOUT_LEVELS:
        y = F.dropout(y, dropout.p, dropout.training)
    elif residual is not None and (residual.dtype, residual.shape) == (y.dtype, y.shape):
        return _Dropout.apply(y, residual, dropped)  # type: ignore[no-untyped-call]
    else:
        y = _Dropout.apply(y, None, dropped)  # type: ignore[no-untyped-call]
    return y if residual is None else residual + y


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, dropped: int) -> Tensor:  # of DROPOUT_LEVELS
        bits = temporary(torch.int64, (x.numel() + 3) // 4).random_(-(2**63), None)
        keep = (bits.view(torch.int16)[: x.numel()] >= dropped - DROPOUT_LEVELS // 2).view(x.shape)
        keep = keep.view(torch.int8)  # which becomes floating-point four times as fast
        ctx.save_for_backward(keep)
        ctx.scale, ctx.has_residual = DROPOUT_LEVELS / (DROPOUT_LEVELS - dropped), residual is not None
        kept = temporary(x.dtype, *x.shape).copy_(keep).mul_(x)
        return kept.mul_(ctx.scale) if residual is None else torch.add(residual, kept, alpha=ctx.scale, out=kept)

    @staticmethod
    @once
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (keep,) = ctx.saved_tensors
        of_x = keep.to(grad_output.dtype).mul_(grad_output).mul_(ctx.scale)
        return of_x, grad_output if ctx.has_residual else None, None
