"""Runs on packed batches: the updates of runs with padding, counted, resumed and regularised like those."""

import datasets
import pytest
import torch
from test_training import losses, rows, trainer_of, without_dropout
from transformers import AutoTokenizer, MarianConfig, MarianMTModel, TrainerCallback

from hf_vanilla_transformer.data import packing
from hf_vanilla_transformer.engine.training.packing import PackedForward
from hf_vanilla_transformer.training.recipe import RecipeError, parse_recipe
from hf_vanilla_transformer.training.trainer import VanillaTransformerTrainer

ALL = 4096  # tokens: every batch has all pairs
RDROP = {"rdrop_alpha": 5.0}
SIMCUT = {"simcut_alpha": 3.0, "simcut_p": 1 - 1e-12}  # it cuts all that it may, so that nothing is random


def run_of(checkpoint, folder, **options):
    """A run without dropout."""
    trainer = trainer_of(checkpoint, folder, **{"per_device_train_batch_tokens": ALL, **options})
    without_dropout(trainer.model)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "options",
    [{}, {"bf16": True}, {"training_shortcuts": False}, RDROP, SIMCUT, {"label_smoothing_factor": 0.1}],
    ids=str,
)
def test_updates_are_those_of_padded_batches(tiny_checkpoint, tmp_path, options, monkeypatch):
    monkeypatch.setattr(packing, "ROW_TOKENS", 64)
    padded, packed = (run_of(tiny_checkpoint, tmp_path, packed=is_packed, **options) for is_packed in (False, True))
    assert losses(packed) == pytest.approx(losses(padded), rel=1e-2 if "bf16" in options else 1e-5)
    assert packed.target_tokens == padded.target_tokens == 4 * sum(map(len, packed.train_dataset["labels"]))
