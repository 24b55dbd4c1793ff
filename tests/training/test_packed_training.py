"""Runs on packed batches: the updates of runs with padding, counted, resumed and regularised like those."""

import re

import pytest
import torch
from datasets import IterableDataset
from test_training import assert_resuming_is_bitwise, losses, other_trainer, rows, trainer_of, without_dropout
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from hf_vanilla_transformer import engine
from hf_vanilla_transformer.data.packing import PackingCollator
from hf_vanilla_transformer.engine.training.packing import PackedForward
from hf_vanilla_transformer.training import trainer
from hf_vanilla_transformer.training.options import RecipeError

ALL = {"per_device_train_batch_tokens": 4096}  # every batch has all pairs
RDROP, PACKED = {"rdrop_alpha": 5.0}, {"packed": True}
COMPILED = {**PACKED, "torch_compile": True, "torch_compile_backend": "aot_eager"}  # all but a compiler's code


@pytest.fixture(autouse=True)
def _short_rows(monkeypatch):
    monkeypatch.setattr(trainer, "ROW_TOKENS", 64)


def run_of(checkpoint, folder, **options):
    """A run of two updates without dropout."""
    run = trainer_of(checkpoint, folder, max_steps=2, **ALL | options)
    run.data_collator = DataCollatorForSeq2Seq(run.processing_class, model=run.model)
    without_dropout(run.model)
    run.train()
    return run


@pytest.mark.parametrize(
    "options",
    [
        *({}, RDROP, {"bf16": True, "gradient_checkpointing": True}),
        {"training_shortcuts": False, "label_smoothing_factor": 0.1},
        {"dropout_warmup_steps": 2, "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
def test_updates_are_those_of_padded_batches(tiny_checkpoint, tmp_path, options):
    plain = {name: value for name, value in options.items() if name != "gradient_accumulation_steps"}
    padded, packed = (run_of(tiny_checkpoint, tmp_path, **one) for one in (plain, {"packed": True, **options}))
    assert losses(packed) == pytest.approx(losses(padded), rel=1e-2 if "bf16" in options else 1e-5)
    assert packed.target_tokens == padded.target_tokens == 2 * sum(map(len, packed.train_dataset["labels"]))
    sampler = packed.get_train_dataloader().batch_sampler  # an update has all pairs, in one batch or in two
    assert (len(sampler), sampler.shape[0] > 5) == (options.get("gradient_accumulation_steps", 1), True)
    assert "forward" not in vars(packed.model.model)


@pytest.mark.parametrize("options", [RDROP, pytest.param({"bf16": True}, marks=pytest.mark.hard)], ids=str)
def test_compiled_updates_are_the_same_and_evaluations_see_the_plain_model(
    tiny_checkpoint, tmp_path, options, monkeypatch
):
    torch.compiler.reset()  # it compiles a function for eight models in a process at most
    warned, runs, seen = [], [], []
    monkeypatch.setattr("hf_vanilla_transformer.engine.training.packing.logger.warning", warned.append)

    def compute_metrics(predictions):
        seen.append(isinstance(vars(runs[-1].model.model).get("forward"), PackedForward))
        return {}

    data = rows(AutoTokenizer.from_pretrained(tiny_checkpoint), 4)
    options = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "eval_dataset": data, **options, **ALL}
    for kind in (PACKED, COMPILED):
        runs.append(trainer_of(tiny_checkpoint, tmp_path, compute_metrics=compute_metrics, **options, **kind))
        without_dropout(runs[-1].model)
        runs[-1].train()
    plain, compiled = map(losses, runs)
    assert compiled == pytest.approx(plain, rel=1e-2 if "bf16" in options else 1e-5)
    assert seen == [False] * 4
    assert not warned


@pytest.mark.parametrize("options", [{}, RDROP, {"gradient_accumulation_steps": 2}], ids=str)
def test_resuming_is_bitwise(tiny_checkpoint, tmp_path, options):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "packed": True, **options}
    assert_resuming_is_bitwise(lambda: trainer_of(tiny_checkpoint, tmp_path, **settings), tmp_path / "checkpoint-2")


def test_transformers_trainer_takes_the_collator(tiny_checkpoint, tmp_path):
    """As docs/training.md has it."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    found = []
    for packed in (False, True):
        model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint, dropout=0.0)
        collator = PackingCollator(model.config, (20, 64, 64)) if packed else DataCollatorForSeq2Seq(tokenizer)
        options = {"per_device_train_batch_size": 20, "max_steps": 3, "logging_steps": 1, "report_to": "none"}
        args = Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True, save_strategy="no", **options)
        stock = Seq2SeqTrainer(model=model, args=args, data_collator=collator, train_dataset=rows(tokenizer))
        with engine.training_shortcuts(model):
            stock.train()
        found.append(losses(stock))
    assert found[1] == pytest.approx(found[0], rel=1e-4)


# ---- The command ----
def test_the_command_packs_and_shows_the_filler(train, recipe):
    result = train(recipe | {**PACKED, "per_device_train_batch_tokens": 512, "average_last": 0})
    assert result.code == 0, result.err
    assert re.search(r"Batches: .*%", result.out)


def test_other_models_and_streams_are_refused(tiny_checkpoint, tmp_path):
    run = trainer_of(tiny_checkpoint, tmp_path, packed=True)
    with pytest.raises(RecipeError, match="packed is for this package's model, not MarianMTModel"):
        other_trainer(tiny_checkpoint, run.args)
    with pytest.raises(RecipeError, match="which a stream doesn't have"):
        trainer_of(tiny_checkpoint, tmp_path, packed=True, train_dataset=IterableDataset.from_generator(lambda: []))
