"""Facts of a training for the model's card."""

import platform
from dataclasses import replace

import datasets
import torch
import transformers
from transformers import PreTrainedModel

from ..data.symbols import symbol_splitter
from ..hub.facts import TEXT2TEXT, TRANSLATION, RunFacts, TrainingFacts, curve_of
from .arguments import VanillaTransformerTrainingArguments
from .schedule import peak_learning_rate
from .trainer import VanillaTransformerTrainer


def run_facts(trainer: VanillaTransformerTrainer, seconds: float | None = None) -> RunFacts:
    """Returns the facts of a training for the model's card but for its name; `seconds` is the training's duration."""
    args, model, state = trainer.args, trainer.model, trainer.state
    is_best = args.load_best_model_at_end and state.best_model_checkpoint
    best = state.best_global_step if is_best else None
    task = args.task or ("text2text" if symbol_splitter(trainer.processing_class) else "translation")
    return RunFacts(
        name="",
        task=TEXT2TEXT if task == "text2text" else TRANSLATION,
        config=model.config.to_dict(),
        parameters=model.num_parameters(),
        training_pairs=len(trainer.train_dataset) if isinstance(trainer.train_dataset, datasets.Dataset) else None,
        recipe=replace(
            recipe_of(args, model, args.world_size),
            steps=state.global_step,
            best_step=None if best == state.global_step else best,
            target_tokens=trainer.target_tokens or None,
            hardware=_hardware(args),
            seconds=seconds,
            software=f"torch {torch.__version__}, transformers {transformers.__version__}",
        ),
        curve=curve_of(state.log_history),
    )


def recipe_of(args: VanillaTransformerTrainingArguments, model: PreTrainedModel, processes: int) -> TrainingFacts:
    """Returns the options of a run for the model's card, with dropout and smoothing of the model's configuration."""
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)).replace("_", " ")
    if schedule != "constant":  # which ignores warmup_steps
        is_share = 0 < args.warmup_steps < 1
        schedule += f", {args.warmup_steps:.0%} of the" if is_share else f", {args.warmup_steps:,.0f}"
        schedule += " updates of warm-up"
    tokens = args.per_device_train_batch_tokens * args.gradient_accumulation_steps * processes
    return TrainingFacts(
        optimizer=_optimizer(args),
        schedule=schedule,
        learning_rate=peak_learning_rate(args, model),
        batch_tokens=tokens or None,
        dropout=getattr(model.config, "dropout", None),
        dropout_warmup_steps=args.dropout_warmup_steps or None,
        label_smoothing=args.label_smoothing_factor or getattr(model.config, "label_smoothing", None),
        consistency=f"R-Drop, alpha {args.rdrop_alpha:g}" if args.rdrop_alpha else None,
        precision="bfloat16 autocast" if args.bf16 else "float16 autocast" if args.fp16 else "float32",
        seed=args.seed,
    )


def _optimizer(args: VanillaTransformerTrainingArguments) -> str:
    adam = f"Adam, beta {args.adam_beta1} and {args.adam_beta2}, epsilon {args.adam_epsilon}"
    decay = f", weight decay {args.weight_decay}" if args.weight_decay else ""
    return (adam if args.optimizer.startswith("adamw_torch") else args.optimizer) + decay


def _hardware(args: VanillaTransformerTrainingArguments) -> str:
    if args.device.type == "cuda":
        return f"{args.world_size} x {torch.cuda.get_device_name(args.device)}"
    processor = torch.cpu.get_capabilities().get("cpu_name") or f"{platform.machine()} processor"
    threads = torch.get_num_threads()
    each = f"{threads} thread{'s' if threads > 1 else ''}"
    return f"{processor}, {each}" if args.world_size == 1 else f"{processor}, {args.world_size} processes of {each}"
