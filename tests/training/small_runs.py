"""A corpus of fifty pairs and a recipe that trains on it in a second, for tests of the commands."""

from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from hf_vanilla_transformer.training.run import Run
from hf_vanilla_transformer.training.trainer import VanillaTransformerTrainer

PAIRS = [(f"{'half past ' * (n % 4)}nine {n}", f"{'halb zehn ' * (n % 3)}neun {n}") for n in range(50)]


def recipe_in(folder: Path) -> dict:
    """Writes the corpus into a folder, and returns the recipe, of a run in the folder `run` there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in (("train", PAIRS), ("val", PAIRS[:5]), ("test", PAIRS[5:12])):
        for side, suffix in ((0, "en"), (1, "de")):
            lines = "".join(f"{pair[side]}\n" for pair in pairs)
            (folder / f"{name}.{suffix}").write_text(lines, encoding="utf-8")
    return {
        "data_dir": str(folder), "train_source": ["train.en"], "train_target": ["train.de"],
        "validation_source": ["val.en"], "validation_target": ["val.de"],
        "test_source": ["test.en"], "test_target": ["test.de"],
        "preset": "tiny", "d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 300,
        "max_steps": 4, "warmup_steps": 2, "max_length": 128, "per_device_train_batch_tokens": 128,
        "logging_steps": 2, "save_steps": 2, "average_last": 2, "output_dir": str(folder / "run"),
    }  # fmt: skip


class Poison(TrainerCallback):
    """Sets a weight to a value after an update."""

    def __init__(self, update: int, value: float) -> None:
        self.update, self.value = update, value

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 == self.update:
            with torch.no_grad():
                next(model.parameters())[0, 0] = self.value


def add_callback(patch: pytest.MonkeyPatch, callback: TrainerCallback) -> None:
    """Lets the trainers of the command have one more callback, once they are prepared."""
    prepare = Run.prepare

    def prepared(run: Run) -> VanillaTransformerTrainer:
        trainer = prepare(run)
        trainer.add_callback(callback)
        return trainer

    patch.setattr(Run, "prepare", prepared)
