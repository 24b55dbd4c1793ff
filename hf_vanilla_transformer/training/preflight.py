"""Checks before the first update, so that no run fails at its end, and the lines of `train --dry-run`."""

import copy
import math
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

import datasets
import psutil
import torch
from torch import Tensor
from transformers import DefaultFlowCallback, EvalPrediction

from ..data.formats import Corpus
from ..data.hub_names import check_model_on_hub
from ..data.vectors import read_vectors
from ..errors import first_line
from ..hub.facts import TARGET_TOKENS
from ..metrics import corpus_bleu
from .arguments import Arguments
from .options import PARTS, RecipeError, refuse
from .run_folder import saved
from .trainer import VanillaTransformerTrainer

UPDATES_OF_DRY_RUN = 5
PAIRS_SHOWN = 3
TOKENS_OF_REHEARSAL = 4  # of each translation


def check_inputs(arguments: Arguments, *, resume: bool, dry_run: bool) -> dict[str, Corpus]:
    """Checks, before any data is read, that nothing of a run is missing, as its files or model; returns the corpora."""
    data, model, args = arguments
    corpora = {part: data.corpus(part) for part in PARTS}
    refuse({
        "--dry-run trains in a temporary folder, with no run to resume; leave --resume out": resume and dry_run,
        "the run needs an output folder: --output-dir outputs/my-run": not args.output_dir,
        "no training data; give train_source and train_target, or train_data": not corpora["train"],
        "eval_strategy needs validation_source and validation_target, or validation_data":
            (args.eval_strategy != "no" or args.eval_on_start) and not corpora["validation"],
    })  # fmt: skip
    for name in (model.model_name_or_path, model.tokenizer_name_or_path):
        if name and not Path(name).is_dir():
            check_model_on_hub(name)
    if not model.model_name_or_path:
        config = model.config(model.vocab_size)  # the tokenizer's vocabulary may be smaller
        if model.embeddings and not resume:  # a checkpoint has them
            next(read_vectors(model.embeddings, config.d_model), None)
    try:
        corpus_bleu(["a"], ["a"], tokenize=args.bleu_tokenize)
    except Exception as error:  # an unknown tokeniser, or a package or a file that it needs
        raise RecipeError(f"bleu_tokenize is {args.bleu_tokenize!r}: {first_line(error)}") from error
    return corpora


def preflight(trainer: VanillaTransformerTrainer) -> None:
    """Rehearses what a run needs long after its first update: its schedule, translating, scoring and saving.

    Weights and random numbers stay as they are, and nothing that is written stays.
    """
    if trainer.is_fsdp_enabled:
        return  # the model isn't sharded yet
    devices = [trainer.args.device] if trainer.args.device.type == "cuda" else []
    was_training = trainer.model.training
    with torch.random.fork_rng(devices):
        try:
            trainer.check_beginning()
            _check_rates(trainer, _updates(trainer)[1] or 1)
            _translate(trainer)
            if trainer.is_world_process_zero():
                with saved(trainer, Path(trainer.args.output_dir or "")):
                    pass
        except (ValueError, TypeError, IndexError, ImportError, ArithmeticError) as error:
            raise RecipeError(f"the run can't be completed with these options: {first_line(error)}") from error
    trainer.model.train(was_training)


def first_pairs(trainer: VanillaTransformerTrainer) -> dict[str, Tensor]:
    """Returns the first pairs of the training data as a batch."""
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in islice(trainer.train_dataset, PAIRS_SHOWN)]
    return dict(trainer.data_collator(rows))


def _updates(trainer: VanillaTransformerTrainer) -> tuple[int, int]:
    """Returns how many updates an epoch has, and the run."""
    _, per_epoch, *_, updates = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    return per_epoch, updates


def _check_rates(trainer: VanillaTransformerTrainer, updates: int) -> None:
    trainer.create_optimizer_and_scheduler(updates)
    factors = getattr(trainer.lr_scheduler, "lr_lambdas", ())
    trainer.optimizer = trainer.lr_scheduler = None
    rates = [float(factor(step)) for factor in factors for step in (0, updates // 2, updates - 1)]
    if wrong := [rate for rate in rates if not 0 <= rate < math.inf]:
        raise ValueError(f"lr_scheduler_kwargs {trainer.args.lr_scheduler_kwargs} give a factor of {wrong[0]}")


def _translate(trainer: VanillaTransformerTrainer) -> None:
    batch = trainer._prepare_inputs(first_pairs(trainer))
    model, labels = trainer.model.eval(), batch["labels"].cpu().numpy()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    options = {} if trainer.args.generation_num_beams is None else {"num_beams": trainer.args.generation_num_beams}
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=TOKENS_OF_REHEARSAL, **options).cpu().numpy()
    if trainer.compute_metrics is not None:
        metrics = copy.copy(trainer.compute_metrics)  # it keeps what it has scored
        metrics(EvalPrediction(ids, labels, inputs=inputs["input_ids"].cpu().numpy()))


# ---- Dry run ----
def measured(trainer: VanillaTransformerTrainer) -> Iterator[str]:
    """Trains for a few updates to measure them, and yields lines that describe the run."""
    args, (per_epoch, updates) = trainer.args, _updates(trainer)
    is_stream = isinstance(trainer.train_dataset, datasets.IterableDataset)
    yield f"Updates: {'unknown' if is_stream else f'{per_epoch:,}'} per epoch, {updates:,} in all"
    yield from _pairs_as_text(trainer)
    if not updates:
        return
    for callback in [one for one in trainer.callback_handler.callbacks if not isinstance(one, DefaultFlowCallback)]:
        trainer.remove_callback(callback)  # trackers, for instance
    args.max_steps = min(UPDATES_OF_DRY_RUN, updates)
    args.save_strategy = args.eval_strategy = "no"
    args.logging_strategy, args.logging_steps = "steps", 1
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if TARGET_TOKENS in entry]
    tokens = [later - before for before, later in pairwise([0, *(entry[TARGET_TOKENS] for entry in logged)])]
    first, *others = (n / entry["tokens_per_second"] for n, entry in zip(tokens, logged, strict=True))
    seconds = sum(others) / len(others) if others else first
    yield f"Memory of the process after {args.max_steps} updates: {_bytes(psutil.Process().memory_info().rss)}"
    if args.device.type == "cuda":
        yield f"Peak memory of the GPU: {_bytes(torch.cuda.max_memory_allocated(args.device))}"
    yield f"Time of an update: {seconds:.3f} s, the mean of {len(others)} after the first, which took {first:.3f} s"
    yield f"Time of all {updates:,} updates: about {seconds * updates / 60:,.1f} minutes, without evaluations"


def _pairs_as_text(trainer: VanillaTransformerTrainer) -> Iterator[str]:
    batch, tokenizer = first_pairs(trainer), trainer.processing_class
    targets = batch["labels"].masked_fill(batch["labels"] < 0, tokenizer.pad_token_id)
    for source, target in zip(batch["input_ids"], targets, strict=True):
        text = tokenizer.decode(source, skip_special_tokens=True, use_source_tokenizer=True)
        yield f"  source: {text}\n  target: {tokenizer.decode(target, skip_special_tokens=True)}"


def _bytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
