"""Checks before the first update, so that no run fails at its end, and the lines of `train --dry-run`."""

import copy
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import psutil
import torch
from transformers import DefaultFlowCallback, EvalPrediction

from ..checkpoints.completeness import checkpoints_in
from ..errors import first_line, is_out_of_memory
from ..hub.model_card import fill_model_card
from .recipe import RecipeError, VanillaTransformerTrainingArguments
from .run_facts import run_facts
from .run_folder import saved
from .trainer import VanillaTransformerTrainer

BYTES_PER_PARAMETER = 16  # of training: the weight, its gradient and Adam's two moments, 4 each
UPDATES_OF_DRY_RUN = 5
PAIRS_SHOWN = 3
PAIRS_OF_STREAM = 16
TOKENS_OF_REHEARSAL = 4  # of each of two translations


def check_average(args: VanillaTransformerTrainingArguments, updates_per_epoch: int | None = None) -> None:
    """Checks that a run saves and keeps as many checkpoints as are averaged; raises `RecipeError` otherwise.

    `updates_per_epoch` is None before the corpus is read, and for a stream.
    """
    last, kept, saves = args.average_last, args.save_total_limit, number_of_saves(args, updates_per_epoch)
    if kept and kept < last:
        raise RecipeError(
            f"average_last is {last}, but save_total_limit keeps {kept} checkpoints; keep at least {last}"
        )
    if saves is not None and saves < last:
        raise RecipeError(
            f"average_last is {last}, but the run saves {saves} checkpoints; lower average_last or save_steps, or "
            "train longer (max_steps)"
        )


def number_of_saves(args: VanillaTransformerTrainingArguments, updates_per_epoch: int | None = None) -> int | None:
    """Returns how many checkpoints a run saves from its start to its end, or None if that isn't known."""
    strategy, updates = args.save_strategy, number_of_updates(args, updates_per_epoch)
    if strategy == "no":
        return 0
    if strategy == "epoch":
        return None if updates is None or updates_per_epoch is None else math.ceil(updates / updates_per_epoch)
    if updates is None or strategy == "best":
        return None
    interval = args.save_steps if args.save_steps >= 1 else math.ceil(updates * args.save_steps)
    return math.ceil(updates / interval) if interval else min(updates, 1)  # the last update is saved in any case


def number_of_updates(args: VanillaTransformerTrainingArguments, updates_per_epoch: int | None) -> int | None:
    """Returns the updates of a run, by `max_steps` or by its epochs, or None if that isn't known."""
    if args.max_steps >= 0:
        return args.max_steps
    return None if updates_per_epoch is None else math.ceil(args.num_train_epochs * updates_per_epoch)


def preflight(trainer: VanillaTransformerTrainer, folder: Path) -> None:
    """Rehearses a run to its end: forward, backward, translate, score, save and write a card.

    Weights, gradients and random numbers stay as they are, and nothing that is written stays.

    Args:
        trainer: Ready to train.
        folder: The run's output folder; it need not exist.

    Raises:
        RecipeError: One of these steps fails, or the run saves too few checkpoints or too many for the disk.
    """
    per_epoch = updates_per_epoch(trainer)
    check_average(trainer.args, per_epoch)
    if trainer.is_world_process_zero():
        _check_disk(trainer, folder, per_epoch)
    if trainer.is_fsdp_enabled:
        return  # the model isn't sharded yet
    devices = [trainer.args.device] if trainer.args.device.type == "cuda" else []
    was_training = trainer.model.training
    with torch.random.fork_rng(devices), _plain_errors(trainer.args):
        batch = trainer._prepare_inputs(first_batch(trainer))
        _optimize(trainer, number_of_updates(trainer.args, per_epoch) or 1)
        _update(trainer, batch)
        _translate(trainer, batch)
        if trainer.is_world_process_zero():
            with saved(trainer, Path(trainer.args.output_dir or "")):
                pass
            str(fill_model_card(run_facts(trainer)))
    trainer.model.train(was_training)


def updates_per_epoch(trainer: VanillaTransformerTrainer) -> int | None:
    """Returns how many updates an epoch has, or None for a stream."""
    if isinstance(trainer.train_dataset, datasets.IterableDataset):
        return None
    return math.ceil(len(trainer.get_train_dataloader()) / trainer.args.gradient_accumulation_steps)


def first_batch(trainer: VanillaTransformerTrainer) -> dict[str, Any]:
    """Returns the batch that the run begins with; of a stream, whose first batch takes long, its first pairs."""
    dataset = trainer.train_dataset
    if isinstance(dataset, datasets.IterableDataset):
        rows = list(islice(dataset, PAIRS_OF_STREAM))
    elif trainer.batch_sampler is not None:
        rows = [dataset[place] for place in next(iter(trainer.batch_sampler))]
    else:
        rows = [dataset[place] for place in range(min(len(dataset), trainer.args.per_device_train_batch_size))]
    return dict(trainer.data_collator([{name: row[name] for name in ("input_ids", "labels")} for row in rows]))


def _check_disk(trainer: VanillaTransformerTrainer, folder: Path, per_epoch: int | None) -> None:
    """Checks that the checkpoints that a run keeps fit on its disk."""
    args, saves = trainer.args, number_of_saves(trainer.args, per_epoch) or 0
    weights = sum(parameter.numel() * parameter.element_size() for parameter in trainer.model.parameters())
    has_moments = not args.save_only_model and str(getattr(args.optim, "value", args.optim)).startswith("adam")
    checkpoint = weights * ((3 if has_moments else 1) + (args.ema_decay > 0))
    models = weights * (2 if args.average_last or args.ema_decay else 1)
    # The oldest one is removed after the newest is saved.
    kept = min(saves, args.save_total_limit + 1) if args.save_total_limit else saves
    needed = max(kept - len(checkpoints_in(folder)), 0) * checkpoint + models
    disk = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if needed > (free := shutil.disk_usage(disk).free):
        raise RecipeError(
            f"{kept} checkpoints of {_bytes(checkpoint)} and the model need {_bytes(needed)} in {folder}, "
            f"which has {_bytes(free)} left; make room, raise save_steps or lower save_total_limit"
        )


def _optimize(trainer: VanillaTransformerTrainer, updates: int) -> None:
    """Builds optimizer and schedule, and computes some of the run's learning rates."""
    trainer.create_optimizer_and_scheduler(updates)
    try:
        for function in getattr(trainer.lr_scheduler, "lr_lambdas", []):
            rates = [float(function(step)) for step in (0, updates // 2, updates - 1)]
            if not all(0 <= rate < math.inf for rate in rates):
                raise RecipeError(f"lr_scheduler_kwargs {trainer.args.lr_scheduler_kwargs} give a rate of {min(rates)}")
    finally:
        trainer.optimizer = trainer.lr_scheduler = None


def _update(trainer: VanillaTransformerTrainer, batch: dict[str, Any]) -> None:
    trainer.model.train()
    try:
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(trainer.model, dict(batch))
        loss.backward()
        if not loss.isfinite():
            raise RecipeError(f"the loss of the first batch is {loss.item()}, before any update; check the model")
    finally:
        trainer.model.zero_grad(set_to_none=True)


def _translate(trainer: VanillaTransformerTrainer, batch: dict[str, Any]) -> None:
    model, labels = trainer.model.eval(), batch["labels"][:2].cpu().numpy()
    inputs = {name: batch[name][:2] for name in ("input_ids", "attention_mask") if name in batch}
    options = {} if trainer.args.generation_num_beams is None else {"num_beams": trainer.args.generation_num_beams}
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=TOKENS_OF_REHEARSAL, **options).cpu().numpy()
    if trainer.compute_metrics is not None:
        metrics = copy.copy(trainer.compute_metrics)  # it keeps what it has scored
        metrics(EvalPrediction(ids, labels, inputs=inputs["input_ids"].cpu().numpy()))


@contextmanager
def _plain_errors(args: VanillaTransformerTrainingArguments) -> Iterator[None]:
    """Turns errors of the rehearsal into a `RecipeError`."""
    try:
        yield
    except RecipeError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise RecipeError(
            f"there is too little memory for a batch of {args.per_device_train_batch_tokens:,} tokens "
            f"({first_line(error)}); lower per_device_train_batch_tokens, and raise gradient_accumulation_steps instead"
        ) from error
    except (ValueError, TypeError, IndexError, ImportError, ArithmeticError) as error:
        raise RecipeError(f"the run can't be completed with these options: {first_line(error)}") from error


# ---- Dry run ----
def dry_run(trainer: VanillaTransformerTrainer) -> Iterator[str]:
    """Trains for a few updates to measure them, and describes the run.

    Args:
        trainer: Ready to train; its model is not to be used afterwards.

    Yields:
        Lines for the user.
    """
    args, per_epoch = trainer.args, updates_per_epoch(trainer)
    updates = number_of_updates(args, per_epoch)
    yield f"Updates: {'unknown' if per_epoch is None else f'{per_epoch:,}'} per epoch, {updates or 0:,} in all"
    yield from _batch_as_text(trainer)
    parameters = trainer.model.num_parameters()
    yield f"Memory for weights, gradients and Adam's moments: {_bytes(parameters * BYTES_PER_PARAMETER)}"
    if not updates:
        return
    for callback in [one for one in trainer.callback_handler.callbacks if not isinstance(one, DefaultFlowCallback)]:
        trainer.remove_callback(callback)  # trackers, for instance
    args.max_steps = min(UPDATES_OF_DRY_RUN, updates)
    args.save_strategy = args.eval_strategy = args.logging_strategy = "no"
    seconds = trainer.train().metrics["train_runtime"] / args.max_steps
    yield f"Memory of the process after {args.max_steps} updates: {_bytes(psutil.Process().memory_info().rss)}"
    if args.device.type == "cuda":
        yield f"Peak memory of the GPU: {_bytes(torch.cuda.max_memory_allocated(args.device))}"
    yield f"Time of an update: {seconds:.3f} s, the mean of {args.max_steps}"


def _batch_as_text(trainer: VanillaTransformerTrainer) -> Iterator[str]:
    batch, tokenizer = first_batch(trainer), trainer.processing_class
    sources, targets = batch["input_ids"], batch["labels"].masked_fill(batch["labels"] < 0, tokenizer.pad_token_id)
    widths = f"up to {sources.shape[1]} source and {targets.shape[1]} target tokens"
    yield f"First batch: {len(sources)} pairs of {widths}, for example"
    for source, target in list(zip(sources, targets, strict=True))[:PAIRS_SHOWN]:
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in (source, target)]
        yield f"  source: {texts[0]}\n  target: {texts[1]}"


def _bytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
