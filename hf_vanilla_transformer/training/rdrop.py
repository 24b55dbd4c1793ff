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
        (first, second), (of_first, of_second) = logits.detach().chunk(2), ctx.gradient.chunk(2)
        with torch.autocast(logits.device.type, enabled=False), torch.enable_grad():
            for start in range(0, len(labels), rows):
                own = slice(start, start + rows)
                one, other = (half[own].to(exact, copy=True).requires_grad_() for half in (first, second))
                part = _chunk(one, other, labels[own, None], eps, alpha / 2)
                of_first[own], of_second[own] = torch.autograd.grad(part, (one, other))
                total += part.detach()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gradient * grad_output, None, None, None


def _chunk(first: Tensor, second: Tensor, labels: Tensor, eps: float, weight: float) -> Tensor:
    """Returns the summed loss of n targets, of logits, (n, V) each, and labels, (n, 1)."""
    log_p, log_q = F.log_softmax(first, dim=-1), F.log_softmax(second, dim=-1)
    both = log_p + log_q
    cross_entropies = -(1 - eps) * both.gather(1, labels).sum() - eps * both.mean(dim=-1).sum()
    divergences = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum()  # KL(p || q) + KL(q || p)
    return cross_entropies + weight * divergences


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
