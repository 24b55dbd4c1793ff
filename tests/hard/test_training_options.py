"""Every option of Seq2SeqTrainingArguments works in `vanilla-transformer train`, or is refused with the reason."""

import dataclasses
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import Seq2SeqTrainingArguments
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from hf_vanilla_transformer.training import recipe as recipe_module
from hf_vanilla_transformer.training import trainer as trainer_module
from hf_vanilla_transformer.training.options import LARGEST, RANGES, REFUSED, REFUSED_ON_CPU
from hf_vanilla_transformer.training.recipe import (
    DataArguments,
    ModelArguments,
    RecipeError,
    VanillaTransformerTrainingArguments,
    parse_recipe,
)

PARTS = (DataArguments, ModelArguments, VanillaTransformerTrainingArguments)
FIELDS = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}


@dataclass
class Run:
    """A run that has ended: its trainer, its folder and what it has printed."""

    trainer: Any
    folder: Path
    out: str

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


# Options that work: runs with many of them at once, and what shows that each has had its effect.


def interval_options(run: Run) -> None:
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
    assert (run.trainer.batch_sampler.seed, len(run.trainer.batch_sampler) % 2) == (8, 0)
    assert run.trainer.get_eval_dataloader().batch_sampler.batch_size == 2
    assert run.trainer._gen_kwargs == {"max_length": 9, "num_beams": 2}
    assert "  source:      \n" in run.out  # as inputs aren't included for metrics
    assert run.logged("num_input_tokens_seen")[-1] > 0
    assert "train_mem_cpu_alloc_delta" in run.log[-1]
    assert run.args.run_name == "a name"
    assert any(run.folder.parent.rglob("events.out.tfevents.*"))
    assert logging.get_verbosity() == logging.ERROR


def epoch_options(run: Run) -> None:
    assert run.args.max_steps == -1
    assert run.trainer.state.global_step == len(run.trainer.batch_sampler)
    assert len(run.logged("loss")) == len(run.logged("eval_perplexity")) == len(run.checkpoints) == 1
    assert not run.logged("eval_bleu")  # without predict_with_generate
    assert not (run.folder / run.checkpoints[0] / "optimizer.pt").exists()
    assert torch.are_deterministic_algorithms_enabled()
    assert run.args.eval_accumulation_steps == 1


def no_lines(run: Run) -> None:
    assert [entry["step"] for entry in run.log if "loss" in entry] == [1]  # the first one alone
    assert run.checkpoints == []
    assert run.logged("eval_perplexity")
    assert not run.logged("eval_bleu")
    assert run.args.logging_strategy == run.args.save_strategy == "no"
    assert [entry["step"] for entry in run.log if "eval_loss" in entry] == [0, 2]  # at the start, too


def sentence_options(run: Run) -> None:
    assert isinstance(run.optimizer, torch.optim.SGD)
    assert run.optimizer.param_groups[0]["momentum"] == 0.5
    assert run.trainer.batch_sampler is None
    loader = run.trainer.get_train_dataloader()
    assert (len(loader), loader.batch_sampler.batch_size) == (17, 3)
    assert isinstance(loader.batch_sampler.sampler, torch.utils.data.SequentialSampler)
    assert run.args.lr_scheduler_type == "cosine_with_min_lr"
    assert [run.trainer.lr_scheduler.lr_lambdas[0](step) for step in (1, 2)] == pytest.approx([1, 0.5])


def best_options(run: Run) -> None:
    assert run.trainer.state.best_metric == min(run.logged("eval_perplexity"))
    assert (run.args.load_best_model_at_end, run.args.greater_is_better) == (True, False)
    best = load_file(Path(run.trainer.state.best_model_checkpoint) / "model.safetensors")
    saved = load_file(run.folder / "model.safetensors")
    assert all(torch.equal(saved[name], best[name]) for name in best)


def memory_options(run: Run) -> None:
    assert run.trainer.accelerator.mixed_precision == "bf16"
    assert "bfloat16 autocast" in (run.folder / "README.md").read_text(encoding="utf-8")
    assert run.trainer.model.is_activation_checkpointing
    assert run.args.activation_checkpointing_kwargs == {"use_reentrant": False, "every_n_layers": 2}
    assert run.trainer.neftune_hook_handle is not None


def old_names(run: Run) -> None:
    assert run.trainer.model.is_activation_checkpointing
    assert run.args.activation_checkpointing_kwargs == {"use_reentrant": False}


def parallel_options(run: Run) -> None:
    handler = run.trainer.accelerator.ddp_handler
    assert (handler.find_unused_parameters, handler.bucket_cap_mb) == (True, 5)
    assert (handler.broadcast_buffers, handler.static_graph) == (False, True)
    assert (run.args.log_on_each_node, run.args.log_level_replica) == (False, "error")
    assert run.args.device.type == "cpu"


def worker_options(run: Run) -> None:
    for loader in (run.trainer.get_train_dataloader(), run.trainer.get_eval_dataloader()):
        assert (loader.num_workers, loader.prefetch_factor) == (1, 3)
        assert (loader.persistent_workers, loader.pin_memory) == (True, False)


QUICK: dict[Callable[[Run], None], dict[str, Any]] = {
    interval_options: {
        "max_steps": 3, "learning_rate": 0.01, "lr_scheduler_type": "linear", "warmup_steps": 1,
        "optim": "adamw_torch", "weight_decay": 0.01, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-7,
        "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "seed": 7, "data_seed": 8,
        "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "eval_delay": 2, "save_steps": 1,
        "save_total_limit": 1, "average_last": 0, "per_device_eval_batch_size": 2, "include_for_metrics": [],
        "generation_max_length": 9, "generation_num_beams": 2, "include_num_input_tokens_seen": "non_padding",
        "skip_memory_metrics": False, "report_to": ["tensorboard"], "run_name": "a name", "log_level": "error",
    },
    epoch_options: {
        "max_steps": -1, "num_train_epochs": 1, "logging_strategy": "epoch", "eval_strategy": "epoch",
        "save_strategy": "epoch", "average_last": 0, "predict_with_generate": False, "save_only_model": True,
        "full_determinism": True, "eval_accumulation_steps": 1,
    },
    no_lines: {
        "max_steps": 2, "logging_strategy": "no", "logging_first_step": True, "save_strategy": "no", "average_last": 0,
        "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "prediction_loss_only": True,
    },
    sentence_options: {
        "max_steps": 2, "per_device_train_batch_tokens": 0, "per_device_train_batch_size": 3,
        "train_sampling_strategy": "sequential", "optim": "sgd", "optim_args": "momentum=0.5",
        "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.5}, "warmup_steps": 1,
        "average_last": 0,
    },
    best_options: {
        "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "average_last": 0,
        "metric_for_best_model": "perplexity", "greater_is_better": False, "early_stopping_patience": 3,
    },
    memory_options: {
        "max_steps": 2, "bf16": True, "activation_checkpointing": True, "neftune_noise_alpha": 5, "average_last": 0,
        "activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2},
    },
    old_names: {
        "max_steps": 1, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "average_last": 0,
    },
    parallel_options: {
        "max_steps": 1, "average_last": 0, "use_cpu": True, "ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 5,
        "ddp_broadcast_buffers": False, "ddp_static_graph": True, "log_on_each_node": False,
        "log_level_replica": "error",
    },
}  # fmt: skip
SLOW: dict[Callable[[Run], None], dict[str, Any]] = {
    worker_options: {
        "max_steps": 2, "average_last": 0, "eval_strategy": "steps", "eval_steps": 2, "dataloader_num_workers": 1,
        "dataloader_prefetch_factor": 3, "dataloader_persistent_workers": True, "dataloader_pin_memory": False,
    },
}  # fmt: skip
RESUMING = {"resume_from_checkpoint", "ignore_data_skip", "restore_callback_states_from_checkpoint"}
COMPILING = {"torch_compile", "torch_compile_backend", "torch_compile_mode"}
# They need the Hub; what is pushed is tested where that is tested.
ON_THE_HUB = {"push_to_hub", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"}
# They work where a package is installed or a launcher is used, or with an optimizer that isn't torch's.
REFUSED_HERE = {
    "project": ({"report_to": "trackio", "project": "a"}, "report_to is trackio, which isn't installed"),
    "trackio_space_id": ({"trackio_space_id": "a/b"}, "trackio_space_id has no effect without report_to trackio"),
    "trackio_bucket_id": ({"trackio_bucket_id": "a/b"}, "has no effect without report_to trackio"),
    "trackio_static_space_id": ({"trackio_static_space_id": "a/b"}, "has no effect without report_to trackio"),
    "ddp_backend": ({"ddp_backend": "gloo"}, "ddp_backend is for several processes; start the run with `acceler"),
    "optim_target_modules": (
        {"optim_target_modules": "all-linear"},
        "optim_target_modules has no effect with optim adamw_torch_fused; it is for GaLore and APOLLO",
    ),
}
# A value of each refused option that isn't its default.
ANOTHER_VALUE = {
    "accelerator_config": {"split_batches": True}, "dataloader_multiprocessing_context": "spawn",
    "debug": "underflow_overflow",
    "ddp_timeout": 60, "deepspeed": "deepspeed.json", "fsdp": "full_shard", "fsdp_config": {"version": 2},
    "generation_config": "folder", "hub_token": "hf_secret", "label_names": ["y"], "label_smoothing_factor": 0.1,
    "length_column_name": "size", "local_rank": 0, "torch_empty_cache_steps": 10,
}  # fmt: skip


@pytest.fixture
def process_as_before() -> Iterator[None]:
    """Undoes what options do to the whole process."""
    environment = dict(os.environ)
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def run(train, recipe, monkeypatch, process_as_before) -> Callable[..., Run]:
    """Trains with options beside the recipe's, and returns the run."""
    trainers: list[Any] = []
    original = trainer_module.VanillaTransformerTrainer.__init__

    def recording(self, *args: Any, **kwargs: Any) -> None:
        trainers.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(trainer_module.VanillaTransformerTrainer, "__init__", recording)

    def run(options: dict, *switches: str) -> Run:
        trainers.clear()
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", recipe["data_dir"] + "/figures")
        result = train(recipe | options, *switches)
        assert result.code == 0, result.err
        return Run(trainers[0], Path(recipe["output_dir"]), result.out)

    return run


@pytest.fixture
def refusal(train, recipe) -> Callable[..., str]:
    """Returns the error of a recipe that is refused, and checks that nothing was read or written before."""

    def refusal(options: dict, *switches: str) -> str:
        result = train({**recipe, "train_source": ["nowhere.en"], **options}, *switches)
        assert result.code == 2, result
        assert not Path(recipe["output_dir"]).exists()
        assert "nowhere.en" not in result.err
        return result.error

    return refusal


def test_each_option_is_in_one_class():
    works = {name for options in (*QUICK.values(), *SLOW.values()) for name in options if name in FIELDS}
    works |= {"output_dir", *RESUMING, *COMPILING, *ON_THE_HUB}
    classes = (works, set(REFUSED), set(REFUSED_ON_CPU), set(REFUSED_HERE))
    assert set.union(*classes) == FIELDS  # what a new version of transformers adds has to be tried, and put into one
    assert sum(map(len, classes)) == len(FIELDS)


@pytest.mark.parametrize("check", QUICK, ids=lambda check: check.__name__)
def test_options_that_work(run, check):
    check(run(QUICK[check]))


@pytest.mark.slow
@pytest.mark.parametrize("check", SLOW, ids=lambda check: check.__name__)
def test_more_options_that_work(run, check):
    check(run(SLOW[check]))


def test_options_of_resuming(run, recipe):
    stopping = {
        "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "average_last": 0,
        "metric_for_best_model": "loss", "early_stopping_patience": 50, "learning_rate": 1e-9,
    }  # fmt: skip
    run(stopping)
    options = {
        "max_steps": 3, "ignore_data_skip": True, "restore_callback_states_from_checkpoint": True,
        "resume_from_checkpoint": recipe["output_dir"] + "/checkpoint-1",
    }  # fmt: skip
    resumed = run(stopping | options, "--resume")
    assert "Resuming from " in resumed.out
    assert "/checkpoint-1\n" in resumed.out
    assert resumed.trainer.state.global_step == 3
    assert resumed.args.ignore_data_skip
    counts = [
        getattr(one, "early_stopping_patience_counter", None) for one in resumed.trainer.callback_handler.callbacks
    ]
    assert sum(count is not None for count in counts) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"torch_compile_backend": "aot_eager"},
        {"torch_compile": True, "torch_compile_mode": "default"},
    ],
)
def test_compiling(run, options):
    compiled = run({"max_steps": 1, "average_last": 0, **options})
    assert compiled.trainer.accelerator.state.dynamo_plugin.backend.value.lower() in ("aot_eager", "inductor")
    assert len(compiled.logged("train_loss")) == 1


def test_options_of_the_hub_arrive(recipe):
    options = {
        "push_to_hub": True, "hub_private_repo": True, "hub_model_id": "a/b", "hub_strategy": "end",
        "hub_always_push": True, "hub_revision": "next",
    }  # fmt: skip
    assert set(options) == ON_THE_HUB
    *_, training = parse_recipe([], as_arguments(options))
    assert {name: getattr(training, name) for name in options} == options


def as_arguments(options: dict) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]


# Options that are refused


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_ON_CPU])
def test_options_that_are_refused(refusal, name):
    default = VanillaTransformerTrainingArguments.__dataclass_fields__[name].default
    value = ANOTHER_VALUE.get(name, not default)
    reason = {**REFUSED, **REFUSED_ON_CPU}[name]
    try:
        error = refusal({name: value, "use_cpu": True})
    finally:
        assert "ACCELERATE_USE_FSDP" not in os.environ
    if name not in ("parallelism_config", "liger_kernel_config"):  # which can't even be parsed
        assert error == f"vanilla-transformer: error: {name} can't be used: {reason}"
    assert name in error.replace("-", "_")


@pytest.mark.parametrize("name", REFUSED_HERE)
def test_options_that_are_refused_here(refusal, name, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    options, message = REFUSED_HERE[name]
    assert message in refusal(options)


def test_an_option_that_is_given_with_its_default_is_not_refused(run):
    assert run({"label_smoothing_factor": 0.0, "fp16": False, "do_train": False, "average_last": 0})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # Both of two that contradict each other
        ({"num_train_epochs": 3}, "num_train_epochs is 3 and max_steps 4; leave one of the two out"),
        ({"num_train_epochs": 3, "max_steps": 100_000}, "num_train_epochs is 3 and max_steps 100000; leave"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}, "leave one of the two out"),
        ({"torch_compile": False, "torch_compile_backend": "eager"}, "torch_compile is false, but"),
        ({"per_device_train_batch_size": 4}, "no effect on batches by tokens; set per_device_train_batch_tokens to 0"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy has no effect on batches by tokens"),
        # What is missing
        ({"max_steps": -1}, "max_steps is -1; give num_train_epochs"),
        ({"max_steps": -1, "num_train_epochs": 1, "streaming": True}, "a stream has no epochs that could be counted"),
        ({"max_steps": -1, "num_train_epochs": 1, "warmup_steps": 0.1}, "warmup_steps 0.1 is a share of the updates"),
        ({"warmup_steps": 0}, "the paper's learning rate depends on the warm-up; give warmup_steps 1 or more"),
        ({"streaming": True, "per_device_train_batch_tokens": 0}, "streaming shuffles sentences only for batches"),
        ({"eval_on_start": True, "validation_source": [], "validation_target": []}, "eval_on_start needs validation_s"),
        ({"early_stopping_patience": 2}, "early_stopping_patience needs evaluations; give eval_strategy"),
        ({"early_stopping_patience": 2, "eval_strategy": "steps"}, "needs metric_for_best_model: loss, perplexity, bl"),
        ({"save_strategy": "best", "eval_strategy": "steps"}, "save_strategy best needs metric_for_best_model"),
        ({"lr_scheduler_type": "greedy"}, "lr_scheduler_type greedy requires an eval strategy"),
        ({"metric_for_best_model": "bleau", "eval_strategy": "steps"}, "is 'bleau', which isn't measured; choose one"),
        (
            {"metric_for_best_model": "bleu", "eval_strategy": "steps", "predict_with_generate": False},
            "metric_for_best_model is 'bleu', which isn't measured; choose one of: loss, perplexity",
        ),
        (
            {"metric_for_best_model": "eval_perplexity", "eval_strategy": "steps", "greater_is_better": True},
            "greater_is_better is True, but a smaller perplexity is better; leave it out",
        ),
        (
            {"metric_for_best_model": "bleu", "eval_strategy": "steps", "lr_scheduler_type": "reduce_lr_on_plateau"},
            "with metric_for_best_model bleu, write lr_scheduler_kwargs: {mode: max}",
        ),
        (
            {"metric_for_best_model": "loss", "eval_strategy": "steps", "save_total_limit": 2},
            "save_total_limit 2 counts the best checkpoint, which is kept too",
        ),
        # What would have no effect
        ({"hub_model_id": "a/b"}, "hub_model_id has no effect without push_to_hub true"),
        ({"greater_is_better": True}, "greater_is_better has no effect without metric_for_best_model"),
        (
            {"activation_checkpointing_kwargs": {"use_reentrant": True}},
            "has no effect without activation_checkpointing",
        ),
        ({"dataloader_prefetch_factor": 2}, "dataloader_prefetch_factor can only be set when"),
        ({"dataloader_persistent_workers": True}, "has no effect without dataloader_num_workers"),
        ({"include_for_metrics": ["inputs", "loss"]}, "include_for_metrics has 'loss', but"),
        (
            {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"a": 1}},
            "no effect with lr_scheduler_type constant",
        ),
        ({"optim_args": "momentum=0.9"}, "optim_args 'momentum=0.9' has no effect with optim adamw_torch_fused"),
        ({"optim": "sgd", "optim_args": "momentum=0.9,nestorov=true"}, "'nestorov=true' has no effect with optim sgd"),
        ({"optim": "sgd", "adam_beta2": 0.9}, "adam_beta2 has no effect with optim sgd"),
        ({"torch_compile_backend": "eager", "torch_compile_mode": "default"}, "no effect on the backend eager"),
        # What isn't installed, or isn't known
        ({"report_to": "wandb"}, "report_to is wandb, which isn't installed; install it, or choose from: "),
        ({"report_to": ["tensorboard", "none"]}, "report_to: none is not supported, only"),
        ({"report_to": "tensorbord"}, "report_to: tensorbord is not supported, only"),
        ({"optim": "adamw_8bit"}, "optim adamw_8bit, optim_args None: You need to install `bitsandbytes`"),
        ({"optim": "galore_adamw", "optim_target_modules": "attn"}, "You need to install `galore_torch`"),
        ({"optim": "lomo"}, "You need to install `lomo_optim`"),
        ({"optim": "sgd", "optim_args": "momentum"}, "optim sgd, optim_args momentum: not enough values"),
        ({"optim": "sgd", "optim_args": "momentum=-1"}, "Invalid momentum value: -1.0"),
        ({"torch_compile_backend": "gcc"}, "torch_compile_backend is 'gcc'; choose one of: inductor, eager"),
        ({"torch_compile_backend": "cudagraphs", "use_cpu": True}, "cudagraphs on GPUs only"),
        ({"torch_compile_mode": "fast"}, "torch_compile_mode is 'fast'; choose one of: default"),
        (
            {"lr_scheduler_kwargs": {"a": 1}},
            "lr_scheduler_type inverse_sqrt fails with warmup_steps 2, max_steps 4 and",
        ),
        ({"lr_scheduler_kwargs": {"timescale": 0}}, "division by zero"),
        ({"lr_scheduler_kwargs": "a"}, "must be a mapping"),
        ({"lr_scheduler_type": "polynomial", "warmup_steps": 4}, "polynomial fails with warmup_steps 4, max_steps 4"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "One of min_lr or min_lr_rate should be set"),
        ({"lr_scheduler_kwargs": {"timescale": math.nan}}, "gives a rate of nan"),
        (
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"preserve_rng_state": False}},
            "activation_checkpointing_kwargs has 'preserve_rng_state'; choose from",
        ),
        (
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 0}},
            "every_n_layers of activation_checkpointing_kwargs is 0; give 1 or more",
        ),
        (
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}, "use_cpu": True},
            "offload of activation_checkpointing_kwargs moves activations from a GPU's memory",
        ),
        (
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": "a"},
            "activation_checkpointing_kwargs is 'a",
        ),
        ({"fp16": True, "bf16": True}, "fp16 can't be used"),
        ({"include_num_input_tokens_seen": True}, "invalid choice: 'True' (choose from 'no', 'all', 'non_padding')"),
    ],
)
def test_combinations_that_are_refused(refusal, options, message):
    assert message in refusal(options)


def test_what_is_not_installed_names_its_extra(refusal, monkeypatch):
    for name in ("tensorboard", "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, None)
    message = refusal({"report_to": "tensorboard"})
    assert "report_to is tensorboard, which isn't installed; run pip install '.[train]' in a checkout" in message


def test_what_needs_another_option_is_ignored_where_that_is_switched_off(run, recipe):
    recipe |= {"eval_strategy": "steps", "eval_steps": 2, "generation_max_length": 12}
    assert not run({"average_last": 0}, "--eval-strategy", "no").logged("eval_loss")


def test_interval_of_evaluations_without_a_strategy(refusal, recipe):
    del recipe["eval_strategy"]
    assert "eval_steps has no effect without eval_strategy steps or epoch" in refusal({"eval_steps": 2})
    assert "generation_num_beams has no effect without eval_s" in refusal({"generation_num_beams": 2})


@pytest.mark.parametrize("name", RANGES)
def test_numbers_out_of_range(name):
    fields = {field.name: field for part in PARTS for field in dataclasses.fields(part)}
    wrong = ["-2", str(LARGEST + 1)]
    if "float" in str(fields[name].type):
        wrong += ["nan", "inf", "-inf", "-0.5"]
    for value in wrong:
        with pytest.raises(RecipeError, match=rf"^{name} is .*; give "):
            parse_recipe([], [f"--{name}={value}"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0), ("adam_beta1", 1), ("adam_beta2", 1.5), ("adam_epsilon", 0), ("warmup_steps", 1.5),
        ("gradient_accumulation_steps", 0), ("save_total_limit", 0), ("logging_steps", 0), ("save_steps", 2.5),
        ("eval_steps", 0), ("seed", 2**32), ("data_seed", -1), ("max_steps", -2), ("per_device_eval_batch_size", 0),
        ("generation_max_length", 1), ("generation_num_beams", 1001), ("dataloader_num_workers", 1025),
        ("early_stopping_patience", 0), ("eval_accumulation_steps", 0), ("preprocessing_num_workers", 0),
    ],
)  # fmt: skip
def test_ends_of_ranges(name, value):
    with pytest.raises(RecipeError, match=rf"^{name} is .*; give "):
        parse_recipe([], [f"--{name}", str(value)])


@pytest.mark.parametrize("kind", list(SchedulerType))
def test_all_schedules_work_or_say_what_they_need(kind):
    needs = {
        "cosine_with_min_lr": {"min_lr_rate": 0.1}, "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
        "warmup_stable_decay": {"num_decay_steps": 100},
    }  # fmt: skip
    options = ["--lr-scheduler-type", kind.value, "--eval-strategy", "steps", "--metric-for-best-model", "loss"]
    if kind.value in needs:
        with pytest.raises(RecipeError, match=f"lr_scheduler_type {kind.value} fails with"):
            parse_recipe([], options)
        options += ["--lr-scheduler-kwargs", json.dumps(needs[kind.value])]
    assert parse_recipe([], options)[2].lr_scheduler_type == kind


@pytest.mark.parametrize("kind", list(OptimizerNames))
def test_all_optimizers_work_or_say_what_they_need(kind):
    error = ""
    try:
        parse_recipe([], ["--optim", kind.value])
    except RecipeError as caught:
        error = str(caught)
    torchs = {"adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"}
    assert not error or (kind.value not in torchs and re.search("install|failed to import", error))


def test_greater_perplexity_is_not_better():
    for metric in ("perplexity", "eval_perplexity"):
        assert VanillaTransformerTrainingArguments("a", metric_for_best_model=metric).greater_is_better is False
    assert VanillaTransformerTrainingArguments("a", metric_for_best_model="bleu").greater_is_better is True


def test_epochs_count_in_python_too():
    assert VanillaTransformerTrainingArguments("a", num_train_epochs=2).max_steps == -1
    with pytest.raises(ValueError, match="max_steps is -1; give num_train_epochs"):
        VanillaTransformerTrainingArguments("a", max_steps=-1)


# Any options with any values

VALUES = [
    -1, 0, 1, 2, 7, 10**6, 2**31, 2**63, 10**13, -(10**13), 0.0, 0.5, -0.5, 1.5, 1e-300, 1e300, math.nan, math.inf,
    True, False, "", " ", "x", "no", "all", "none", "true", "steps", "epoch", "best", "loss", "bleu", "ä\n\0ö", "a=b",
    "-", "--", "{}", "{", "[]", "../..", "/", "~", "http://a", "a/b/c", "None", "nan", "1e5", "0x10", "1_000",
    [], ["x"], [1, 2], ["inputs"], [""], {}, {"a": 1}, {"min_lr": 0.1}, {"": ""},
]  # fmt: skip
# What would only take long, or has cases of its own.
LEFT_OUT = {"output_dir", "log_level", "log_level_replica", "model_name_or_path", "tokenizer_name_or_path"}
LEFT_OUT |= {*COMPILING, *REFUSED, *REFUSED_ON_CPU}
FEW = st.sampled_from([-1, 0, 1, 2, math.nan, "x", ""])
ONLY_FEW = {
    "max_steps", "num_train_epochs", "gradient_accumulation_steps", "dataloader_num_workers", "encoder_layers",
    "preprocessing_num_workers", "decoder_layers", "dataloader_prefetch_factor", "bpe_dropout_copies",
}  # fmt: skip
CHOICES: dict[str, list] = {
    action.dest: list(action.choices) for action in recipe_module._parser()._actions if action.choices
}


@st.composite
def some_options(draw: st.DrawFn) -> dict[str, Any]:
    """Up to three options, each with a value that it may have, or with any."""
    known = {field.name: field for part in PARTS for field in dataclasses.fields(part)}
    names = draw(st.lists(st.sampled_from(sorted(set(known) - LEFT_OUT)), min_size=1, max_size=3, unique=True))
    return {name: draw(_value(name, str(known[name].type))) for name in names}


def _value(name: str, kind: str) -> st.SearchStrategy[Any]:
    if name in ONLY_FEW:
        return FEW
    if name in CHOICES:
        return st.sampled_from([*CHOICES[name], *CHOICES[name], "x"])
    if "bool" in kind:
        return st.sampled_from([True, False, True, False, True, False, "x"])
    if "int" in kind or "float" in kind:
        likely = st.integers(1, 30) if "int" in kind else st.floats(0, 1)
        return st.one_of(likely, likely, st.integers(-2, 2), st.floats(-1, 3), st.sampled_from(VALUES))
    return st.sampled_from([value for value in VALUES if not isinstance(value, (dict, list)) or "list" in kind])


@pytest.mark.hard
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("on_the_command_line", [False, True])
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(options=some_options())
def test_any_options_work_or_are_refused_in_one_line(command, recipe, process_as_before, on_the_command_line, options):
    folder = Path(recipe["data_dir"])
    shutil.rmtree(folder / "run", ignore_errors=True)
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "figures")
    small = {"max_steps": 1, "average_last": 0, "save_strategy": "no", "test_source": [], "test_target": []}
    written, arguments = recipe | small | options, []
    if on_the_command_line:
        written = {name: value for name, value in (recipe | small).items() if name not in options}
        arguments = [f"--{name}={value}" for name, value in options.items()]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(written), encoding="utf-8")
    result = command("train", "--config", folder / "recipe.yaml", *arguments)
    torch.use_deterministic_algorithms(False)
    assert result.code in (0, 1, 2)
    if result.code:
        assert "(unexpected; " not in result.error  # and it is one line
