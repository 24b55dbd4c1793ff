"""The options of `Seq2SeqTrainingArguments` that a recipe can't have, with the reasons, and the values that it can.

transformers accepts many options that have no effect in this package's command, or that fail hours later. A recipe with
one of them is refused before anything is read. Python code that uses `VanillaTransformerTrainer` isn't restricted.
"""

import copy
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import is_deepspeed_available
from torch import nn
from transformers import get_scheduler
from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks

from ..engine import torch_private
from ..errors import first_line, install
from ..translation.limits import LIMITS

_ACCELERATE = Path(__file__).with_name("recipes") / "accelerate"
_EVALUATION_GATHERS = "the evaluation gathers one tensor of token ids from all devices, as BLEU needs it"
_LAUNCHED = "start the run with `accelerate launch` or `torchrun`, which tell each process which one it is"
_FSDP = f"start the run with `accelerate launch --config_file {_ACCELERATE / 'fsdp_8gpu.yaml'}`"
# Option -> why it is refused if it differs from its default, and what to use instead.
REFUSED = {
    "accelerator_config": "Accelerate neither forms nor shares out batches by tokens; its other settings belong into "
    "the file of `accelerate launch --config_file`",
    "auto_find_batch_size": "after a lack of memory it would begin again with weights that are trained already; lower "
    "per_device_train_batch_tokens and raise gradient_accumulation_steps",
    "average_tokens_across_devices": "the loss is the mean over the target tokens of all devices",
    "batch_eval_metrics": "BLEU and chrF are scores of a corpus, not means over batches",
    "bf16_full_eval": "evaluations during training keep the weights in float32; use bf16",
    "dataloader_drop_last": "it would leave out validation sentences; batches by tokens are all complete",
    "dataloader_in_order": "a run that is resumed has to read its batches in the same order",
    "dataloader_multiprocessing_context": "PyTorch's default start method is used for processes that load data",
    "debug": "its checks fail on this model's masks; max_nonfinite_updates stops a run whose loss is NaN",
    "disable_tqdm": "the command has a progress bar of its own, which it shows if standard error is a terminal",
    "do_eval": "eval_strategy says when the validation data are evaluated",
    "do_predict": "test data are translated and scored after training wherever a recipe names some",
    "do_train": "the command trains whether it is given or not; with max_steps 0 it doesn't",
    "enable_jit_checkpoint": "its checkpoints are saved in mid-update, so that a resumed run would differ; lower "
    "save_steps, and resume with --resume",
    "eval_do_concat_batches": _EVALUATION_GATHERS,
    "eval_use_gather_object": _EVALUATION_GATHERS,
    "fp16_full_eval": "evaluations during training keep the weights in float32; use fp16",
    "fsdp": _FSDP,
    "fsdp_config": _FSDP,
    "generation_config": "it would replace the paper's decoding; use num_beams, gnmt_length_penalty and early_stopping",
    "hub_token": "others could read it in the recipe, or in the list of processes; log in with `hf auth login`, or set "
    "HF_TOKEN",
    "label_names": "the model's labels are called labels",
    "label_smoothing_factor": "the model smooths its own loss; use label_smoothing",
    "length_column_name": "lengths are counted from the tokens",
    "liger_kernel_config": "Liger has no kernels for this model",
    "local_rank": _LAUNCHED,
    "logging_nan_inf_filter": "it logs a loss of NaN as 0; max_nonfinite_updates stops a run that diverges",
    "parallelism_config": "it belongs into the file of `accelerate launch --config_file`",
    "remove_unused_columns": "the model can't use the columns of the text",
    "save_on_each_node": "output_dir has to be the same folder on all machines, which would all write the same files",
    "sortish_sampler": "transformers no longer has it; batches by tokens already have sentences of similar length",
    "use_cache": "training has no use for cached keys and values; decoding keeps them anyway",
    "use_liger_kernel": "Liger has no kernels for this model",
}
# The same, where there is no accelerator or use_cpu is set.
REFUSED_ON_CPU = {
    "ddp_timeout": "transformers leaves it out on a CPU",
    "deepspeed": f"DeepSpeed is for GPUs; for CPUs there is {_ACCELERATE / 'cpu_ddp.yaml'}",
    "fp16": "nothing would be computed in float16 on a CPU; use bf16",
    "tf32": "only NVIDIA's GPUs since Ampere have TF32",
    "torch_empty_cache_steps": "a CPU has no cache of freed memory to empty; see keep_freed_memory",
}

LARGEST = 10**12  # more than this of anything that is counted is a slip


@dataclass(frozen=True)
class Range:
    """The values that an option may have, and how an error describes them."""

    text: str
    contains: Callable[[float], bool]

    @classmethod
    def up_to(cls, largest: int, smallest: int = 1) -> "Range":
        """Returns a range of integers."""
        return cls(f"{smallest:,} to {largest:,}", lambda value: smallest <= value <= largest)


def _is_share_or_whole(value: float) -> bool:
    return value < 1 or value == int(value)


_POSITIVE = Range("more than 0", lambda value: value > 0)
_NOT_NEGATIVE = Range("0 or more", lambda value: value >= 0)
_COUNT = Range("1 or more", lambda value: value >= 1)
_SHARE = Range("0 or more, and less than 1", lambda value: 0 <= value < 1)
_UPDATES = Range("0 or more updates, or a share of them below 1", lambda v: v >= 0 and _is_share_or_whole(v))
_INTERVAL = Range("1 or more updates, or a share of them below 1", lambda v: v > 0 and _is_share_or_whole(v))
_SEED = Range.up_to(2**32 - 1, smallest=0)
_PROCESSES = 1_024

RANGES = {
    **dict.fromkeys(("learning_rate", "learning_rate_factor", "adam_epsilon"), _POSITIVE),
    **dict.fromkeys(("num_train_epochs", "weight_decay", "max_grad_norm", "neftune_noise_alpha"), _NOT_NEGATIVE),
    **dict.fromkeys(("eval_delay", "dropout_warmup_steps", "average_last", "max_nonfinite_updates"), _NOT_NEGATIVE),
    **dict.fromkeys(("per_device_train_batch_tokens",), _NOT_NEGATIVE),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), _SHARE),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size", "eval_accumulation_steps"), _COUNT),
    **dict.fromkeys(("gradient_accumulation_steps", "save_total_limit", "early_stopping_patience"), _COUNT),
    **dict.fromkeys(("torch_empty_cache_steps", "ddp_bucket_cap_mb", "ddp_timeout", "shuffle_buffer_size"), _COUNT),
    **dict.fromkeys(("max_length", "max_length_ratio", "bpe_dropout_copies", "dataloader_prefetch_factor"), _COUNT),
    **dict.fromkeys(("logging_steps", "eval_steps", "save_steps"), _INTERVAL),
    **dict.fromkeys(("seed", "data_seed"), _SEED),
    "warmup_steps": _UPDATES,
    "max_steps": Range("0 or more, or -1 to train for num_train_epochs", lambda value: value >= -1),
    "generation_max_length": Range.up_to(LIMITS["max_length"].largest, smallest=2),  # the start token is one
    "generation_num_beams": Range.up_to(LIMITS["num_beams"].largest),
    "dataloader_num_workers": Range.up_to(_PROCESSES, smallest=0),
    "preprocessing_num_workers": Range.up_to(_PROCESSES),
}

METRICS = {"loss": False, "perplexity": False, "bleu": True, "chrf": True}  # whether greater is better
COMPILERS = ("inductor", "eager", "aot_eager", "cudagraphs")
CHECKPOINTING: dict[str, type] = {"every_n_layers": int, "offload": bool, "use_reentrant": bool}
_HUB = ("hub_model_id", "hub_private_repo", "hub_strategy", "hub_always_push", "hub_revision")
_TRACKIO = ("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id")
_EVALUATION = ("eval_steps", "eval_delay", "eval_accumulation_steps", "prediction_loss_only")
_GENERATION = ("generation_max_length", "generation_num_beams")
_CHECKPOINTING_KWARGS = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
_LOW_RANK = ("galore", "apollo")  # optimizers that project the gradients of chosen matrices
_NEEDS_MODEL = (*_LOW_RANK, "lomo", "adalomo")
_BY_METRIC = ("reduce_lr_on_plateau", "greedy")
_NO_KWARGS = ("constant", "constant_with_warmup")


@dataclass(frozen=True)
class Given:
    """What a recipe and the command line say.

    Attributes:
        values: Their options, as they are before transformers changes any.
        defaults: Of all options.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def changed(self, name: str) -> bool:
        """Whether an option is given, and not with its default value."""
        return name in self.values and self.values[name] != self.defaults[name]

    def all_changed(self, names: Collection[str]) -> list[str]:
        """Those of the options that are given, and not with their default values."""
        return [name for name in names if self.changed(name)]


def check_each(given: Given) -> None:
    """Checks options one by one, before `TrainingArguments` are built, which has effects beyond the object.

    Args:
        given: The options.

    Raises:
        ValueError: One of them can't be used, or has a value that it can't have.
    """
    _raise_first(chain(_out_of_range(given), _refused(given)))


def check_together(given: Given, data: Any, args: Any) -> None:
    """Checks options that depend on one another, and builds the optimizer and the schedule for a try.

    Args:
        given: The options.
        data: The DataArguments made of them.
        args: The VanillaTransformerTrainingArguments made of them.

    Raises:
        ValueError: They contradict each other, or one has no effect.
    """
    checks = (_length_of_training, _batches, _evaluation, _best_model, _without_effect, _compilation, _checkpointing)
    _raise_first(chain.from_iterable(check(given, data, args) for check in checks))
    _raise_first(_trackers(args.report_to))
    _raise_first(_optimizer(given, args))
    _raise_first(_schedule(args))


def _raise_first(problems: Iterator[str]) -> None:
    for problem in problems:
        raise ValueError(problem)


def _refused(given: Given) -> Iterator[str]:
    reasons = REFUSED | ({} if torch.accelerator.is_available() and not given.values.get("use_cpu") else REFUSED_ON_CPU)
    for name in given.all_changed(reasons):
        if given.values[name] is False and given.defaults[name] is None:
            continue  # switched off, as it is by default
        yield f"{name} can't be used: {reasons[name]}"
    if given.changed("deepspeed") and not is_deepspeed_available():
        yield "deepspeed is not installed: `pip install deepspeed`"
    if "ddp_backend" in given and "LOCAL_RANK" not in os.environ:
        yield f"ddp_backend is for several processes; {_LAUNCHED}"


def _out_of_range(given: Given) -> Iterator[str]:
    for name, value in given.values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if name in RANGES and not (math.isfinite(value) and RANGES[name].contains(value)):
            yield f"{name} is {value}; give {RANGES[name].text}"
        elif not abs(value) <= LARGEST:  # or NaN
            yield f"{name} is {value}; give a number up to {LARGEST:,}"


def _length_of_training(given: Given, data: Any, args: Any) -> Iterator[str]:
    max_steps = given.values.get("max_steps", -1)
    if args.num_train_epochs and max_steps >= 0:
        yield (
            f"num_train_epochs is {args.num_train_epochs:g} and max_steps {max_steps}; leave one of the two out, or "
            "give max_steps -1 if the epochs count"
        )
    if args.max_steps < 0 and data.streaming:
        yield "a stream has no epochs that could be counted; give max_steps with streaming"
    if args.max_steps < 0 and 0 < args.warmup_steps < 1 and args.learning_rate is None:
        yield (
            f"warmup_steps {args.warmup_steps:g} is a share of the updates, whose number isn't known before the corpus "
            "is read, but the paper's learning rate depends on it; give warmup_steps as a number, or learning_rate"
        )
    if not args.warmup_steps and args.learning_rate is None:
        yield "the paper's learning rate depends on the warm-up; give warmup_steps 1 or more, or learning_rate"


def _batches(given: Given, data: Any, args: Any) -> Iterator[str]:
    if data.streaming and not args.per_device_train_batch_tokens:
        yield "streaming shuffles sentences only for batches by tokens; give per_device_train_batch_tokens"
    for name in given.all_changed(("per_device_train_batch_size", "train_sampling_strategy")):
        if args.per_device_train_batch_tokens:
            yield (
                f"{name} has no effect on batches by tokens; set per_device_train_batch_tokens to 0 for batches of "
                "equally many sentences, or leave it out"
            )
    for name in given.all_changed(("dataloader_persistent_workers", "dataloader_prefetch_factor")):
        if not args.dataloader_num_workers:
            yield f"{name} has no effect without dataloader_num_workers, the number of processes that load data"


def _evaluation(given: Given, data: Any, args: Any) -> Iterator[str]:
    if args.eval_on_start and not (data.validation_source or data.validation_data):
        yield "eval_on_start needs validation_source and validation_target, or validation_data"
    if unused := [name for name in args.include_for_metrics if name != "inputs"]:
        yield f"include_for_metrics has {unused[0]!r}, but BLEU, chrF and the samples use nothing but inputs"


def _best_model(given: Given, data: Any, args: Any) -> Iterator[str]:
    uses = given.all_changed(("early_stopping_patience", "load_best_model_at_end"))
    uses += ["save_strategy best"] if args.save_strategy == "best" else []
    uses += [f"lr_scheduler_type {kind}" for kind in _BY_METRIC if args.lr_scheduler_type == kind]
    if uses and args.eval_strategy == "no":
        yield f"{uses[0]} needs evaluations; give eval_strategy steps or epoch"
    if uses and args.metric_for_best_model is None:
        yield f"{uses[0]} needs metric_for_best_model: {', '.join(METRICS)}"
    if args.load_best_model_at_end and args.average_last:
        yield (
            "load_best_model_at_end keeps the best checkpoint and average_last averages the last ones; leave one of "
            "the two out"
        )
    if args.metric_for_best_model is not None:
        yield from _metric(args)


def _metric(args: Any) -> Iterator[str]:
    metric = args.metric_for_best_model.removeprefix("eval_")
    generates = args.predict_with_generate and not args.prediction_loss_only
    measured = [name for name in METRICS if generates or name not in ("bleu", "chrf")]
    if metric not in measured:
        yield f"metric_for_best_model is {metric!r}, which isn't measured; choose one of: {', '.join(measured)}"
    elif args.greater_is_better != METRICS[metric]:
        better = "a greater" if METRICS[metric] else "a smaller"
        yield f"greater_is_better is {args.greater_is_better}, but {better} {metric} is better; leave it out"
    elif args.lr_scheduler_type in _BY_METRIC and METRICS[metric] != (_kwargs(args).get("mode") == "max"):
        mode = "max" if METRICS[metric] else "min"
        yield f"with metric_for_best_model {metric}, write lr_scheduler_kwargs: {{mode: {mode}}}"
    if args.average_last and args.save_total_limit and args.save_total_limit <= args.average_last:
        yield (
            f"save_total_limit {args.save_total_limit} counts the best checkpoint, which is kept too, so fewer than "
            f"average_last {args.average_last} of the last ones would be left; give {args.average_last + 1} or more"
        )


def _without_effect(given: Given, data: Any, args: Any) -> Iterator[str]:
    """Options that need another one. If that is given too, what it says is meant; a command line may switch it off."""
    evaluates = args.eval_strategy != "no" or args.eval_on_start
    when = "eval_strategy steps or epoch"
    switches: tuple[tuple[bool, str, Collection[str]], ...] = (
        (evaluates, when, (*_EVALUATION, *_GENERATION, "metric_for_best_model")),
        (args.push_to_hub, "push_to_hub true", _HUB),
        ("trackio" in args.report_to, "report_to trackio", _TRACKIO),
        (args.metric_for_best_model is not None, "metric_for_best_model", ("greater_is_better",)),
        (args.activation_checkpointing, "activation_checkpointing true", _CHECKPOINTING_KWARGS),
        (args.simcut_alpha > 0, "simcut_alpha", ("simcut_p",)),
    )
    for is_on, switch, options in switches:
        for name in given.all_changed(options):
            if not is_on and switch.split()[0] not in given:
                yield f"{name} has no effect without {switch}"
    if given.changed("optim_target_modules") and not str(args.optim.value).startswith(_LOW_RANK):
        yield f"optim_target_modules has no effect with optim {args.optim.value}; it is for GaLore and APOLLO"


def _compilation(given: Given, data: Any, args: Any) -> Iterator[str]:
    if not args.torch_compile:
        return
    if given.values.get("torch_compile") is False:
        yield "torch_compile is false, but torch_compile_backend or torch_compile_mode is given; leave out one or both"
    backend, mode, modes = args.torch_compile_backend, args.torch_compile_mode, torch_private.compile_modes()
    if backend not in COMPILERS or (backend == "cudagraphs" and not torch.cuda.is_available()):
        yield f"torch_compile_backend is {backend!r}; choose one of: {', '.join(COMPILERS)} (cudagraphs on GPUs only)"
    if mode is not None and backend != "inductor":
        yield f"torch_compile_mode has no effect on the backend {backend}; leave it out, or use inductor"
    if mode is not None and mode not in modes:
        yield f"torch_compile_mode is {mode!r}; choose one of: {', '.join(modes)}"
    if backend == "inductor" and args.device.type == "cpu":
        try:
            torch_private.check_cpp_compiler()
        except Exception as error:
            yield f"torch_compile needs a C++ compiler ({first_line(error)}); install g++, or name one by CXX"


def _checkpointing(given: Given, data: Any, args: Any) -> Iterator[str]:
    kwargs = args.activation_checkpointing_kwargs or {}
    if not isinstance(kwargs, dict):
        yield f"activation_checkpointing_kwargs is {kwargs!r}; write options and values, {{use_reentrant: false}}"
        return
    for name, value in kwargs.items():
        if name not in CHECKPOINTING:
            yield f"activation_checkpointing_kwargs has {name!r}; choose from: {', '.join(CHECKPOINTING)}"
        elif type(value) is not CHECKPOINTING[name] or (type(value) is int and value < 1):
            expected = "1 or more" if CHECKPOINTING[name] is int else "true or false"
            yield f"{name} of activation_checkpointing_kwargs is {value!r}; give {expected}"
    if kwargs.get("offload") and args.device.type == "cpu":
        yield "offload of activation_checkpointing_kwargs moves activations from a GPU's memory; leave it out on a CPU"


def _trackers(names: list[str]) -> Iterator[str]:
    available = get_available_reporting_integrations()
    for name in names:
        try:
            get_reporting_integration_callbacks([name])
        except ValueError as error:
            yield f"report_to: {first_line(error)}"
        if name not in available:
            fix = install("train") if name == "tensorboard" else "install it"
            others = f"choose from: {', '.join(available)}" if available else "leave report_to out"
            yield f"report_to is {name}, which isn't installed; {fix}, or {others}"


def _optimizer(given: Given, args: Any) -> Iterator[str]:
    name = str(args.optim.value)
    try:
        settings = _optimizer_settings(args)
        settings[0]([nn.Parameter(torch.zeros(1))], **settings[1])
    except Exception as error:
        # These look for matrices of the model that is trained; all that can be told here is a missing package.
        if isinstance(error, ImportError) or not name.startswith(_NEEDS_MODEL):
            yield f"optim {name}, optim_args {args.optim_args}: {first_line(error)}"
        return
    for entry in filter(None, (args.optim_args or "").split(",")):
        if _optimizer_settings(args, optim_args=entry) == _optimizer_settings(args, optim_args=None):
            yield f"optim_args {entry!r} has no effect with optim {name}"
    for option in given.all_changed(("adam_beta1", "adam_beta2", "adam_epsilon")):
        if _optimizer_settings(args, **{option: given.defaults[option]}) == settings:
            yield f"{option} has no effect with optim {name}"


def _optimizer_settings(args: Any, **changes: Any) -> tuple[Any, dict[str, Any]]:
    args = copy.copy(args)
    args.learning_rate = args.learning_rate or 1e-3
    vars(args).update(changes)
    trainer = transformers.Seq2SeqTrainer  # imported here, as it imports datasets, which takes a second
    optimizer: tuple[Any, dict[str, Any]] = trainer.get_optimizer_cls_and_kwargs(args, nn.Linear(1, 1))
    return optimizer


def _kwargs(args: Any) -> dict[str, Any]:
    return args.lr_scheduler_kwargs if isinstance(args.lr_scheduler_kwargs, dict) else {}


def _schedule(args: Any) -> Iterator[str]:
    name = str(args.lr_scheduler_type.value)
    if args.lr_scheduler_kwargs and name in _NO_KWARGS:
        yield f"lr_scheduler_kwargs has no effect with lr_scheduler_type {name}"
    warmup = args.get_warmup_steps(max(args.max_steps, 0))
    updates = args.max_steps if args.max_steps > 0 else 2 * warmup + 2
    try:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=args.learning_rate or 1e-3)
        scheduler = get_scheduler(args.lr_scheduler_type, optimizer, warmup, updates, args.lr_scheduler_kwargs)
        functions = getattr(scheduler, "lr_lambdas", [])
        steps = (0, 1, warmup, warmup + 1, updates // 2, updates - 1, updates)
        rates = [float(function(step)) for function in functions for step in steps if step <= updates]
        wrong = [rate for rate in rates if not 0 <= rate < math.inf]
    except Exception as error:
        yield (
            f"lr_scheduler_type {name} fails with warmup_steps {args.warmup_steps:g}, max_steps {args.max_steps} and "
            f"lr_scheduler_kwargs {args.lr_scheduler_kwargs}: {first_line(error)}"
        )
        return
    if wrong:
        yield f"lr_scheduler_type {name} with lr_scheduler_kwargs {args.lr_scheduler_kwargs} gives a rate of {wrong[0]}"
