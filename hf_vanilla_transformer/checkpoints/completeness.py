"""The checkpoints of a run, and the damage that an interrupted training may have left in them.

Nothing that a file contains is executed: torch.load is only called with `weights_only`.
"""

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from transformers.trainer_pt_utils import safe_globals
from transformers.utils import logging

from ..errors import CheckpointError, first_line
from .headers import read_json, tensors_in
from .kinds import CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_SETTINGS

logger = logging.get_logger(__name__)

TRAINER_STATE = "trainer_state.json"
RECIPE = "recipe.json"  # options of a run that can't change, and the fingerprint of its data
OPTIMIZER = "optimizer.pt"
OPTIMIZER_OF_FSDP = "optimizer.bin"
SCHEDULER = "scheduler.pt"
SCALER = "scaler.pt"
RANDOM_STATES = "rng_state*.pth"
# Files of torch.save that resuming reads; nothing reads training_args.bin again.
SAVED_BY_TORCH = (OPTIMIZER, OPTIMIZER_OF_FSDP, SCHEDULER, SCALER, RANDOM_STATES)
OPTIONAL_JSON = (GENERATION_CONFIG, TOKENIZER, *TOKENIZER_SETTINGS)  # a model may lack them, but not config.json


def checkpoints_in(run: Path) -> list[Path]:
    """Returns the folders `checkpoint-N` of a run, sorted by N; none if the run doesn't exist."""
    if not run.is_dir():
        return []
    folders = [folder for folder in run.iterdir() if step_of(folder) is not None and folder.is_dir()]
    return sorted(folders, key=lambda folder: step_of(folder) or 0)


def step_of(checkpoint: Path) -> int | None:
    """Returns N, the number of updates, of a folder named `checkpoint-N`, and None for other names."""
    match = re.fullmatch(r"checkpoint-([0-9]+)", checkpoint.name)
    return int(match[1]) if match else None


def last_complete_checkpoint(run: Path, *, to_resume: bool = True) -> Path | None:
    """Returns the newest complete checkpoint of a run, or None."""
    return next(complete_checkpoints(run, to_resume=to_resume), None)


def last_complete_checkpoints(run: Path, number: int, *, to_resume: bool = True) -> list[Path]:
    """Returns the last `number` complete checkpoints of a run, oldest first; raises `CheckpointError` for fewer."""
    newest = list(islice(complete_checkpoints(run, to_resume=to_resume), number))
    if not newest:
        raise CheckpointError(f"{run} has no complete checkpoint; give a training's folder, with checkpoint-N in it")
    if len(newest) < number:
        names = ", ".join(checkpoint.name for checkpoint in reversed(newest))
        complete = f"{len(newest)} complete checkpoint{'s' if newest[1:] else ''}"
        raise CheckpointError(f"{run} has {complete}, not {number} ({names}); ask for fewer")
    return newest[::-1]


def complete_checkpoints(run: Path, *, to_resume: bool = True) -> Iterator[Path]:
    """Yields a run's complete checkpoints, the newest first, and logs a warning for each damaged one."""
    for checkpoint in reversed(checkpoints_in(run)):
        damage = damage_of(checkpoint, to_resume=to_resume)
        if damage is None:
            yield checkpoint
        else:
            logger.warning(f"skipping {checkpoint}: {damage}")


def damage_of(checkpoint: Path, *, to_resume: bool = True) -> str | None:
    """Returns the reason why a checkpoint is not complete, or None if it is.

    The Trainer writes the model, then `optimizer.pt`, `scheduler.pt` and `rng_state*.pth`, and `trainer_state.json`
    last; a killed training or a full disk leaves some of them, or a truncated file. Changed values in files of the
    right length aren't noticed. A folder `checkpoint-N` must contain a `trainer_state.json` that says N. To resume, it
    needs the optimizer's and the schedule's state (`save_only_model` leaves them out), else a model that can be loaded.
    """
    try:
        if not checkpoint.is_dir():
            raise CheckpointError("there is no such folder")
        if to_resume or step_of(checkpoint) is not None:
            _check_state(checkpoint)
        tensors_in(checkpoint)
        for name in (CONFIG, *(one for one in OPTIONAL_JSON if (checkpoint / one).exists())):
            read_json(checkpoint / name)
        if to_resume:
            _check_training(checkpoint)
    except (CheckpointError, OSError) as error:  # OSError: the folder was removed meanwhile, or can't be read
        return str(error).removeprefix(f"{checkpoint}{os.sep}")
    return None


def _check_state(checkpoint: Path) -> None:
    try:
        state = read_json(checkpoint / TRAINER_STATE)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; the Trainer writes it last, so saving was interrupted") from error
    if (step := step_of(checkpoint)) is not None and state.get("global_step") != step:
        raise CheckpointError(f"{TRAINER_STATE} is of step {state.get('global_step')!r}")


def _check_training(checkpoint: Path) -> None:
    for file in (file for pattern in SAVED_BY_TORCH for file in sorted(checkpoint.glob(pattern))):
        try:  # as the Trainer loads it, but for the tensors' values
            with safe_globals():
                torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # of many kinds
            raise CheckpointError(f"{file.name} can't be loaded ({first_line(error)})") from error
    if not any((checkpoint / name).exists() for name in (OPTIMIZER, OPTIMIZER_OF_FSDP)):
        raise CheckpointError(f"{OPTIMIZER} is missing (save_only_model leaves it out), so training can't resume")
    if not (checkpoint / SCHEDULER).exists():
        raise CheckpointError(f"{SCHEDULER} is missing, so training can't resume from it")
    if not any(checkpoint.glob(RANDOM_STATES)):  # a file, or one for each process
        raise CheckpointError("rng_state.pth is missing, so the random numbers of a resumed training would differ")
