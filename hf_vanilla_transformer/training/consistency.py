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

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .recipe import RecipeError, VanillaTransformerTrainingArguments
from .weight_average import WeightAverageTrainer

LOGITS_PER_CHUNK = 2**21  # 8 MiB in float32, of which a dozen exist at a time


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
        stacks = (model.model.encoder, config.eos_token_id), (model.model.decoder, config.decoder_start_token_id)
        with ExitStack() as hooks:
            for stack, end in stacks if self.cut else ():
                hook = partial(self.cut_second_half, end)
                hooks.enter_context(stack.embed_tokens.register_forward_hook(hook))
            try:
                model.loss_function = self.loss
                yield
            finally:
                model.loss_function = plain

    def cut_second_half(self, end: int | list[int] | None, module: nn.Module, args: tuple[Tensor], x: Tensor) -> Tensor:
        """Zeroes embeddings x, (2B, T, d_model), at random, but never that of a source's end or a target's start."""
        ids = args[0][len(x) // 2 :]  # (B, T)
        keep = torch.rand(ids.shape, device=ids.device) >= self.cut
        if end is not None:
            keep |= torch.isin(ids, torch.tensor(end, device=ids.device))
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
        first, second = logits.chunk(2)
        targets, rows = labels[: len(first)], max(LOGITS_PER_CHUNK // logits.shape[-1], 1)
        chunks = zip(*(torch.split(x, rows) for x in (first, second, targets)), strict=True)
        # A chunk is computed again in the backward pass, so that its probabilities needn't be kept until then.
        sums = [checkpoint(self.sum_over, *chunk, label_smoothing, use_reentrant=False) for chunk in chunks]
        items = len(targets) if num_items_in_batch is None else num_items_in_batch
        return torch.stack(sums).sum() / torch.as_tensor(items, device=logits.device).clamp(min=1)

    def sum_over(self, first: Tensor, second: Tensor, labels: Tensor, eps: float) -> Tensor:
        """The loss of some targets, summed: of logits, (n, V) each, and labels, (n)."""
        exact = torch.promote_types(first.dtype, torch.float32)
        log_p, log_q = (F.log_softmax(x.to(exact), dim=-1) for x in (first, second))
        loss = self.forward_kl * F.kl_div(log_q, log_p, reduction="sum", log_target=True)
        if self.reverse_kl:
            loss = loss + self.reverse_kl * F.kl_div(log_p, log_q, reduction="sum", log_target=True)
        for log_probabilities in (log_p, log_q) if self.second_cross_entropy else (log_p,):
            of_labels = log_probabilities.gather(1, labels[:, None])
            loss = loss - (1 - eps) * of_labels.sum() - eps * log_probabilities.mean(dim=-1).sum()
        return loss


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
        if self.args.torch_compile or model._compiled_call_impl is not None:  # it overlooks the hook that cuts
            raise RecipeError(f"{names} don't work with torch.compile; leave torch_compile out")
        if self.is_fsdp_enabled or self.args.n_gpu > 1:
            raise RecipeError(
                f"{names} need the complete model in each process; start one process per device by `torchrun`, without "
                "FSDP"
            )

    def compute_loss(
        self, model: nn.Module, inputs: Mapping[str, Tensor | bool], *args: object, **kwargs: object
    ) -> Tensor:
        """The loss of two predictions in training, and the cross-entropy alone in evaluations."""
        if self._consistency is None or not model.training or "labels" not in inputs:
            return super().compute_loss(model, inputs, *args, **kwargs)
        doubled = {name: torch.cat([x, x]) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        with self._consistency.installed(self.model):
            return super().compute_loss(model, {**doubled, "skip_logits": True}, *args, **kwargs)
