"""R-Drop (Liang et al. 2021, arXiv:2106.14448, eq. 4): two predictions of each target token have to agree.

A batch becomes one of twice the size, whose two halves are the same sentences under different dropout. With p and q,
the predictions of the first and of the second half at a target token, the loss is

    CE(p) + CE(q) + alpha * (KL(p || q) + KL(q || p)) / 2

CE is the model's smoothed cross-entropy. All of it is summed over target tokens and divided by their number in the
update, as CE alone is, so that accumulation and several processes change nothing.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

LOGITS_PER_CHUNK = 2**18  # 1 MiB in float32: half a dozen such tensors stay in the cache


def rdrop_loss(
    logits: Tensor,  # (2N, V), the first half's and the second half's
    labels: Tensor,  # (2N), none of them -100
    num_items_in_batch: Tensor | int | None = None,  # targets of the complete update; None: N
    label_smoothing: float = 0.0,
    *,
    alpha: float,  # weight of the divergences
    **kwargs: object,  # of other losses
) -> Tensor:
    """Computes the loss of N targets; only a chunk of them is ever held in float32."""
    items = len(labels) // 2 if num_items_in_batch is None else num_items_in_batch
    total: Tensor = _SummedLoss.apply(logits, labels[: len(labels) // 2], label_smoothing, alpha)  # type: ignore[no-untyped-call]
    return total / torch.as_tensor(items, device=logits.device).clamp(min=1)


class _Context(Protocol):
    gradient: Tensor  # of the logits


class _SummedLoss(torch.autograd.Function):
    """The loss of logits, (2N, V), summed; gradients are computed with it, so that no probabilities are kept."""

    @staticmethod
    def forward(ctx: _Context, logits: Tensor, labels: Tensor, eps: float, alpha: float) -> Tensor:
        exact, rows = torch.promote_types(logits.dtype, torch.float32), max(LOGITS_PER_CHUNK // logits.shape[-1], 1)
        total = torch.zeros((), dtype=exact, device=logits.device)
        ctx.gradient = torch.empty_like(logits)
        (first, second), (of_first, of_second) = logits.chunk(2), ctx.gradient.chunk(2)
        with torch.autocast(logits.device.type, enabled=False):
            for start in range(0, len(labels), rows):
                own = slice(start, start + rows)
                halves = first[own].to(exact), second[own].to(exact)
                part, of_first[own], of_second[own] = _chunk(*halves, labels[own, None], eps, alpha / 2)
                total += part
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gradient * grad_output, None, None, None


def _chunk(first: Tensor, second: Tensor, labels: Tensor, eps: float, weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the summed loss of n targets, and its gradients by the logits, (n, V) each; labels are (n, 1)."""
    log_p, log_q = F.log_softmax(first, dim=-1), F.log_softmax(second, dim=-1)
    loss = torch.zeros((), dtype=first.dtype, device=first.device)
    for log in (log_p, log_q):
        loss -= (1 - eps) * log.gather(1, labels).sum() + eps * log.mean(dim=-1).sum()
    difference = log_p - log_q
    p, q = log_p.exp_(), log_q.exp_()
    p_difference, q_difference = p * difference, difference.neg_().mul_(q)
    p_to_q, q_to_p = p_difference.sum(-1, keepdim=True), q_difference.sum(-1, keepdim=True)
    loss += weight * p_to_q.sum() + weight * q_to_p.sum()
    # With the smoothed targets t, the gradients are p (log p - log q - KL(p || q)) of KL(p || q), p - q of KL(q || p),
    # and p - t of CE(p).
    of_first = p_difference.mul_(weight).addcmul_(p, 1 + weight - weight * p_to_q).sub_(q, alpha=weight)
    of_second = q_difference.mul_(weight).addcmul_(q, 1 + weight - weight * q_to_p).sub_(p, alpha=weight)
    for gradient in (of_first, of_second):
        gradient.sub_(eps / gradient.shape[1])
        gradient.scatter_add_(1, labels, gradient.new_full(labels.shape, eps - 1))
    return loss, of_first, of_second


@contextmanager
def rdrop(
    model: VanillaTransformerForConditionalGeneration, inputs: Mapping[str, Tensor | bool], alpha: float
) -> Iterator[dict[str, Tensor | bool]]:
    """Doubles a batch, and lets the model compute R-Drop's loss of it meanwhile."""
    plain = model.loss_function
    model.loss_function = partial(rdrop_loss, alpha=alpha)
    try:
        yield {name: torch.cat([x, x]) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    finally:
        model.loss_function = plain
