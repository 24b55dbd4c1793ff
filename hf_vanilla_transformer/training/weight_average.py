"""An exponential moving average of the weights (Polyak and Juditsky 1992), beside those that are trained."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from ..checkpoints.completeness import WEIGHT_AVERAGE
from .arguments import RecipeError, VanillaTransformerTrainingArguments
from .sharding import ShardingTrainer

Tensors = tuple[Tensor, ...] | list[Tensor]


class WeightAverage(TrainerCallback):
    """The average: after update n, decay * average + (1 - decay) * weights, with decay at most (1 + n) / (10 + n).

    The smaller decay at first, as in TensorFlow's ExponentialMovingAverage, lets the average forget the weights that
    training starts with.

    Args:
        model: Is trained; all of its parameters are averaged.
        decay: Of the average, from 0 to 1: 0.999 is about the mean of the last thousand updates.
        checkpoint: A folder with the average of a run that is resumed; None: the average starts at the weights.
    """

    def __init__(self, model: nn.Module, decay: float, checkpoint: str | None = None) -> None:
        self.weights = nn.ParameterList(model.parameters())  # the model's own, in their order
        self.decay = decay
        self.average = AveragedModel(self.weights, multi_avg_fn=self._move)
        if checkpoint is not None:
            saved = torch.load(Path(checkpoint, WEIGHT_AVERAGE), map_location="cpu", weights_only=True)
            self.average.load_state_dict(saved)

    def _move(self, average: Tensors, weights: Tensors, n: Tensor | int) -> None:
        decay = min(self.decay, (1 + int(n)) / (10 + int(n)))
        get_ema_multi_avg_fn(decay)(average, weights, n)  # type: ignore[no-untyped-call]

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        """Moves the average after an update."""
        self.average.update_parameters(self.weights)

    @torch.no_grad()
    def on_train_end(self, *args: object, **kwargs: object) -> None:
        """Makes the average the model's weights: what evaluations have measured is what is saved."""
        self._copy(self.average.parameters())

    def save(self, checkpoint: str) -> None:
        """Writes the average into a checkpoint's folder."""
        torch.save(self.average.state_dict(), Path(checkpoint, WEIGHT_AVERAGE))

    @contextmanager
    @torch.no_grad()
    def applied(self) -> Iterator[None]:
        """Gives the model the average inside of the context."""
        trained = [weight.clone() for weight in self.weights]
        self._copy(self.average.parameters())
        try:
            yield
        finally:
            self._copy(trained)

    @torch.no_grad()
    def _copy(self, values: Iterable[Tensor]) -> None:
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)


class WeightAverageTrainer(ShardingTrainer):
    """Seq2SeqTrainer with `ema_decay`: evaluations measure the average of the weights, and checkpoints contain both.

    At the end of training, the model's weights are the average.
    """

    args: VanillaTransformerTrainingArguments
    weight_average: WeightAverage | None = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        if self.args.ema_decay and self.is_fsdp_enabled:
            raise RecipeError("ema_decay needs the complete model in each process; train without FSDP")

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader[object], resume_from_checkpoint: str | None
    ) -> object:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self.weight_average is not None:  # of an earlier call
            self.remove_callback(self.weight_average)
        if self.args.ema_decay:
            self.weight_average = WeightAverage(self.model, self.args.ema_decay, resume_from_checkpoint)
            self.add_callback(self.weight_average)
        return prepared

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.weight_average is not None and self.args.should_save:
            self.weight_average.save(output_dir)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Gives the model the average for a while, to save or to evaluate it; without `ema_decay`, nothing changes."""
        if self.weight_average is None:
            yield
        else:
            with self.weight_average.applied():
                yield
