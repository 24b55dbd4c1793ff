"""The checkpoints of a run: which there are, and which of them a stopped training left whole."""

import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers.utils import logging

logger = logging.get_logger(__name__)

TRAINER_STATE = "trainer_state.json"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
FSDP_WEIGHTS = "pytorch_model_fsdp_0"  # a folder, from FSDP's SHARDED_STATE_DICT
OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_0")  # plain, FSDP in one file, FSDP sharded
SCHEDULER = "scheduler.pt"
# What torch.save writes and resuming reads. training_args.bin is not among them: nothing reads it again.
SAVED_BY_TORCH = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth", "pytorch_model*.bin")


def checkpoints_in(run: Path) -> list[Path]:
    """Returns the folders `checkpoint-N` of a run, by N; none where there is no such run."""
    if not run.is_dir():
        return []
    folders = [folder for folder in run.iterdir() if step_of(folder) is not None and folder.is_dir()]
    return sorted(folders, key=lambda folder: step_of(folder) or 0)


def step_of(checkpoint: Path) -> int | None:
    """Returns N of a folder named `checkpoint-N`, the optimizer's steps before it was written; None for other names."""
    match = re.fullmatch(r"checkpoint-([0-9]+)", checkpoint.name)
    return int(match[1]) if match else None


def last_whole_checkpoint(run: Path, *, to_resume: bool = True) -> Path | None:
    """Returns the newest whole checkpoint of a run, and logs a warning for each newer one that is damaged.

    Args:
        run: The folder that holds `checkpoint-N`, the Trainer's `output_dir`; it need not exist.
        to_resume: As for `damage_of`.
    """
    return next(_whole_from_the_newest(run, to_resume), None)


def last_whole_checkpoints(run: Path, number: int, *, to_resume: bool = True) -> list[Path]:
    """Returns the last `number` whole checkpoints of a run, oldest first.

    Damaged ones are passed over, each with a warning to the log.

    Args:
        run: The folder that holds `checkpoint-N`.
        number: How many, from 1 up.
        to_resume: As for `damage_of`.

    Raises:
        ValueError: There are fewer.
    """
    whole = [checkpoint for checkpoint, _ in zip(_whole_from_the_newest(run, to_resume), range(number), strict=False)]
    if not whole:
        raise ValueError(f"{run} has no whole checkpoint; give the folder of a training that holds checkpoint-N")
    if len(whole) < number:
        found = ", ".join(checkpoint.name for checkpoint in reversed(whole))
        raise ValueError(f"{run} has not {number} whole checkpoints but {len(whole)} ({found}); ask for as many")
    return whole[::-1]


def _whole_from_the_newest(run: Path, to_resume: bool) -> Iterator[Path]:
    for checkpoint in reversed(checkpoints_in(run)):
        damage = damage_of(checkpoint, to_resume=to_resume)
        if damage is None:
            yield checkpoint
        else:
            logger.warning(f"passing over {checkpoint}: {damage}")


def damage_of(checkpoint: Path, *, to_resume: bool = True) -> str | None:
    """Returns why a checkpoint is not whole, or None if it is.

    The Trainer writes the model, then `optimizer.pt`, `scheduler.pt` and `rng_state*.pth`, and `trainer_state.json` at
    last; a training that is killed, or a full disk, leaves a part of them, or one cut short. Sizes and tables of
    contents are compared, not every byte, so this takes no time on large models either. FSDP's and DeepSpeed's
    checkpoints are known too.

    Args:
        checkpoint: The folder. Where its name is `checkpoint-N`, `trainer_state.json` has to be there and to say N.
        to_resume: Whether training shall go on from it, which takes the optimizer's and the schedule's state
            (`save_only_model` leaves them out). False asks for a model that can be loaded, no more.
    """
    try:
        for damage in _damages(checkpoint, to_resume):
            return damage
    except OSError as error:  # it vanished meanwhile, or may not be read
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
        yield f"{state}; the Trainer writes it last"
    elif (step := step_of(checkpoint)) is not None and state.get("global_step") != step:
        yield f"{TRAINER_STATE} is that of step {state.get('global_step')}"


def _config_damages(checkpoint: Path) -> Iterator[str]:
    config = read_json(checkpoint / CONFIG)
    # With sharded FSDP weights the Trainer writes no configuration.
    if isinstance(config, str) and not (checkpoint / FSDP_WEIGHTS).is_dir():
        yield config


def _weights_damages(checkpoint: Path) -> Iterator[str]:
    """Looks for weights in the order in which the Trainer and `from_pretrained` do."""
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
        yield f"it has no weights, neither {WEIGHTS} nor {WEIGHTS_INDEX}"


def _resume_damages(checkpoint: Path) -> Iterator[str]:
    yield from _archive_damages(file for pattern in SAVED_BY_TORCH for file in sorted(checkpoint.glob(pattern)))
    if any(checkpoint.glob("global_step*")):  # DeepSpeed keeps the optimizer there, and most often the schedule
        yield from _deepspeed_damages(checkpoint)
        return
    if not any((checkpoint / name).exists() for name in OPTIMIZERS):
        yield "optimizer.pt is missing (save_only_model leaves it out), so training can't go on from it"
    if (checkpoint / "optimizer_0").is_dir():
        yield from _distributed_damages(checkpoint / "optimizer_0")
    if not (checkpoint / SCHEDULER).exists():
        yield f"{SCHEDULER} is missing, so training can't go on from it"


def _archive_damages(files: Iterable[Path]) -> Iterator[str]:
    """torch.save writes zip archives, whose table of contents is at the end."""
    for file in files:
        if not zipfile.is_zipfile(file):
            yield f"{file.name} is cut short"


def _distributed_damages(folder: Path) -> Iterator[str]:
    """What torch.distributed.checkpoint writes: a file or more a process, and `.metadata` at last."""
    if not (folder / ".metadata").is_file():
        yield f"{folder.name}/.metadata is missing"
        return
    try:
        pieces = FileSystemReader(folder).read_metadata().storage_data.values()
    except Exception as error:  # a pickle that is cut short raises whatever comes next
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
    """A file or more a process in a folder whose name `latest` tells, which is written at last."""
    if not (checkpoint / "latest").is_file():
        yield "latest is missing, which DeepSpeed writes last"
        return
    folder = checkpoint / (checkpoint / "latest").read_text(encoding="utf-8").strip()
    if not any(folder.glob("*model_states.pt")):
        yield f"{folder.name} has no model states"
    yield from _archive_damages(sorted(folder.glob("*.pt")))


def tensors_in(checkpoint: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Returns what the headers of a model's safetensors say, one file or sharded, without reading the weights.

    Args:
        checkpoint: A folder that `save_pretrained` wrote.

    Returns:
        For each tensor's name its file, and its `dtype` ("F32", "BF16" ...) and `shape` (a list).

    Raises:
        ValueError: Files are missing or cut short, or the index doesn't fit them; the message names the file.
    """
    if (checkpoint / WEIGHTS).exists() or not (checkpoint / WEIGHTS_INDEX).exists():
        return {name: (checkpoint / WEIGHTS, entry) for name, entry in _header(checkpoint / WEIGHTS).items()}
    index = read_json(checkpoint / WEIGHTS_INDEX)
    if isinstance(index, str):
        raise ValueError(index)
    shard_of = index.get("weight_map")
    if not isinstance(shard_of, dict):
        raise ValueError(f"{WEIGHTS_INDEX} has no weight_map")
    headers = {shard: _header(checkpoint / shard) for shard in sorted(set(shard_of.values()))}
    for name, shard in shard_of.items():
        if name not in headers[shard]:
            raise ValueError(f"{shard} has no {name}, which {WEIGHTS_INDEX} looks for there")
    return {name: (checkpoint / shard, headers[shard][name]) for name, shard in shard_of.items()}


def _header(file: Path) -> dict[str, dict[str, Any]]:
    """A safetensors file: the header's length in 8 bytes, the header in JSON, the tensors' bytes to the end."""
    if not file.is_file():
        raise ValueError(f"{file.name} is missing")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 + length:
            raise ValueError(f"{file.name} is cut short")
        try:
            tensors = {name: entry for name, entry in json.loads(stream.read(length)).items() if name != "__metadata__"}
            expected = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{file.name} is not in safetensors' format ({error!r})") from error
    if size != expected:
        raise ValueError(f"{file.name} is cut short: it has {size:,} of {expected:,} bytes")
    return tensors


def read_json(file: Path) -> dict[str, Any] | str:
    """Returns what a JSON file holds, or in words why it can't be read."""
    if not file.is_file():
        return f"{file.name} is missing"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # JSON's and Unicode's errors
        return f"{file.name} is cut short or no JSON ({error})"
    return values if isinstance(values, dict) else f"{file.name} holds no fields"
