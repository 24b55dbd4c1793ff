"""Runs on packed batches: the updates of runs with padding, counted, resumed and regularised like those."""

import pytest
import torch
import yaml
from datasets import IterableDataset
from small_runs import recipe_in
from test_training import assert_resuming_is_bitwise, losses, other_trainer, rows, trainer_of, without_dropout
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from hf_vanilla_transformer import engine
from hf_vanilla_transformer.cli import main
from hf_vanilla_transformer.data.packing import PackingCollator
from hf_vanilla_transformer.engine.training.packing import PackedForward
from hf_vanilla_transformer.training import preflight, trainer
from hf_vanilla_transformer.training.options import RecipeError

ALL = 4096  # tokens: every batch has all pairs
RDROP = {"rdrop_alpha": 5.0}
COMPILED = {"packed": True, "torch_compile": True, "torch_compile_backend": "aot_eager"}  # all but a compiler's code


def run_of(checkpoint, folder, **options):
    """A run without dropout."""
    run = trainer_of(checkpoint, folder, **{"per_device_train_batch_tokens": ALL, **options})
    run.data_collator = DataCollatorForSeq2Seq(run.processing_class, model=run.model)
    without_dropout(run.model)
    run.train()
    return run


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"bf16": True}, {"training_shortcuts": False}, {"label_smoothing_factor": 0.1}, RDROP),
        *({"gradient_checkpointing": True}, {"dropout_warmup_steps": 2}, {"gradient_accumulation_steps": 2}),
    ],
    ids=str,
)
def test_updates_are_those_of_padded_batches(tiny_checkpoint, tmp_path, options, monkeypatch):
    monkeypatch.setattr(trainer, "ROW_TOKENS", 64)
    plain = {name: value for name, value in options.items() if name != "gradient_accumulation_steps"}
    padded, packed = (run_of(tiny_checkpoint, tmp_path, **one) for one in (plain, {"packed": True, **options}))
    assert losses(packed) == pytest.approx(losses(padded), rel=1e-2 if "bf16" in options else 1e-5)
    assert packed.target_tokens == padded.target_tokens == 4 * sum(map(len, packed.train_dataset["labels"]))
    sampler = packed.get_train_dataloader().batch_sampler  # an update has all pairs, in one batch or in two
    assert (len(sampler), sampler.shape[0] > 5) == (options.get("gradient_accumulation_steps", 1), True)
    assert "forward" not in vars(packed.model.model)


@pytest.mark.parametrize("options", [RDROP, pytest.param({"bf16": True}, marks=pytest.mark.hard)], ids=str)
def test_compiled_updates_are_the_same(tiny_checkpoint, tmp_path, options, monkeypatch):
    torch.compiler.reset()  # it compiles a function for eight models in a process at most
    warned = []
    monkeypatch.setattr("hf_vanilla_transformer.engine.training.packing.logger.warning", warned.append)
    plain, compiled = (run_of(tiny_checkpoint, tmp_path, **one, **options) for one in ({"packed": True}, COMPILED))
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-2 if options == {"bf16": True} else 1e-5)
    assert not warned


def test_evaluations_see_the_plain_model(tiny_checkpoint, tmp_path):
    tokenizer, seen = AutoTokenizer.from_pretrained(tiny_checkpoint), []

    def compute_metrics(predictions):
        seen.append(isinstance(vars(run.model.model).get("forward"), PackedForward))
        return {}

    options = {"eval_strategy": "steps", "eval_steps": 1, "compute_metrics": compute_metrics, "max_steps": 2}
    generation = {"predict_with_generate": True, "generation_num_beams": 1, "generation_max_length": 4}
    run = trainer_of(tiny_checkpoint, tmp_path, eval_dataset=rows(tokenizer, 4), **options, **generation, **COMPILED)
    run.train()
    assert seen == [False] * 2


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
        collator = PackingCollator(model.config, (5, 256, 256)) if packed else DataCollatorForSeq2Seq(tokenizer)
        options = {"per_device_train_batch_size": 20, "max_steps": 3, "logging_steps": 1, "report_to": "none"}
        args = Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True, save_strategy="no", **options)
        stock = Seq2SeqTrainer(model=model, args=args, data_collator=collator, train_dataset=rows(tokenizer))
        with engine.training_shortcuts(model):
            stock.train()
        found.append(losses(stock))
    assert found[1] == pytest.approx(found[0], rel=1e-4)


# ---- The command ----
def test_the_command_packs_and_shows_time_and_filler(tmp_path, capsys):
    recipe = {**recipe_in(tmp_path), "packed": True, "per_device_train_batch_tokens": 512}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    command = ["train", "--config", str(tmp_path / "recipe.yaml")]
    assert not main([*command, "--dry-run"])
    assert "after the first, which took" in capsys.readouterr().out
    assert not main(command)
    assert "Batches: " in capsys.readouterr().out
    assert not main([*command, "--resume", "--max-steps", "6"])


def test_other_models_and_streams_are_refused(tiny_checkpoint, tmp_path):
    run = trainer_of(tiny_checkpoint, tmp_path, packed=True)
    with pytest.raises(RecipeError, match="packed is for this package's model, not MarianMTModel"):
        other_trainer(tiny_checkpoint, run.args)
    with pytest.raises(RecipeError, match="which a stream doesn't have"):
        trainer_of(tiny_checkpoint, tmp_path, packed=True, train_dataset=IterableDataset.from_generator(lambda: []))


def test_operations_of_an_update_are_counted(tiny_checkpoint, tmp_path):
    run = run_of(tiny_checkpoint, tmp_path, packed=True)
    source, target = (sum(map(len, run.train_dataset[name])) for name in ("input_ids", "labels"))
    d, f, layers, vocabulary = 32, 64, 2, run.model.config.vocab_size
    of_source = layers * (4 * d * d + 2 * d * f) + layers * 2 * d * d
    of_target = layers * (6 * d * d + 2 * d * f) + vocabulary * d
    assert preflight.update_flops(run) == pytest.approx(6 * (of_source * source + of_target * target))
    assert preflight.peak_flops(torch.device("cpu"), in_bfloat16=False, side=64) > 1e6
