"""Facts of a training for the model's card."""

import platform
from dataclasses import replace

import datasets
import torch
import transformers
from transformers import PreTrainedModel, Seq2SeqTrainer

from ..hub.facts import curve_of
from ..hub.model_card import Evaluation, RunFacts, Sample, TrainingFacts, local_name
from ..metrics import Score
from .evaluation import TranslationMetrics
from .recipe import VanillaTransformerTrainingArguments
from .schedule import peak_learning_rate


def run_facts(trainer: Seq2SeqTrainer, seconds: float | None = None) -> RunFacts:
    """Returns a trainer's facts for the model's card; `seconds` is the duration of the training."""
    args, model = trainer.args, trainer.model
    recipe = recipe_of(args, model, args.world_size)
    if trainer.has_own_optimizer:
        recipe = replace(recipe, optimizer=None, schedule=None, learning_rate=None)
    evaluation = _evaluation(trainer)
    return RunFacts(
        name=trainer.hub_model_id or args.hub_model_id or local_name(args.output_dir or "model"),
        config=model.config.to_dict(),
        parameters=model.num_parameters(),
        training_pairs=len(trainer.train_dataset) if isinstance(trainer.train_dataset, datasets.Dataset) else None,
        recipe=replace(
            recipe,
            steps=trainer.state.global_step,
            target_tokens=trainer.target_tokens or None,
            hardware=_hardware(args),
            seconds=seconds,
            software=f"torch {torch.__version__}, transformers {transformers.__version__}",
        ),
        curve=curve_of(trainer.state.log_history),
        evaluations=[] if evaluation is None else [evaluation],
        samples=[Sample(*sample) for sample in trainer.compute_metrics.samples] if evaluation else [],
    )


def recipe_of(args: VanillaTransformerTrainingArguments, model: PreTrainedModel, processes: int) -> TrainingFacts:
    """Returns the options of a run for the model's card, with dropout and smoothing of the model's configuration."""
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)).replace("_", " ")
    is_share = 0 < args.warmup_steps < 1
    warmup = f"{args.warmup_steps:.0%} of the updates" if is_share else f"{args.warmup_steps:,.0f} updates"
    tokens = args.per_device_train_batch_tokens * args.gradient_accumulation_steps * processes
    return TrainingFacts(
        optimizer=_optimizer(args),
        schedule=f"{schedule}, {warmup} of warm-up",
        learning_rate=peak_learning_rate(args, model),
        batch_tokens=tokens or None,
        dropout=getattr(model.config, "dropout", None),
        dropout_warmup_steps=args.dropout_warmup_steps or None,
        label_smoothing=args.label_smoothing_factor or getattr(model.config, "label_smoothing", None),
        consistency=args.consistency,
        precision="bfloat16 autocast" if args.bf16 else "float16 autocast" if args.fp16 else "float32",
        seed=args.seed,
        ema_decay=args.ema_decay or None,
    )


def _optimizer(args: VanillaTransformerTrainingArguments) -> str:
    kind = str(getattr(args.optim, "value", args.optim))
    adam = f"Adam, beta {args.adam_beta1} and {args.adam_beta2}, epsilon {args.adam_epsilon}"
    decay = f", weight decay {args.weight_decay}" if args.weight_decay else ""
    return (adam if kind.startswith("adamw_torch") else kind) + decay


def _evaluation(trainer: Seq2SeqTrainer) -> Evaluation | None:
    """Returns the BLEU of the validation set, if the last evaluation measured the weights that the model has now."""
    state, metrics = trainer.state, trainer.compute_metrics
    is_best = trainer.args.load_best_model_at_end and state.best_global_step
    step = state.best_global_step if is_best else state.global_step
    measured = [(entry["step"], entry["eval_bleu"]) for entry in state.log_history if "eval_bleu" in entry]
    if not isinstance(metrics, TranslationMetrics) or not measured or measured[-1][0] != step:
        return None
    return Evaluation(dataset="validation set", scores=[Score("BLEU", measured[-1][1], metrics.signature)])


def _hardware(args: VanillaTransformerTrainingArguments) -> str:
    if args.device.type == "cuda":
        return f"{args.world_size} x {torch.cuda.get_device_name(args.device)}"
    processor = torch.cpu.get_capabilities().get("cpu_name") or f"{platform.machine()} processor"
    threads = torch.get_num_threads()
    each = f"{threads} thread{'s' if threads > 1 else ''}"
    return f"{processor}, {each}" if args.world_size == 1 else f"{processor}, {args.world_size} processes of {each}"
