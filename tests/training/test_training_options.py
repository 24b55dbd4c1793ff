"""Options of Seq2SeqTrainingArguments work in `vanilla-transformer train`, or are refused before anything is read."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_training import logged
from transformers.utils import logging

from hf_vanilla_transformer.checkpoints.completeness import checkpoints_in
from hf_vanilla_transformer.training import run as run_module
from hf_vanilla_transformer.training.arguments import VanillaTransformerTrainingArguments
from hf_vanilla_transformer.training.options import RANGES, RecipeError
from hf_vanilla_transformer.training.recipe import parse_recipe
from hf_vanilla_transformer.training.trainer import VanillaTransformerTrainer


@pytest.fixture
def process_as_before() -> Iterator[None]:
    """Undoes what options do to the whole process."""
    environment = dict(os.environ)
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def trained(train, recipe, monkeypatch, process_as_before) -> Callable[..., VanillaTransformerTrainer]:
    """Trains with options beside the recipe's, and returns the trainer."""
    trainers: list[VanillaTransformerTrainer] = []
    prepared = run_module.Run.prepare
    monkeypatch.setattr(run_module.Run, "prepare", lambda self: trainers.append(prepared(self)) or trainers[-1])

    def trained(**options: object) -> VanillaTransformerTrainer:
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", recipe["data_dir"] + "/figures")
        result = train(recipe | {"average_last": 0, "test_source": [], "test_target": []} | options)
        assert result.code == 0, result.err
        return trainers[0]

    return trained


def steps_with(trainer: VanillaTransformerTrainer, name: str) -> list[int]:
    """The updates after which something was logged."""
    return [entry["step"] for entry in trainer.state.log_history if name in entry]


# Options that work: runs with many of them at once, and what shows that each has had its effect.


def test_options_of_intervals(trained):
    trainer = trained(
        max_steps=3, learning_rate=0.01, lr_scheduler_type="linear", warmup_steps=1, optim="adamw_torch",
        weight_decay=0.01, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-7, gradient_accumulation_steps=2,
        max_grad_norm=0.5, seed=7, data_seed=8, logging_steps=1, eval_strategy="steps", eval_steps=1, eval_delay=2,
        eval_on_start=True, save_steps=1, save_total_limit=1, per_device_eval_batch_size=2, generation_max_length=9,
        generation_num_beams=2, include_num_input_tokens_seen="non_padding", report_to=["tensorboard"],
        log_level="error",
    )  # fmt: skip
    optimizer, folder = trainer.optimizer.optimizer, Path(trainer.args.output_dir)
    group = optimizer.param_groups[0]
    assert isinstance(optimizer, torch.optim.AdamW)
    assert not group["fused"]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.9), 1e-7, 0.01)
    assert logged(trainer, "learning_rate") == pytest.approx([0.0, 0.01, 0.005])  # warm-up, peak, half way down
    assert steps_with(trainer, "loss") == [1, 2, 3]
    assert steps_with(trainer, "eval_loss") == [0, 2, 3]
    assert [one.name for one in checkpoints_in(folder)] == ["checkpoint-3"]  # each update saves one, and one is kept
    assert all(norm > 0 for norm in logged(trainer, "grad_norm"))
    sampler = trainer.get_train_dataloader().batch_sampler
    assert (sampler.seed, len(sampler) % 2) == (8, 0)
    assert trainer.get_eval_dataloader().batch_sampler.batch_size == 2
    assert trainer._gen_kwargs == {"max_length": 9, "num_beams": 2}
    assert logged(trainer, "num_input_tokens_seen")[-1] > 0
    assert any(folder.parent.rglob("events.out.tfevents.*"))
    assert logging.get_verbosity() == logging.ERROR


def test_options_of_epochs(trained):
    trainer = trained(
        max_steps=-1, num_train_epochs=1, logging_strategy="epoch", eval_strategy="epoch", save_strategy="epoch",
        predict_with_generate=False, save_only_model=True, full_determinism=True,
    )  # fmt: skip
    checkpoints = checkpoints_in(Path(trainer.args.output_dir))
    assert trainer.state.global_step == len(trainer.get_train_dataloader())
    assert len(logged(trainer, "loss")) == len(logged(trainer, "eval_perplexity")) == len(checkpoints) == 1
    assert not logged(trainer, "eval_bleu")  # without predict_with_generate
    assert not (checkpoints[0] / "optimizer.pt").exists()
    assert torch.are_deterministic_algorithms_enabled()


def test_options_of_sentences(trained):
    trainer = trained(
        max_steps=2, per_device_train_batch_tokens=0, per_device_train_batch_size=3, optim="sgd",
        optim_args="momentum=0.5", lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.5},
        warmup_steps=1, use_cpu=True, ddp_find_unused_parameters=True, save_steps=0, eval_strategy="no", eval_steps=2,
        dataloader_num_workers=1, dataloader_prefetch_factor=3, logging_strategy="no", logging_first_step=True,
    )  # fmt: skip
    assert isinstance(trainer.optimizer.optimizer, torch.optim.SGD)
    assert trainer.optimizer.optimizer.param_groups[0]["momentum"] == 0.5
    loader = trainer.get_train_dataloader()
    assert (len(loader), loader.batch_sampler.batch_size) == (17, 3)
    assert (loader.num_workers, loader.prefetch_factor) == (1, 3)
    assert [trainer.lr_scheduler.lr_lambdas[0](step) for step in (1, 2)] == pytest.approx([1, 0.5])
    assert trainer.accelerator.ddp_handler.find_unused_parameters
    assert trainer.args.device.type == "cpu"
    assert (steps_with(trainer, "loss"), steps_with(trainer, "eval_loss")) == ([1], [])


def test_options_of_the_best_and_of_memory(trained):
    kwargs = {"use_reentrant": False, "every_n_layers": 2}
    trainer = trained(
        eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, metric_for_best_model="perplexity",
        early_stopping_patience=3, prediction_loss_only=True, bf16=True, activation_checkpointing=True,
        activation_checkpointing_kwargs=kwargs,
    )  # fmt: skip
    assert trainer.state.best_metric == min(logged(trainer, "eval_perplexity"))
    assert not logged(trainer, "eval_bleu")  # with prediction_loss_only
    best, folder = Path(trainer.state.best_model_checkpoint), Path(trainer.args.output_dir)
    weights, saved = (load_file(one / "model.safetensors") for one in (best, folder))
    assert all(torch.equal(saved[name], weights[name]) for name in weights)
    assert trainer.accelerator.mixed_precision == "bf16"
    assert "bfloat16 autocast" in (folder / "README.md").read_text(encoding="utf-8")
    assert trainer.model.is_activation_checkpointing
    assert trainer.args.activation_checkpointing_kwargs == kwargs


@pytest.mark.hard
def test_compiling(trained):
    trainer = trained(max_steps=1, torch_compile_backend="aot_eager")
    assert trainer.accelerator.state.dynamo_plugin.backend.value.lower() == "aot_eager"
    assert len(logged(trainer, "train_loss")) == 1


EVALUATES = {"eval_strategy": "steps", "eval_steps": 2}
BEST = {"load_best_model_at_end": True, **EVALUATES}
PACKED = {"packed": True, "average_last": 0}
UNSUPPORTED = "isn't supported by `train`; leave it out, or use VanillaTransformerTrainer in a script of your own"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing_factor": 0.1}, f"{UNSUPPORTED}; did you mean 'label_smoothing'?"),
        ({"fsdp": "full_shard"}, f"fsdp {UNSUPPORTED}"),
        ({"auto_find_batch_size": False}, f"auto_find_batch_size {UNSUPPORTED}"),
        ({"num_train_epochs": 3}, "num_train_epochs and max_steps are both given; set num"),
        ({"num_train_epochs": 3, "max_steps": 100_000}, "num_train_epochs and max_steps are both given; set num"),
        (BEST, "load_best_model_at_end and average_last choose the final model in two ways"),
        ({"per_device_train_batch_size": 4}, "has no effect on batches by tokens; set"),
        ({"max_steps": -1}, "max_steps is -1; give num_train_epochs"),
        ({"max_steps": -1, "num_train_epochs": 1, "streaming": True}, "a stream has no epochs that could be counted"),
        ({"warmup_steps": 0}, "the paper's learning rate depends on the warm-up; give warmup_steps 1 or more"),
        (
            {"lr_scheduler_type": "constant"},
            "constant has no warm-up; set warmup_steps to null, or choose constant_with",
        ),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", **EVALUATES}, "aren't supported by `train`"),
        ({"optim_args": "eps=1e-3"}, "optim_args has no effect on adamw_torch"),
        ({"optim": "adafactor", "optim_args": "a=1"}, "optim_args has no effect on adafactor; leave it out"),
        ({"streaming": True, "per_device_train_batch_tokens": 0}, "streaming shuffles sentences only for batches"),
        ({"early_stopping_patience": 2}, "early_stopping_patience, load_best_model_at_end"),
        ({"average_last": 3, "save_total_limit": 2}, "average_last is 3, but save_total_limit keeps 2 checkpoints"),
        ({"save_strategy": "no"}, "average_last is 2, but save_strategy no saves no checkpoints"),
        ({"metric_for_best_model": "bleau", **EVALUATES}, "is 'bleau', which isn't measured; choose one"),
        (
            {"metric_for_best_model": "bleu", **EVALUATES, "predict_with_generate": False},
            "metric_for_best_model is 'bleu', which isn't measured; choose one of: loss, perplexity",
        ),
        ({"eval_steps": 2}, "eval_steps has no effect without eval_strategy steps or epoch"),
        ({"dataloader_prefetch_factor": 2}, "dataloader_prefetch_factor can only be set when"),
        ({"report_to": "wandb"}, "report_to is wandb, which isn't available; "),
        ({"report_to": "tensorboard"}, "report_to is tensorboard, which isn't available; run pip install '.[train]'"),
        ({"fp16": True, "use_cpu": True}, "float16"),
        ({"task": "g2p"}, "task is 'g2p'; give one of translation, text2text"),
        ({"metrics": ["wre"]}, "metrics has wre; choose from: bleu, bleu_multi30k"),
        # Packed batches
        ({**PACKED, "per_device_train_batch_tokens": 0}, "packed batches are bounded by tokens"),
        ({**PACKED, "torch_compile": True, "dropout_warmup_steps": 9}, "would compile packed batches at each update"),
        ({**PACKED, "torch_compile_mode": "reduce-overhead"}, "aren't supported with CUDA graphs"),
        ({**PACKED, "streaming": True}, "need the lengths of all pairs"),
        ({**PACKED, "length_tolerance": 0.2}, "packed batches aren't sorted by length"),
        # R-Drop
        ({"rdrop_alpha": 5, "torch_compile": True}, "rdrop_alpha doesn't work with torch.compile"),
        # The model and its tokenizer
        ({"tokenizer": ["words", "characters"], "tied": "all"}, "two vocabularies; give tied decoder or none"),
        ({"tied": "some"}, "tied is 'some'; give one of all, decoder, none"),
        ({"tokenizer": "letters"}, "tokenizer is letters; give one or two of: bpe, words"),
        ({"feature_columns": ["3"], "train_source": ["a"]}, "feature_columns are columns of tables"),
        ({"embeddings": "a", "model_name_or_path": "b"}, "embeddings are for a new model"),
        # Ranges
        *(({name: "-2"}, f"{name} is -2") for name in RANGES if name != "average_last"),
        *(({name: "0"}, f"{name} is 0") for name in ("learning_rate", "early_stopping_patience")),
        ({"rdrop_alpha": "nan"}, "rdrop_alpha is nan; give 0 or more"),
    ],
)
def test_options_that_are_wrong_or_contradict_each_other(monkeypatch, options, message):
    for name in ("tensorboard", "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, None)
    given = {"max_steps": 4, "warmup_steps": 2, "average_last": 2, "per_device_train_batch_tokens": 128}
    with pytest.raises(RecipeError, match=re.escape(message)) as caught:
        parse_recipe([], given | options)
    assert "\n" not in str(caught.value)
    assert "ACCELERATE_USE_FSDP" not in os.environ  # as transformers has it, once it has such arguments


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"metric_for_best_model": "perplexity"}, {"greater_is_better": False}),
        ({"metric_for_best_model": "eval_perplexity"}, {"greater_is_better": False}),
        ({"metric_for_best_model": "bleu"}, {"greater_is_better": True}),
        (
            {"save_strategy": "best", "eval_strategy": "steps"},
            {"metric_for_best_model": "loss", "greater_is_better": False},
        ),
        ({"num_train_epochs": 2}, {"max_steps": -1}),
    ],
)
def test_arguments_in_python_follow_one_another(options, expected):
    arguments = VanillaTransformerTrainingArguments("a", **options)
    assert {name: getattr(arguments, name) for name in expected} == expected
    with pytest.raises(RecipeError, match="set label_smoothing in the model's configuration instead of"):
        VanillaTransformerTrainingArguments("a", rdrop_alpha=1.0, label_smoothing_factor=0.1)
