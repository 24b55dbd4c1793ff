"""The label-smoothed loss of the projection to the vocabulary, without ever holding all logits."""

from typing import Any

import torch
from torch import Tensor, nn

from ...modeling_vanilla_transformer import outside_vocabulary
from .. import torch_private
from ..cpu import CPU
from .functions import compute_dtype, gradient_of_weight, once, product, without_autocast

# Rows of the vocabulary's matrix whose bfloat16 gradient is added to the float32 sum at a time.
ROWS_PER_ADDITION = 2_048


def projected_cross_entropy(
    hidden: Tensor,
    projection: nn.Linear,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Computes the model's `label_smoothed_cross_entropy(projection(hidden), labels, ...)`, some targets at a time.

    Only real targets are projected, and each chunk's gradients are computed with its loss: nothing of size (B T, V) is
    kept, and padding costs nothing. It can't be differentiated twice.

    Args:
        hidden: The decoder's output, (B, T, d_model).
        projection: To the vocabulary; its weight is (V, d_model).
        labels: (B, T), -100 where there is no target.
        num_items_in_batch: Targets of the complete batch, of which this may be a part (gradient accumulation, several
            processes); None: those of `labels`.
        label_smoothing: eps_ls.

    Returns:
        The loss in float32 (float64 for such weights); 0 where there is no target.

    Raises:
        IndexError: A label is outside of the vocabulary.
    """
    labels = labels.to(hidden.device)
    real = labels != -100
    hidden, labels = hidden[real], labels[real]  # (N, d_model), (N)
    weight, bias = projection.weight, projection.bias
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(weight):
        raise outside_vocabulary(labels, len(weight))
    loss: Tensor = _ProjectedCrossEntropy.apply(hidden, weight, bias, labels, label_smoothing)  # type: ignore[no-untyped-call]
    items = len(labels) if num_items_in_batch is None else num_items_in_batch
    return loss / torch.as_tensor(items, device=loss.device).clamp(min=1)


class _ProjectedCrossEntropy(torch.autograd.Function):
    """The summed loss of N targets: lse(z) - (1 - eps) z_y - eps mean(z), whose gradient is softmax - (smoothed y)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, eps: float) -> Tensor:
        dtype, vocab_size = compute_dtype(hidden), len(weight)
        exact = torch.promote_types(dtype, torch.float32)
        table, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        loss = torch.zeros((), dtype=exact, device=hidden.device)
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=exact)
        of_weight = None if len(labels) else torch.zeros_like(weight, dtype=exact)
        grads: list[Any] = [torch.empty_like(hidden, dtype=exact), of_weight, of_bias]
        step = max(CPU.logits_per_chunk // vocab_size, CPU.rows_per_chunk)
        with without_autocast():
            for start in range(0, len(labels), step):
                rows, targets = hidden[start : start + step].to(dtype), labels[start : start + step, None]
                part, gradient = _loss_of_chunk(product(rows, table, offset).to(exact), targets, eps)
                loss += part
                if any(ctx.needs_input_grad):
                    _accumulate(grads, slice(start, start + step), gradient.to(dtype), rows, table)
                del gradient  # before there is the next one
        if any(ctx.needs_input_grad):
            grads[1] = grads[1].contiguous()
        ctx.save_for_backward(*grads)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        return loss

    @staticmethod
    @once
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads, is_kept = [], torch_private.keeps_graph()
        for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            if grad is not None:  # that of the weights is as large as they are: scaled where it lies, if it may be
                grad = (grad * grad_output if is_kept else grad.mul_(grad_output)).to(dtype)
            grads.append(grad)
        return *grads, None, None


def _loss_of_chunk(logits: Tensor, targets: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the summed loss of logits, (n, V), and targets, (n, 1), and its gradient, which overwrites the logits."""
    vocab_size = logits.shape[1]
    smoothed = (1 - eps) * logits.gather(1, targets).sum() + eps / vocab_size * logits.sum()
    highest = logits.amax(dim=1)
    probabilities = torch.softmax(logits, dim=1, out=logits)
    # lse(z) is max z - log max p, and the highest of V numbers with sum 1 is never lost to rounding.
    loss = (highest - probabilities.amax(dim=1).log()).sum() - smoothed
    gradient = probabilities.sub_(eps / vocab_size)
    return loss, gradient.scatter_add_(1, targets, gradient.new_full(targets.shape, eps - 1))


def _accumulate(grads: list[Any], rows: slice, gradient: Tensor, hidden: Tensor, table: Tensor) -> None:
    """Adds what a chunk's gradient of its logits, (n, V), means for `grads` of hidden states, weight and bias."""
    of_hidden, of_weight, of_bias = grads
    of_hidden[rows] = product(gradient, table.t())
    if of_weight is None or of_weight.dtype == gradient.dtype:
        grads[1] = gradient_of_weight(gradient, hidden, of_weight).to(of_hidden.dtype)
    else:  # a sum of two types first makes one of them the other's, here of a few rows at a time
        more = gradient_of_weight(gradient, hidden)
        parts = zip(torch.split(of_weight, ROWS_PER_ADDITION), torch.split(more, ROWS_PER_ADDITION), strict=True)
        for total, part in parts:
            total += part
    if of_bias is not None:
        of_bias += gradient.sum(dim=0)
