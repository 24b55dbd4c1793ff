"""What a training run prints: a progress bar on a terminal, a line per log, scores and samples of each evaluation."""

import sys
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback

from ..data.batching import TokenBudgetBatchSampler
from ..training.trainer import TranslationMetrics


class Console(TrainerCallback):
    """Prints a run's log to standard output, and a progress bar to standard error if that is a terminal.

    Args:
        metrics: Provides the samples and BLEU's signature of the last evaluation.
    """

    def __init__(self, metrics: TranslationMetrics) -> None:
        self.metrics = metrics
        self.bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Opens the bar at the update where the run starts or resumes."""
        if state.is_world_process_zero:
            # disable=None: a bar only if standard error is a terminal.
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit=" updates", disable=None)
            batches = getattr(kwargs.get("train_dataloader"), "batch_sampler", None)
            if isinstance(batches, TokenBudgetBatchSampler):
                self._show(f"Batches: {len(batches):,} per epoch and device, {batches.padding_waste:.1%} padding")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Moves the bar."""
        if self.bar is not None:
            self.bar.update(1)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Shows the loss and the speed since the last line."""
        if self.bar is None or "loss" not in logs:
            return
        speed = f"{logs['tokens_per_second']:,.0f} tokens/s"
        self.bar.set_postfix_str(f"loss {logs['loss']:.3f}, {speed}")
        self._show(
            f"update {state.global_step:,}, epoch {state.epoch:.1f}, {logs['target_tokens']:,} target tokens: "
            f"loss {logs['loss']:.3f}, learning rate {logs['learning_rate']:.2e}, {speed}"
        )

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Shows the scores and a few translations."""
        if self.bar is None or "eval_perplexity" not in metrics:
            return
        line = f"update {state.global_step:,}, validation: perplexity {metrics['eval_perplexity']:.3f}"
        if "eval_bleu" in metrics:
            bleu, chrf = metrics["eval_bleu"], metrics["eval_chrf"]
            line += f", BLEU {bleu:.2f} ({self.metrics.signature}), chrF {chrf:.2f}"
        self._show(line)
        for source, translation, reference in self.metrics.samples:
            self._show(f"  source:      {source}\n  translation: {translation}\n  reference:   {reference}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes the bar."""
        if self.bar is not None:
            self.bar.close()

    def _show(self, text: str) -> None:
        tqdm.write(text)
        sys.stdout.flush()
