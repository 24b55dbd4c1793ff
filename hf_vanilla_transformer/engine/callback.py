"""The engine for evaluations of a stock Seq2SeqTrainer."""

from typing import Any

from transformers import PreTrainedModel, TrainerCallback, TrainerControl
from transformers.utils import logging

from .attachment import EngineError, attach, detach

logger = logging.get_logger(__name__)


class EngineCallback(TrainerCallback):
    """Attaches the engine to the model while a Trainer evaluates: `Seq2SeqTrainer(..., callbacks=[EngineCallback()])`.

    Trainers don't announce an evaluation that is called by itself, `trainer.evaluate()` or `trainer.predict()`: the
    engine then decodes from the second batch on. A model that isn't supported is evaluated without it, and a warning
    says why. `VanillaTransformerTrainer` needs no callback.

    Args:
        compute_type: As for `engine.attach`.
    """

    def __init__(self, compute_type: str = "default") -> None:
        self.compute_type = compute_type
        self._is_ours = False  # whether the engine on the model is this callback's

    def on_step_end(self, args: object, state: object, control: TrainerControl, **kwargs: Any) -> None:
        """Attaches the engine if an evaluation follows."""
        if control.should_evaluate:
            self._attach(kwargs["model"])

    on_epoch_end = on_step_end

    def on_prediction_step(self, *args: object, **kwargs: Any) -> None:
        """Attaches the engine after the first batch of an evaluation that wasn't announced."""
        self._attach(kwargs["model"])

    def on_evaluate(self, *args: object, **kwargs: Any) -> None:
        """Detaches the engine."""
        if self._is_ours:
            detach(kwargs["model"])
        self._is_ours = False

    on_predict = on_step_begin = on_train_end = on_evaluate

    def _attach(self, model: PreTrainedModel) -> None:
        if self._is_ours or getattr(model, "engine", None) is not None:
            return
        try:
            attach(model, self.compute_type)
            self._is_ours = True
        except EngineError as error:
            logger.warning_once(f"The evaluation runs without the engine: {error}.")
