"""Training in which two predictions of each target token have to agree: R-Drop and SimCut.

A batch becomes one of twice the size, whose two halves are the same sentences under different dropout. p and q are the
predictions of the first and of the second half at a target token:

- R-Drop (Liang et al. 2021, arXiv:2106.14448, eq. 4): CE(p) + CE(q) + alpha * (KL(p || q) + KL(q || p)) / 2.
- SimCut (Gao et al. 2022, arXiv:2206.02368): CE(p) + alpha * KL(p || q), where token embeddings of the second half are
  zeroed at random, on both sides. The gradient flows through p and q, as the authors recommend.

CE is the model's smoothed cross-entropy. All of it is summed over target tokens and divided by their number in the
update, as CE alone is, so that accumulation and several processes change nothing.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .recipe import RecipeError, VanillaTransformerTrainingArguments
from .weight_average import WeightAverageTrainer

LOGITS_PER_CHUNK = 2**18  # 1 MiB in float32: half a dozen such tensors stay in the cache


@dataclass(frozen=True)
class Consistency:
    """A loss of two predictions.

    Attributes:
        forward_kl: The weight of KL(p || q).
        reverse_kl: The weight of KL(q || p).
        second_cross_entropy: Whether the cross-entropy of q counts too.
        cut: The probability with which a token embedding of the second half is zeroed.
    """

    forward_kl: float
    reverse_kl: float
    second_cross_entropy: bool
    cut: float

    @classmethod
    def of(cls, args: VanillaTransformerTrainingArguments) -> "Consistency | None":
        """Returns the loss of a run's arguments; None: the cross-entropy alone."""
        if args.rdrop_alpha:
            return cls(args.rdrop_alpha / 2, args.rdrop_alpha / 2, second_cross_entropy=True, cut=0.0)
        if args.simcut_alpha:
            return cls(args.simcut_alpha, 0.0, second_cross_entropy=False, cut=args.simcut_p)
        return None

    @contextmanager
    def installed(self, model: VanillaTransformerForConditionalGeneration) -> Iterator[None]:
        """Lets a model compute this loss of doubled batches, and cut the second half of them."""
        plain, config = model.loss_function, model.config
        kept: dict[nn.Module, list[int]] = {}  # the stacks may share one module
        stacks = (model.model.encoder, config.eos_token_id), (model.model.decoder, config.decoder_start_token_id)
        for stack, end in stacks if self.cut else ():
            ends = end if isinstance(end, list) else [] if end is None else [end]
            kept.setdefault(stack.embed_tokens, []).extend(ends)
        with ExitStack() as hooks:
            for embeddings, ends in kept.items():
                hooks.enter_context(embeddings.register_forward_hook(partial(self.cut_second_half, ends)))
            try:
                model.loss_function = self.loss
                yield
            finally:
                model.loss_function = plain

    def cut_second_half(self, ends: list[int], module: nn.Module, args: tuple[Tensor], x: Tensor) -> Tensor:
        """Zeroes embeddings x, (2B, T, d_model), at random, but never that of a source's end or a target's start."""
        ids = args[0][len(x) // 2 :]  # (B, T)
        keep = torch.rand(ids.shape, device=ids.device) >= self.cut
        keep |= torch.isin(ids, torch.tensor(ends, dtype=ids.dtype, device=ids.device))
        return x * torch.cat([torch.ones_like(keep), keep])[..., None]

    def loss(
        self,
        logits: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        label_smoothing: float = 0.0,
        **kwargs: object,
    ) -> Tensor:
        """Computes the loss of N targets; only a chunk of them is ever held in float32.

        Args:
            logits: (2N, V), the first half's and the second half's.
            labels: (2N), none of them -100.
            num_items_in_batch: Targets of the complete update; None: N.
            label_smoothing: eps_ls.
            **kwargs: Arguments of other losses.
        """
        items = len(labels) // 2 if num_items_in_batch is None else num_items_in_batch
        total: Tensor = _SummedLoss.apply(logits, labels[: len(labels) // 2], label_smoothing, self)  # type: ignore[no-untyped-call]
        return total / torch.as_tensor(items, device=logits.device).clamp(min=1)

    def chunk(self, first: Tensor, second: Tensor, labels: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the summed loss of n targets, and its gradients.

        With d = log p - log q and the smoothed targets t, the gradients by the first half's logits are
        p (d - KL(p || q)) of KL(p || q), p - q of KL(q || p), and p - t of CE(p); by the second half's alike.

        Args:
            first: Logits, (n, V).
            second: Likewise.
            labels: (n, 1).
            eps: eps_ls.
        """
        forward, reverse, both = self.forward_kl, self.reverse_kl, float(self.second_cross_entropy)
        log_p, log_q = F.log_softmax(first, dim=-1), F.log_softmax(second, dim=-1)
        loss = torch.zeros((), dtype=first.dtype, device=first.device)
        for weight, log in ((1.0, log_p), (both, log_q)):
            loss -= weight * ((1 - eps) * log.gather(1, labels).sum() + eps * log.mean(dim=-1).sum())
        difference = log_p - log_q
        p, q = log_p.exp_(), log_q.exp_()
        p_difference, q_difference = p * difference, difference.mul_(q)
        p_to_q, q_to_p = p_difference.sum(-1, keepdim=True), -q_difference.sum(-1, keepdim=True)
        loss += forward * p_to_q.sum() + reverse * q_to_p.sum()
        of_first = p_difference.mul_(forward).addcmul_(p, 1 + reverse - forward * p_to_q).sub_(q, alpha=reverse)
        of_second = q_difference.mul_(-reverse).addcmul_(q, both + forward - reverse * q_to_p).sub_(p, alpha=forward)
        for weight, gradient in ((1.0, of_first), (both, of_second)):
            gradient.sub_(weight * eps / gradient.shape[1])
            gradient.scatter_add_(1, labels, gradient.new_full(labels.shape, weight * (eps - 1)))
        return loss, of_first, of_second


class _SummedLoss(torch.autograd.Function):
    """The loss of logits, (2N, V), summed; gradients are computed with it, so that no probabilities are kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, eps: float, loss: Consistency) -> Tensor:
        exact, rows = torch.promote_types(logits.dtype, torch.float32), max(LOGITS_PER_CHUNK // logits.shape[-1], 1)
        total = torch.zeros((), dtype=exact, device=logits.device)
        ctx.gradient = torch.empty_like(logits)
        (first, second), (of_first, of_second) = logits.chunk(2), ctx.gradient.chunk(2)
        with torch.autocast(logits.device.type, enabled=False):
            for start in range(0, len(labels), rows):
                own = slice(start, start + rows)
                halves = first[own].to(exact), second[own].to(exact)
                part, of_first[own], of_second[own] = loss.chunk(*halves, labels[own, None], eps)
                total += part
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gradient * grad_output, None, None, None


class ConsistencyTrainer(WeightAverageTrainer):
    """Seq2SeqTrainer with R-Drop and SimCut, as its arguments say."""

    args: VanillaTransformerTrainingArguments

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._consistency = Consistency.of(self.args)
        if self._consistency is not None:
            self._check_consistency()

    def _check_consistency(self) -> None:
        model, names = self.model, "rdrop_alpha and simcut_alpha"
        if not isinstance(model, VanillaTransformerForConditionalGeneration):
            raise RecipeError(f"{names} are for this package's model, not {type(model).__name__}; leave them out")
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise RecipeError(
                f"{names} need the model's own loss; set label_smoothing in the model's configuration instead of "
                "label_smoothing_factor, and leave compute_loss_func out"
            )
        is_compiled = self.args.torch_compile and not self.args.packed
        if is_compiled or model._compiled_call_impl is not None:  # it overlooks the hook that cuts
            raise RecipeError(f"{names} don't work with torch.compile; leave torch_compile out")
        if self.is_fsdp_enabled:
            raise RecipeError(f"{names} need the complete model in each process; train without FSDP")

    def compute_loss(
        self, model: nn.Module, inputs: Mapping[str, Tensor | bool], *args: object, **kwargs: object
    ) -> Tensor:
        """The loss of two predictions in training, and the cross-entropy alone in evaluations."""
        if self._consistency is None or not model.training or "labels" not in inputs:
            return super().compute_loss(model, inputs, *args, **kwargs)
        doubled = {name: torch.cat([x, x]) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        with self._consistency.installed(self.model):
            return super().compute_loss(model, {**doubled, "skip_logits": True}, *args, **kwargs)
