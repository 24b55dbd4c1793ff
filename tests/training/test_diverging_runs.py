"""A run that diverges stops, says so, and keeps its last good checkpoint."""

from pathlib import Path

import pytest
from small_runs import Poison, add_callback

from hf_vanilla_transformer.checkpoints.completeness import checkpoints_in
from hf_vanilla_transformer.checkpoints.loading import load_model
from hf_vanilla_transformer.training.trainer import VanillaTransformerTrainer


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_the_last_good_checkpoint_is_kept_and_resumed_from(train, recipe, caplog, monkeypatch, value):
    recipe |= {"max_steps": 30, "average_last": 0, "save_steps": 1, "logging_steps": 1}
    with monkeypatch.context() as patch:
        add_callback(patch, Poison(3, value))
        result = train(recipe, "--save-total-limit", "1")
    assert result.code == 1
    assert "the training diverged: the loss has been NaN or infinite in 3 updates in a row" in result.error
    parts = ("learning_rate", "warmup_steps", "the last checkpoint is checkpoint-2")
    assert all(part in result.error for part in parts)
    assert "since update 4" in result.error  # the first one that computed with the poisoned weight
    assert [checkpoint.name for checkpoint in checkpoints_in(Path(recipe["output_dir"]))] == ["checkpoint-2"]
    assert "checkpoint-3 is not saved" in caplog.text
    result = train(recipe, "--resume", "--learning-rate", "1e-4", "--max-steps", "4")
    assert result.code == 0
    assert "checkpoint-2" in result.out
    load_model(recipe["output_dir"])


def test_without_a_limit_the_model_is_refused_at_the_end(train, recipe, monkeypatch):
    add_callback(monkeypatch, Poison(1, float("nan")))
    recipe |= {"max_steps": 4, "average_last": 0, "logging_steps": 1, "max_nonfinite_updates": 0}
    result = train(recipe)
    assert "loss nan" in result.out  # and not 0.000
    assert result.code == 1
    assert "contains NaN or infinity" in result.error
    assert checkpoints_in(Path(recipe["output_dir"])) == []


def test_single_losses_that_are_not_finite_do_not_end_a_run(train, recipe, monkeypatch):
    losses = iter([float("nan"), 1, float("inf"), float("nan"), 1, 1])
    plain = VanillaTransformerTrainer.training_step

    def step(self, model, inputs, *args, **kwargs):
        loss = plain(self, model, inputs, *args, **kwargs)
        value = next(losses)
        self._divergence.add(loss * 0 if value == 1 else loss * value)
        return loss

    monkeypatch.setattr(VanillaTransformerTrainer, "training_step", step)
    result = train({**recipe, "max_steps": 6, "average_last": 0, "save_steps": 3})
    assert result.code == 0
    # Update 3 is not saved, as its loss is not finite.
    assert [checkpoint.name for checkpoint in checkpoints_in(Path(recipe["output_dir"]))] == ["checkpoint-6"]
