"""The label-smoothed loss of the projection to the vocabulary, without ever holding all logits."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...integration_vanilla_transformer import outside_vocabulary

ROWS_PER_CHUNK = 512  # with fewer rows, products take longer than those of all targets at once
ROWS_ON_CUDA = 8192
OfChunk: TypeAlias = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


def projected_cross_entropy(
    hidden: Tensor,  # (B, T, d_model)
    projection: nn.Linear,  # its weight is (V, d_model)
    labels: Tensor,  # (B, T), -100 where there is no target
    num_items_in_batch: Tensor | int | None = None,  # of the complete batch; None: of `labels`
    label_smoothing: float = 0.0,
    chunk: OfChunk | None = None,  # `loss_of_chunk`, compiled or not, for batches of one shape
) -> Tensor:
    """Computes the model's `label_smoothed_cross_entropy(projection(hidden), labels, ...)`, some targets at a time.

    Only real targets are projected (with `chunk`, all positions), and each chunk's gradients are computed with its
    loss: nothing of size (B T, V) is kept. Under autocast, products are in its type, everything else is in float32.

    The loss is in float32 (float64 for such weights), 0 where there is no target. It can be differentiated once, by one
    backward pass; more raise a RuntimeError. Without `chunk`, a label outside of the vocabulary raises an IndexError.
    """
    real = labels != -100
    items = real.sum() if num_items_in_batch is None else num_items_in_batch
    weight, bias = projection.weight, projection.bias
    if chunk is None:
        hidden, labels = hidden[real], labels[real]  # (N, d_model), (N)
    else:  # without what isn't real in any product
        hidden, labels = (hidden * real[..., None]).flatten(0, -2), labels.flatten()
    if chunk is None and len(labels) and not 0 <= labels.min() <= labels.max() < len(weight):
        raise outside_vocabulary(labels, len(weight))
    loss: Tensor = _ProjectedCrossEntropy.apply(hidden, weight, bias, labels, label_smoothing, chunk)  # type: ignore[no-untyped-call]
    return loss / torch.as_tensor(items, device=loss.device).clamp(min=1)


class _Context(Protocol):
    needs_input_grad: tuple[bool, ...]
    grads: list[Tensor | None] | None  # of hidden states, weight and bias


class _ProjectedCrossEntropy(torch.autograd.Function):
    """The summed loss of N targets: lse(z) - (1 - eps) z_y - eps mean(z). Its gradient is softmax - (smoothed y)."""

    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        eps: float,
        chunk: OfChunk | None,
    ) -> Tensor:
        device, rows = hidden.device.type, ROWS_ON_CUDA if hidden.is_cuda else ROWS_PER_CHUNK
        is_cast = hidden.dtype == torch.float32 and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_cast else hidden.dtype
        exact = torch.promote_types(dtype, torch.float32)
        table, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        loss = torch.zeros((), dtype=exact, device=device)
        needed = zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        ctx.grads = grads = [torch.zeros_like(x, dtype=exact) if x is not None and on else None for x, on in needed]
        with torch.autocast(device, enabled=False):
            for start in range(0, len(labels), rows):
                own = slice(start, start + rows)
                x, targets = hidden[own].to(dtype), labels[own, None]
                part, gradient = (chunk or loss_of_chunk)(F.linear(x, table, offset), targets, eps)
                loss += part
                _add_gradients(grads, own, gradient, x, table, targets)
                del gradient  # before there is the next one
        return loss

    @staticmethod
    def backward(ctx: _Context, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or ctx.grads is None:
            raise RuntimeError(
                "The loss in chunks has one backward pass, without gradients of gradients (retain_graph=True, "
                "create_graph=True). Train without it: `training_shortcuts=False`, or `paused_shortcuts(model)`."
            )
        grads, ctx.grads = ctx.grads, None  # the largest is as large as the vocabulary's matrix: scaled where it lies
        return *(None if grad is None else grad.mul_(grad_output) for grad in grads), None, None, None


def loss_of_chunk(logits: Tensor, targets: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the summed loss of logits, (n, V), and targets, (n, 1), and its gradient, in float32 in their memory.

    Where a target is -100, the gradient is as if it were 0.
    """
    dtype, vocab_size, real = logits.dtype, logits.shape[1], targets >= 0
    logits, targets = logits.to(torch.promote_types(dtype, torch.float32)), targets.clamp(min=0)
    smoothed = (1 - eps) * logits.gather(1, targets) + eps / vocab_size * logits.sum(dim=1, keepdim=True)
    highest = logits.amax(dim=1, keepdim=True)
    probabilities = torch.softmax(logits, dim=1, out=logits)
    # lse(z) is max z - log max p, and the highest of V numbers with sum 1 is never lost to rounding.
    loss = (real * (highest - probabilities.amax(dim=1, keepdim=True).log() - smoothed)).sum()
    gradient = probabilities.sub_(eps / vocab_size)
    return loss, gradient.scatter_add_(1, targets, gradient.new_full(targets.shape, eps - 1)).to(dtype)


def _add_gradients(
    grads: list[Tensor | None], own: slice, gradient: Tensor, x: Tensor, table: Tensor, targets: Tensor
) -> None:
    """Adds the gradients of hidden states, weight and bias that follow from that of a chunk's logits, (n, V)."""
    of_hidden, of_weight, of_bias = grads
    if of_hidden is not None:
        of_hidden[own] = gradient @ table
    if of_weight is not None:
        if of_weight.dtype == gradient.dtype:
            of_weight.addmm_(gradient.t(), x)
        else:
            of_weight += gradient.t() @ x
    if of_bias is not None:
        of_bias += ((targets >= 0).to(gradient).t() @ gradient)[0]
