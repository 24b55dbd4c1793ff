"""Autograd functions for training on a CPU: linear maps, dropout, layer normalisation and attention.

Each computes what the module or function of torch beside it does, with less memory traffic. None of them can be
differentiated twice: that raises an error.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import torch_private
from ..cpu import CPU

# Where a gain is smaller, the input can't be told from the output with the precision that gradients need.
SMALLEST_INVERTIBLE_GAIN = 0.01

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
        gradient = side_by_side([grad.reshape(-1, size) for grad, size in zip(grads, ctx.sizes, strict=True)])
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


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def side_by_side(parts: list[Tensor]) -> Tensor:
    """Makes one matrix of several with equally many rows; of neighbouring columns without a copy."""
    if len(parts) == 1:
        return parts[0]
    first, (*offsets, width) = parts[0], accumulate((part.shape[1] for part in parts), initial=0)
    start, memory = first.storage_offset(), (_storage_of(first), first.stride())
    are_neighbours = first.stride(1) == 1 and all(
        part.storage_offset() == start + offset and (_storage_of(part), part.stride()) == memory
        for part, offset in zip(parts, offsets, strict=True)
    )
    return first.as_strided((len(first), width), first.stride()) if are_neighbours else torch.cat(parts, dim=1)


def _storage_of(x: Tensor) -> int:
    """Identifies the memory that a tensor is a view of."""
    return x.untyped_storage()._cdata


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


# ---- Layer normalisation ----
def layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """Normalises x, (..., d_model), over the last dimension, and keeps the output for the gradients, not x.

    The output is kept anyway, by the map behind it; x is computed from it: x = (y - b) / w * sigma + mu.
    """
    if not _is_invertible(norm, x):
        return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    normed: Tensor = _LayerNormOfOutput.apply(x, norm.weight, norm.bias, norm.eps)  # type: ignore[no-untyped-call]
    return normed


def _is_invertible(norm: nn.LayerNorm, x: Tensor) -> bool:
    if norm.weight is None or norm.bias is None or norm.weight.dtype != x.dtype or norm.bias.dtype != x.dtype:
        return False
    return x.dtype.itemsize >= 4 and bool(norm.weight.detach().abs().min() >= SMALLEST_INVERTIBLE_GAIN)


class _LayerNormOfOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, mean, reciprocal = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(y, mean, reciprocal, weight, bias)
        return y

    @staticmethod
    @once
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        y, mean, reciprocal, weight, bias = ctx.saved_tensors
        x = (y - bias).div_(weight).div_(reciprocal).add_(mean)
        wanted = ctx.needs_input_grad[:3]
        return *torch_private.layer_norm_backward(grad_output, x, mean, reciprocal, weight, bias, wanted), None


# ---- Attention in short sentences ----
def are_short(queries: int, keys: int) -> bool:
    """Tells whether sentences of these lengths train faster by eq. 1 as it stands than by torch's sdpa."""
    return queries * keys <= CPU.scores_of_short_sentences


def short_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, is_causal: bool
) -> Tensor:
    """Computes eq. 1, one batched product for each head: each reads its operands where they lie, without a copy.

    Args:
        query: (B, h, T, d_k).
        key: (B, h, S, d_k).
        value: (B, h, S, d_v).
        mask: (1 or B, 1 or h, T, S), False where nothing may be looked at; None: nothing is masked, or by `is_causal`.
        scaling: What scores are multiplied by.
        is_causal: Whether, without a mask, no query may look ahead.

    Returns:
        (B, T, h, d_v); a query that may look at nothing gets zeros.
    """
    if mask is None and is_causal and query.shape[2] > 1:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    heads: Tensor = _ShortAttention.apply(query, key, value, mask, scaling)  # type: ignore[no-untyped-call]
    return heads


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        batch, heads, length, _ = query.shape
        weights = query.new_empty(heads, batch, length, key.shape[2])
        for head, scores in enumerate(weights):
            torch.baddbmm(scores, query[:, head], key[:, head].mT, beta=0, alpha=scaling, out=scores)
        _softmax_of_short_rows(weights, None if mask is None else ~mask.transpose(0, 1))
        found = temporary(query.dtype, heads, batch, length, value.shape[3])
        for head, rows in enumerate(found):
            torch.bmm(weights[head], value[:, head], out=rows)
        ctx.save_for_backward(query, key, value, weights)
        ctx.scaling = scaling
        return found.permute(1, 2, 0, 3).contiguous()

    @staticmethod
    @once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, weights = ctx.saved_tensors
        of_scores, scale = torch.empty_like(weights), ctx.scaling
        for head, rows in enumerate(of_scores):
            torch.baddbmm(rows, gradient[:, :, head], value[:, head].mT, beta=0, alpha=scale, out=rows)
        of_scores.sub_((of_scores * weights).sum(dim=-1, keepdim=True)).mul_(weights)  # the softmax's gradient
        of_query, of_key, of_value = empty_gradients(query, key, value)
        for head, (of_score, weight) in enumerate(zip(of_scores, weights, strict=True)):
            of_query[:, head] = torch.bmm(of_score, key[:, head])
            of_key[:, head] = torch.bmm(of_score.mT, query[:, head])
            of_value[:, head] = torch.bmm(weight.mT, gradient[:, :, head])
        return of_query, of_key, of_value, None, None


def _softmax_of_short_rows(scores: Tensor, hidden: Tensor | None) -> None:
    """Turns scores, (..., S), into their softmax, 0 where hidden: torch's own takes ten times as long for so few."""
    if hidden is not None:
        scores.masked_fill_(hidden, torch.finfo(scores.dtype).min)
    scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    if hidden is not None:
        scores.masked_fill_(hidden, 0.0)
    scores.div_(scores.sum(dim=-1, keepdim=True).clamp_(min=1))  # the highest alone is 1; 0: all of a row are hidden


def empty_gradients(*tensors: Tensor) -> list[Tensor]:
    """Makes uninitialised gradients that lie in memory as their tensors do: parts of one product are one again."""
    pieces: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        pieces.setdefault(_storage_of(tensor), []).append(tensor)
    storages = {place: _empty_storage_of(parts) for place, parts in pieces.items()}
    return [_within(storages[_storage_of(tensor)], tensor) for tensor in tensors]


def _empty_storage_of(parts: Sequence[Tensor]) -> Tensor | None:
    """Makes memory of the size of that which the parts are views of, if together they are all of it."""
    size = parts[0].untyped_storage().nbytes() // parts[0].itemsize
    are_apart = len({part.storage_offset() for part in parts}) == len(parts)
    return parts[0].new_empty(size) if are_apart and _number_of_elements(parts) == size else None


def _number_of_elements(parts: Iterable[Tensor]) -> int:
    return sum(part.numel() for part in parts)


def _within(storage: Tensor | None, tensor: Tensor) -> Tensor:
    if storage is None:
        return torch.empty_like(tensor)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
