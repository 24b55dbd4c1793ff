"""The checkpoints of a run: which ones exist, and which of them are complete after an interrupted training."""

import re
import zipfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers.utils import logging

from ..evaluation.loading import CONFIG, WEIGHTS, WEIGHTS_INDEX, read_json, tensors_in

logger = logging.get_logger(__name__)

TRAINER_STATE = "trainer_state.json"
FSDP_WEIGHTS = "pytorch_model_fsdp_0"  # a folder, from FSDP's SHARDED_STATE_DICT
OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_0")  # plain, FSDP in one file, FSDP sharded
SCHEDULER = "scheduler.pt"
# What torch.save writes and resuming reads; nothing reads training_args.bin again.
SAVED_BY_TORCH = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth", "pytorch_model*.bin")


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
    """Returns the newest complete checkpoint of a run, and logs a warning for each newer one that is damaged.

    Args:
        run: The folder that contains `checkpoint-N`, the Trainer's `output_dir`; it need not exist.
        to_resume: As for `damage_of`.

    Returns:
        The checkpoint's folder, or None if there is no complete one.
    """
    return next(_complete_from_the_newest(run, to_resume), None)


def last_complete_checkpoints(run: Path, number: int, *, to_resume: bool = True) -> list[Path]:
    """Returns the last `number` complete checkpoints of a run, oldest first.

    Damaged ones are skipped, each with a warning in the log.

    Args:
        run: The folder that contains `checkpoint-N`.
        number: How many to return, at least 1.
        to_resume: As for `damage_of`.

    Raises:
        ValueError: There are fewer.
    """
    newest = list(islice(_complete_from_the_newest(run, to_resume), number))
    if not newest:
        raise ValueError(f"{run} has no complete checkpoint; give a training's output folder, with checkpoint-N in it")
    if len(newest) < number:
        names = ", ".join(checkpoint.name for checkpoint in reversed(newest))
        raise ValueError(f"{run} has {len(newest)} complete checkpoints, not {number} ({names}); ask for fewer")
    return newest[::-1]


def _complete_from_the_newest(run: Path, to_resume: bool) -> Iterator[Path]:
    for checkpoint in reversed(checkpoints_in(run)):
        damage = damage_of(checkpoint, to_resume=to_resume)
        if damage is None:
            yield checkpoint
        else:
            logger.warning(f"skipping {checkpoint}: {damage}")


def damage_of(checkpoint: Path, *, to_resume: bool = True) -> str | None:
    """Returns why a checkpoint is not complete, or None if it is.

    The Trainer writes the model, then `optimizer.pt`, `scheduler.pt` and `rng_state*.pth`, and `trainer_state.json`
    last; a killed training or a full disk leaves some of them, or a truncated file. Sizes and tables of contents are
    compared, not every byte, so this is fast on large models too. FSDP's and DeepSpeed's checkpoints are recognised.

    Args:
        checkpoint: The folder. If its name is `checkpoint-N`, it must contain a `trainer_state.json` that says N.
        to_resume: Whether training is to resume from it, which needs the optimizer's and the schedule's state
            (`save_only_model` leaves them out). False only asks for a model that can be loaded.
    """
    try:
        for damage in _damages(checkpoint, to_resume):
            return damage
    except OSError as error:  # the folder was removed meanwhile, or can't be read
        return str(error)
    return None


def _damages(checkpoint: Path, to_resume: bool) -> Iterator[str]:
    if not checkpoint.is_dir():
        yield "there is no such folder"
        return
    if to_resume or step_of(checkpoint) is not None:
        yield from _state_damages(checkpoint)
    yield from _config_damages(checkpoint)
    yield from _weights_damages(checkpoint)
    if to_resume:
        yield from _resume_damages(checkpoint)


def _state_damages(checkpoint: Path) -> Iterator[str]:
    state = read_json(checkpoint / TRAINER_STATE)
    if isinstance(state, str):
        yield f"{state}; the Trainer writes it last, so saving was interrupted"
    elif (step := step_of(checkpoint)) is not None and state.get("global_step") != step:
        yield f"{TRAINER_STATE} is of step {state.get('global_step')}"


def _config_damages(checkpoint: Path) -> Iterator[str]:
    config = read_json(checkpoint / CONFIG)
    # With sharded FSDP weights the Trainer writes no configuration.
    if isinstance(config, str) and not (checkpoint / FSDP_WEIGHTS).is_dir():
        yield config


def _weights_damages(checkpoint: Path) -> Iterator[str]:
    """Checks the weights, in the order in which the Trainer and `from_pretrained` look for them."""
    if (checkpoint / WEIGHTS).exists() or (checkpoint / WEIGHTS_INDEX).exists():
        try:
            tensors_in(checkpoint)
        except ValueError as error:
            yield str(error)
    elif (checkpoint / FSDP_WEIGHTS).is_dir():
        yield from _distributed_damages(checkpoint / FSDP_WEIGHTS)
    elif any(checkpoint.glob("global_step*")):
        yield from _deepspeed_damages(checkpoint)
    else:
        yield f"it has no weights: neither {WEIGHTS} nor {WEIGHTS_INDEX}"


def _resume_damages(checkpoint: Path) -> Iterator[str]:
    yield from _archive_damages(file for pattern in SAVED_BY_TORCH for file in sorted(checkpoint.glob(pattern)))
    if any(checkpoint.glob("global_step*")):  # DeepSpeed's optimizer is there, and usually the schedule
        yield from _deepspeed_damages(checkpoint)
        return
    if not any((checkpoint / name).exists() for name in OPTIMIZERS):
        yield "optimizer.pt is missing (save_only_model leaves it out), so training can't resume from it"
    if (checkpoint / "optimizer_0").is_dir():
        yield from _distributed_damages(checkpoint / "optimizer_0")
    if not (checkpoint / SCHEDULER).exists():
        yield f"{SCHEDULER} is missing, so training can't resume from it"


def _archive_damages(files: Iterable[Path]) -> Iterator[str]:
    """Checks what torch.save has written: zip archives, whose table of contents is at the end."""
    for file in files:
        if not zipfile.is_zipfile(file):
            yield f"{file.name} is cut short"


def _distributed_damages(folder: Path) -> Iterator[str]:
    """Checks what torch.distributed.checkpoint has written: files of each process, and `.metadata` last."""
    if not (folder / ".metadata").is_file():
        yield f"{folder.name}/.metadata is missing"
        return
    try:
        pieces = FileSystemReader(folder).read_metadata().storage_data.values()
    except Exception as error:  # a truncated pickle raises errors of many kinds
        yield f"{folder.name}/.metadata can't be read ({error})"
        return
    ends: dict[str, int] = {}
    for piece in pieces:
        ends[piece.relative_path] = max(piece.offset + piece.length, ends.get(piece.relative_path, 0))
    for name, end in ends.items():
        if not (folder / name).is_file():
            yield f"{folder.name}/{name} is missing"
        elif (folder / name).stat().st_size < end:
            yield f"{folder.name}/{name} is cut short"


def _deepspeed_damages(checkpoint: Path) -> Iterator[str]:
    """Checks the files of each process in the folder that `latest` names, which DeepSpeed writes last."""
    if not (checkpoint / "latest").is_file():
        yield "latest is missing, which DeepSpeed writes last"
        return
    folder = checkpoint / (checkpoint / "latest").read_text(encoding="utf-8").strip()
    if not any(folder.glob("*model_states.pt")):
        yield f"{folder.name} has no model states"
    yield from _archive_damages(sorted(folder.glob("*.pt")))
