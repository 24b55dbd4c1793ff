"""The folder of a run: who may write into it, and what it was started with (`recipe.json`)."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from transformers import Trainer
from transformers.utils import logging

from ..checkpoints.completeness import (
    RECIPE,
    TRAINER_STATE,
    checkpoints_in,
    damage_of,
    last_complete_checkpoint,
    step_of,
)
from ..checkpoints.files import write_text
from ..checkpoints.loading import read_json
from ..errors import first_line
from .recipe import RecipeError

logger = logging.get_logger(__name__)

TOKENIZER = "tokenizer"  # the folder of the tokenizer that a run trains
LOCK = "run.lock"
SAVING = ".saving"  # a folder in which files are written that then replace others
DRAWN = ("loss", "eval_perplexity", "eval_bleu", "learning_rate")  # numbers in a run's log that plots show
FINGERPRINT = "data_fingerprint"  # in recipe.json, beside the options


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Creates a run's folder where it is missing, and keeps other processes from training there.

    The operating system lets go of the lock when the process ends, however it ends; the file that it leaves does no
    harm.

    Args:
        folder: The run's output folder.

    Raises:
        RecipeError: Another process trains there, or the folder can't be written.
    """
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RecipeError(
            f"another process is training in {folder}; wait until it has ended, or give another --output-dir"
        ) from error
    except OSError as error:
        problem = error.strerror or error
        raise RecipeError(f"{folder} can't be written ({problem}); give another --output-dir") from error
    try:
        yield
    finally:
        lock.release()


def is_empty(folder: Path) -> bool:
    """Whether a folder has nothing but what a run leaves that stopped before its first update."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    names = {name for name in names if name not in (LOCK, SAVING) and not name.endswith(".partial")}
    recipe = read_json(folder / RECIPE)
    is_run = isinstance(recipe, dict) and "train_source" in recipe
    return names <= ({RECIPE, TOKENIZER} if is_run else set())


def write_recipe(folder: Path, options: Mapping[str, Any], data: str) -> None:
    """Writes what a run is started with into its folder: its options, and the fingerprint of its training data."""
    write_text(folder / RECIPE, json.dumps({**options, FINGERPRINT: data}, indent=1))


def read_recipe(folder: Path) -> dict[str, Any]:
    """Reads what a run was started with; from a checkpoint's copy, with a warning, if the file itself is damaged.

    Raises:
        RecipeError: There is no run in the folder, or all copies are damaged.
    """
    recipe = read_json(folder / RECIPE)
    if isinstance(recipe, dict):
        return recipe
    for checkpoint in reversed(checkpoints_in(folder)):
        copy = read_json(checkpoint / RECIPE)
        if isinstance(copy, dict):
            logger.warning(f"{folder}: {recipe}; its copy in {checkpoint.name} is used")
            return copy
    if (folder / RECIPE).exists():
        raise RecipeError(f"{folder}: {recipe}, and no checkpoint has a copy; give another --output-dir")
    raise RecipeError(f"there is no run to resume in {folder}; start one without --resume")


def check_same_recipe(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Checks that a run is resumed with the options that it was started with.

    Args:
        folder: The run's output folder.
        before: What `read_recipe` returned, completed by defaults for options that are newer than the run.
        now: The options that must not change.

    Raises:
        RecipeError: One of them has changed.
    """
    for name, value in now.items():
        if before.get(name) != value:
            raise RecipeError(
                f"{folder} was started with {name} {before.get(name)!r}, not {value!r}; resume with the same data and "
                "model, or give another --output-dir"
            )


def check_same_data(folder: Path, data: str) -> None:
    """Checks that a run is resumed with the training data that it was started with.

    Args:
        folder: The run's output folder. A run of an older version of this package has no fingerprint to compare.
        data: The fingerprint of the data now.

    Raises:
        RecipeError: It is another one.
    """
    if read_recipe(folder).get(FINGERPRINT, data) != data:
        raise RecipeError(
            f"the training data has changed since the run in {folder} was started; restore it, or resume with "
            "--accept-changed-data"
        )


def checkpoint_to_resume(folder: Path, named: str | None) -> Path | None:
    """Returns the checkpoint that a run resumes from: the one that is named, or the last complete one.

    Args:
        folder: The run's output folder.
        named: The value of `--resume-from-checkpoint`: a checkpoint's folder; None, or "True" as the Trainer has it:
            the last complete one.

    Raises:
        RecipeError: The named one is not a complete checkpoint of this run, or those of the run are models alone.
    """
    if named is None or named.lower() == "true":
        checkpoint = last_complete_checkpoint(folder)
        model = last_complete_checkpoint(folder, to_resume=False) if checkpoint is None else None
        if model is not None:  # a new start would overwrite it
            raise RecipeError(
                f"no checkpoint in {folder} has all that training needs to resume, which save_only_model leaves out; "
                f"start a new run from the weights with --model-name-or-path {model}"
            )
        return checkpoint
    checkpoint = Path(named)
    if checkpoint.resolve().parent != folder.resolve() or step_of(checkpoint) is None:
        raise RecipeError(
            f"--resume-from-checkpoint {named} is not a checkpoint of {folder}; name one of its checkpoint-N, or start "
            "a new run from its weights with --model-name-or-path"
        )
    if damage := damage_of(checkpoint):
        raise RecipeError(f"--resume-from-checkpoint {named}: {damage}; --resume takes the last complete one")
    return checkpoint


def check_checkpoint(checkpoint: Path, options: Mapping[str, Any], max_steps: int) -> None:
    """Checks that a checkpoint was saved by the run that is resumed, and isn't beyond its end.

    Args:
        checkpoint: A complete one.
        options: The options that must not change.
        max_steps: The run's number of updates; negative: by its epochs.

    Raises:
        RecipeError: It is of a run with other options, or has more updates.
    """
    own = read_json(checkpoint / RECIPE)
    saved = own if isinstance(own, dict) else {}  # an older run has none
    for name in options:
        if name in saved and saved[name] != options[name]:
            raise RecipeError(
                f"{checkpoint} is of another run, with {name} {saved[name]!r}, not {options[name]!r}; remove it, and "
                "resume from one of this run's"
            )
    if 0 <= max_steps < (step := step_of(checkpoint) or 0):
        raise RecipeError(f"max_steps is {max_steps:,}, but {checkpoint} has {step:,} updates already; give more")


@contextmanager
def saved(trainer: Trainer, folder: Path) -> Iterator[Path]:
    """Yields a temporary folder below a run's with the model as it is, and removes it at the end.

    Args:
        trainer: The trainer of the model. With a sharded one, all of its processes have to call this.
        folder: The run's output folder.
    """
    partial, is_main = folder / SAVING, trainer.is_world_process_zero()
    try:
        if is_main:
            shutil.rmtree(partial, ignore_errors=True)  # of a killed run
        trainer.save_model(str(partial), _internal_call=True)  # without pushing it to the Hub
        yield partial
    finally:
        if is_main:
            shutil.rmtree(partial, ignore_errors=True)


def save_model(trainer: Trainer, folder: Path) -> None:
    """Saves a trained model and the trainer's log in the run's folder; an old model stays until all is written.

    Args:
        trainer: After training; all of its processes have to call this.
        folder: The run's output folder.

    Raises:
        OSError: It can't be written; a full disk, for instance.
    """
    try:
        with saved(trainer, folder) as partial:
            if trainer.is_world_process_zero():
                trainer.state.save_to_json(str(partial / TRAINER_STATE))
                for file in partial.iterdir():
                    os.replace(file, folder / file.name)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"the model can't be saved in {folder} ({first_line(error)}); make room, and give --resume to repeat what "
            "follows training"
        ) from error


def read_log(run: str | Path) -> list[dict[str, Any]]:
    """Reads the log of a run: all of it, or up to its last complete checkpoint if it is still training.

    Args:
        run: The run's output folder, or its trainer_state.json.

    Returns:
        What the Trainer logged, in order: `step`, and numbers such as `loss` or `eval_bleu`.

    Raises:
        RecipeError: There is no such folder, no log in it, or the log is damaged.
    """
    file = _state_of(Path(run))
    state = read_json(file)
    if isinstance(state, str):
        raise RecipeError(f"{file.parent}: {state}; give the output folder of a run")
    log = state.get("log_history")
    if not isinstance(log, list) or not all(_is_entry(entry) for entry in log):
        raise RecipeError(f"{file} has no log of a Trainer (`log_history`); give the output folder of a run")
    return log


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
        return False
    return all(isinstance(entry.get(key, 0), int | float) for key in DRAWN)


def _state_of(run: Path) -> Path:
    """Returns the file with a run's log."""
    if run.is_file():
        return run
    if not run.is_dir():
        raise RecipeError(f"{run} does not exist; give the output folder of a run")
    if (run / TRAINER_STATE).is_file():
        return run / TRAINER_STATE
    checkpoint = last_complete_checkpoint(run)
    if checkpoint is None:
        raise RecipeError(f"{run} has neither {TRAINER_STATE} nor a checkpoint; give the output folder of a run")
    return checkpoint / TRAINER_STATE
