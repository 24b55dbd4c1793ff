"""Options of Seq2SeqTrainingArguments work in `vanilla-transformer train`, or are refused before anything is read."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.utils import logging

from hf_vanilla_transformer.training import run as run_module
from hf_vanilla_transformer.training.arguments import VanillaTransformerTrainingArguments
from hf_vanilla_transformer.training.options import RANGES, RecipeError
from hf_vanilla_transformer.training.recipe import parse_recipe


@dataclass
class Run:
    """A run that has ended: its trainer and its folder."""

    trainer: Any
    folder: Path

    @property
    def args(self) -> VanillaTransformerTrainingArguments:
        return self.trainer.args

    @property
    def log(self) -> list[dict]:
        return self.trainer.state.log_history

    def logged(self, name: str) -> list:
        return [entry[name] for entry in self.log if name in entry]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("checkpoint-*"))

    @property
    def optimizer(self) -> Any:
        return self.trainer.optimizer.optimizer


@pytest.fixture
def process_as_before() -> Iterator[None]:
    """Undoes what options do to the whole process."""
    environment = dict(os.environ)
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def trained(train, recipe, monkeypatch, process_as_before) -> Callable[..., Run]:
    """Trains with options beside the recipe's, and returns the run."""
    trainers: list[Any] = []
    prepared = run_module.Run.prepare
    monkeypatch.setattr(run_module.Run, "prepare", lambda self: trainers.append(prepared(self)) or trainers[-1])

    def trained(options: dict) -> Run:
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", recipe["data_dir"] + "/figures")
        result = train(recipe | {"average_last": 0, "test_source": [], "test_target": []} | options)
        assert result.code == 0, result.err
        return Run(trainers[0], Path(recipe["output_dir"]))

    return trained


# Options that work: runs with many of them at once, and what shows that each has had its effect.


def test_options_of_intervals(trained):
    run = trained({
        "max_steps": 3, "learning_rate": 0.01, "lr_scheduler_type": "linear", "warmup_steps": 1,
        "optim": "adamw_torch", "weight_decay": 0.01, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-7,
        "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "seed": 7, "data_seed": 8,
        "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "eval_delay": 2, "save_steps": 1,
        "save_total_limit": 1, "per_device_eval_batch_size": 2, "generation_max_length": 9,
        "generation_num_beams": 2, "include_num_input_tokens_seen": "non_padding", "report_to": ["tensorboard"],
        "run_name": "a name", "log_level": "error",
    })  # fmt: skip
    group = run.optimizer.param_groups[0]
    assert isinstance(run.optimizer, torch.optim.AdamW)
    assert not group["fused"]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.9), 1e-7, 0.01)
    assert run.logged("learning_rate") == pytest.approx([0.0, 0.01, 0.005])  # linear: warm-up, peak, half way down
    assert run.trainer.state.global_step == run.args.max_steps == 3
    assert [entry["step"] for entry in run.log if "loss" in entry] == [1, 2, 3]
    assert [entry["step"] for entry in run.log if "eval_loss" in entry] == [2, 3]
    assert run.checkpoints == ["checkpoint-3"]  # each update saves one, and one is kept
    assert all(norm > 0 for norm in run.logged("grad_norm"))
    assert (run.args.max_grad_norm, run.args.gradient_accumulation_steps, run.args.seed) == (0.5, 2, 7)
    sampler = run.trainer.get_train_dataloader().batch_sampler
    assert (sampler.seed, len(sampler) % 2) == (8, 0)
    assert run.trainer.get_eval_dataloader().batch_sampler.batch_size == 2
    assert run.trainer._gen_kwargs == {"max_length": 9, "num_beams": 2}
    assert run.logged("num_input_tokens_seen")[-1] > 0
    assert run.args.run_name == "a name"
    assert any(run.folder.parent.rglob("events.out.tfevents.*"))
    assert logging.get_verbosity() == logging.ERROR


def test_options_of_epochs(trained):
    run = trained({
        "max_steps": -1, "num_train_epochs": 1, "logging_strategy": "epoch", "eval_strategy": "epoch",
        "save_strategy": "epoch", "predict_with_generate": False, "save_only_model": True, "full_determinism": True,
    })  # fmt: skip
    assert run.args.max_steps == -1
    assert run.trainer.state.global_step == len(run.trainer.get_train_dataloader())
    assert len(run.logged("loss")) == len(run.logged("eval_perplexity")) == len(run.checkpoints) == 1
    assert not run.logged("eval_bleu")  # without predict_with_generate
    assert not (run.folder / run.checkpoints[0] / "optimizer.pt").exists()
    assert torch.are_deterministic_algorithms_enabled()


def test_options_without_lines(trained):
    run = trained({
        "max_steps": 2, "logging_strategy": "no", "logging_first_step": True, "save_strategy": "no",
        "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "prediction_loss_only": True,
    })  # fmt: skip
    assert [entry["step"] for entry in run.log if "loss" in entry] == [1]  # the first one alone
    assert run.checkpoints == []
    assert not run.logged("eval_bleu")
    assert [entry["step"] for entry in run.log if "eval_loss" in entry] == [0, 2]  # at the start, too


def test_options_of_sentences(trained):
    run = trained({
        "max_steps": 2, "per_device_train_batch_tokens": 0, "per_device_train_batch_size": 3,
        "optim": "sgd", "optim_args": "momentum=0.5",
        "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.5}, "warmup_steps": 1,
        "use_cpu": True, "ddp_find_unused_parameters": True, "save_steps": 0, "eval_strategy": "no", "eval_steps": 2,
        "dataloader_num_workers": 1, "dataloader_prefetch_factor": 3,
    })  # fmt: skip
    assert isinstance(run.optimizer, torch.optim.SGD)
    assert run.optimizer.param_groups[0]["momentum"] == 0.5
    loader = run.trainer.get_train_dataloader()
    assert (len(loader), loader.batch_sampler.batch_size) == (17, 3)
    assert (loader.num_workers, loader.prefetch_factor) == (1, 3)
    assert [run.trainer.lr_scheduler.lr_lambdas[0](step) for step in (1, 2)] == pytest.approx([1, 0.5])
    assert run.trainer.accelerator.ddp_handler.find_unused_parameters
    assert run.args.device.type == "cpu"
    assert not run.logged("eval_loss")  # an interval of evaluations may be switched off


def test_options_of_the_best_and_of_memory(trained):
    run = trained({
        "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True,
        "metric_for_best_model": "perplexity", "early_stopping_patience": 3,
        "bf16": True, "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2},
    })  # fmt: skip
    assert run.trainer.state.best_metric == min(run.logged("eval_perplexity"))
    best = load_file(Path(run.trainer.state.best_model_checkpoint) / "model.safetensors")
    saved = load_file(run.folder / "model.safetensors")
    assert all(torch.equal(saved[name], best[name]) for name in best)
    assert run.trainer.accelerator.mixed_precision == "bf16"
    assert "bfloat16 autocast" in (run.folder / "README.md").read_text(encoding="utf-8")
    assert run.trainer.model.is_activation_checkpointing
    assert run.args.activation_checkpointing_kwargs == {"use_reentrant": False, "every_n_layers": 2}


@pytest.mark.hard
def test_compiling(trained):
    compiled = trained({"max_steps": 1, "torch_compile_backend": "aot_eager"})
    assert compiled.trainer.accelerator.state.dynamo_plugin.backend.value.lower() == "aot_eager"
    assert len(compiled.logged("train_loss")) == 1


@pytest.mark.parametrize(
    ("options", "suggestion"),
    [
        ({"label_smoothing_factor": 0.1}, "; did you mean 'label_smoothing'?"),
        ({"fsdp": "full_shard"}, ""),  # which changes the process's environment as soon as the arguments are built
        ({"auto_find_batch_size": False}, ""),
    ],
)
def test_options_that_are_not_supported(train, recipe, options, suggestion):
    """Nothing is read or written before that is said."""
    result = train({**recipe, "train_source": ["nowhere.en"], **options})
    assert result.code == 2
    assert not Path(recipe["output_dir"]).exists()
    sentence = "isn't supported by `train`; leave it out, or use VanillaTransformerTrainer in a script of your own"
    assert result.error.endswith(f"{next(iter(options))} {sentence}{suggestion}")
    assert "ACCELERATE_USE_FSDP" not in os.environ


EVALUATES = {"eval_strategy": "steps", "eval_steps": 2}
BEST = {"load_best_model_at_end": True, **EVALUATES}
PACKED = {"packed": True, "average_last": 0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
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
