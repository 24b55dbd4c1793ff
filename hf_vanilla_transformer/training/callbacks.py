"""Callbacks of a run: its log on the console, and the warm-up of dropout."""

from collections.abc import Callable
from typing import Any

from torch import nn
from tqdm import tqdm
from transformers import TrainerCallback, TrainerState

from ..data.batching import TokenBudgetBatchSampler
from .evaluation import TranslationMetrics


class Console(TrainerCallback):
    """Prints a run's log line by line, with a progress bar on standard error if that is a terminal.

    Args:
        metrics: Provides the samples and the scores of the last evaluation.
        say: Is called with each line; it may print to the same terminal.
    """

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


# Attributes of modules that give rates to `nn.functional.dropout`, in this package's model and in transformers' others.
RATES = ("dropout", "attention_dropout", "activation_dropout")


class DropoutWarmup(TrainerCallback):
    """Raises all dropout of a model linearly from 0 to each module's own rate over the first updates.

    Curriculum dropout (Morerio et al. 2017, arXiv:1703.06229). A small model under much dropout takes long to find out
    what to attend to; without it at first, it learns that within a few epochs, and is regularised afterwards.

    Args:
        updates: After how many updates dropout is what it is set to.
    """

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self.rates: list[tuple[nn.Module, str, Any]] = []  # module, attribute, final value

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
