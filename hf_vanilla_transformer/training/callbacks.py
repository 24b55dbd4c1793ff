"""Callbacks of a run: its log on the console, the end of one that diverges, and the warm-up of dropout."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import reduce
from torch import Tensor, nn
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.utils import logging

from ..checkpoints.completeness import checkpoints_in
from ..checkpoints.loading import not_finite
from ..data.batching import TokenBudgetBatchSampler
from .evaluation import TranslationMetrics

logger = logging.get_logger(__name__)


class Console(TrainerCallback):
    """Prints a run's log line by line, with a progress bar on standard error if that is a terminal."""

    def __init__(self, metrics: TranslationMetrics, say: Callable[[str], object]) -> None:
        self.metrics, self.say = metrics, say
        self.bar: tqdm | None = None

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Opens the bar at the update where the run starts or resumes."""
        if state.is_world_process_zero:
            # disable=None: a bar only if standard error is a terminal.
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit=" updates", disable=None)
            batches = getattr(kwargs.get("train_dataloader"), "batch_sampler", None)
            if isinstance(batches, TokenBudgetBatchSampler):
                self._show(f"Batches: {len(batches):,} per epoch and device, {batches.padding_waste:.1%} padding")

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        """Moves the bar."""
        if self.bar is not None:
            self.bar.update(1)

    def on_log(
        self, args: object, state: TrainerState, control: object, logs: dict[str, float], **kwargs: object
    ) -> None:
        """Shows the loss and the speed since the last line."""
        if self.bar is None or "loss" not in logs:
            return
        speed = f"{logs['tokens_per_second']:,.0f} tokens/s"
        self.bar.set_postfix_str(f"loss {logs['loss']:.3f}, {speed}")
        self._show(
            f"update {state.global_step:,}, epoch {state.epoch:.1f}, {logs['target_tokens']:,} target tokens: "
            f"loss {logs['loss']:.3f}, learning rate {logs['learning_rate']:.2e}, {speed}"
        )

    def on_evaluate(
        self, args: object, state: TrainerState, control: object, metrics: dict[str, float], **kwargs: object
    ) -> None:
        """Shows the scores and a few translations."""
        if self.bar is None or "eval_perplexity" not in metrics:
            return
        line = f"update {state.global_step:,}, validation: perplexity {metrics['eval_perplexity']:.3f}"
        scores = self.metrics.scores if f"eval_{self.metrics.measures.names[0]}" in metrics else {}
        self._show(", ".join([line, *map(str, scores.values())]))
        for source, translation, reference in self.metrics.samples:
            self._show(f"  source:      {source}\n  translation: {translation}\n  reference:   {reference}")

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        """Closes the bar."""
        if self.bar is not None:
            self.bar.close()

    def _show(self, text: str) -> None:
        with tqdm.external_write_mode():  # hides the bar meanwhile
            self.say(text)


class DivergedError(RuntimeError):
    """Losses aren't finite any more; the message says since when, and the fix."""


class Divergence(TrainerCallback):
    """Ends a training that diverges; no checkpoint is saved after an update whose loss or weights aren't finite.

    Gradients that aren't finite show in the weights, and so in the next loss. With FSDP, each process has some weights.
    """

    def __init__(self) -> None:
        self.loss: Tensor | float = 0.0  # of the update so far
        self.failures = 0  # updates in a row whose loss was not finite

    def add(self, loss: Tensor) -> None:
        """Adds the loss of a batch to that of its update."""
        self.loss = self.loss + loss.detach()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Counts failures, and ends the training after `max_nonfinite_updates`."""
        failed = in_any_process(not math.isfinite(float(self.loss)), args.device)
        self.failures, self.loss = self.failures + 1 if failed else 0, 0.0
        if 0 < args.max_nonfinite_updates <= self.failures:
            saved = checkpoints_in(Path(args.output_dir or ""))
            kept = f"the last checkpoint is {saved[-1].name}" if saved else "no checkpoint was saved before"
            precision = "bf16 in place of fp16, " if args.fp16 else ""
            raise DivergedError(
                f"the training diverged: the loss has been NaN or infinite in {self.failures} updates in a row, since "
                f"update {state.global_step - self.failures + 1:,}; try {precision}a lower learning_rate (it reached "
                f"{kwargs['lr_scheduler'].get_last_lr()[0]:.1e}), a longer warmup_steps or max_grad_norm 1; {kept}"
            )
        self.on_epoch_end(args, state, control, **kwargs)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Withdraws a checkpoint."""
        if control.should_save and in_any_process(bool(not_finite(kwargs["model"])), args.device):
            logger.warning(f"checkpoint-{state.global_step} is not saved, as weights contain NaN or infinity")
            control.should_save = False
        control.should_save &= not self.failures


def in_any_process(found: bool, device: torch.device) -> bool:
    """Whether one of the processes has found something: all have to agree, or some would wait for the others."""
    return bool(reduce(torch.tensor(float(found), device=device), reduction="sum").item())


# Attributes of modules that give rates to `nn.functional.dropout`, in this package's model and in transformers' others.
RATES = ("dropout", "attention_dropout", "activation_dropout")


class DropoutWarmup(TrainerCallback):
    """Raises all dropout of a model linearly from 0 to each module's own rate over the first updates.

    Curriculum dropout (Morerio et al. 2017, arXiv:1703.06229). A small model under much dropout takes long to find out
    what to attend to; without it at first, it learns that within a few epochs, and is regularised afterwards.
    """

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self.rates: list[tuple[nn.Module, str, float]] = []  # module, attribute, final value

    def on_train_begin(self, *args: object, model: nn.Module, **kwargs: object) -> None:
        """Notes the rates."""
        self.on_train_end()  # of a training that was interrupted
        self.rates = []
        for module in model.modules():
            names = ("p",) if isinstance(module, nn.Dropout) else RATES
            found = [(name, getattr(module, name, None)) for name in names]
            self.rates += [(module, name, rate) for name, rate in found if isinstance(rate, int | float)]

    def on_step_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Sets the rates for the next update."""
        share = min(state.global_step / self.updates, 1.0)
        for module, name, rate in self.rates:
            setattr(module, name, share * rate)

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        """Restores the rates."""
        for module, name, rate in self.rates:
            setattr(module, name, rate)
