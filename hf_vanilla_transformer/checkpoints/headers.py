"""What a checkpoint's files say of it, read without PyTorch: JSON, and the headers of weights."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from .kinds import CONFIG, MODEL_TYPE

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
Entry = tuple[str, list[int]]  # what a header of safetensors says of a tensor: its type ("F32", "BF16" ...), its shape


def tensors_in(checkpoint: Path) -> dict[str, tuple[Path, Entry]]:
    """Returns the tensors of a saved model in safetensors, without their values: name -> file, and type and shape.

    `CheckpointError` names a file of it, one or sharded, that is missing or cut short, or an index that doesn't match.
    """
    if (checkpoint / WEIGHTS).exists() or not (checkpoint / WEIGHTS_INDEX).exists():
        return {name: (checkpoint / WEIGHTS, entry) for name, entry in _header(checkpoint / WEIGHTS).items()}
    index = checkpoint / WEIGHTS_INDEX
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict):
        raise CheckpointError(f"{index} has no weight_map")
    for shard in shard_of.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index} names {shard!r}, not a file beside it")
    headers = {shard: _header(checkpoint / shard) for shard in sorted(set(shard_of.values()))}
    for name, shard in shard_of.items():
        if name not in headers[shard]:
            raise CheckpointError(f"{checkpoint / shard} has no {name}, as {WEIGHTS_INDEX} says")
    return {name: (checkpoint / shard, headers[shard][name]) for name, shard in shard_of.items()}


def _header(file: Path) -> dict[str, Entry]:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    try:
        with safe_open(file, framework="np") as weights:
            slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
            return {name: (one.get_dtype(), one.get_shape()) for name, one in slices.items()}
    except SafetensorError as error:
        raise CheckpointError(f"{file} is cut short, or not in safetensors' format ({error})") from error


def read_json(file: Path) -> dict[str, Any]:
    """Returns a JSON file's object; raises `CheckpointError` if it can't be read."""
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # JSON's and Unicode's errors, and too many brackets
        raise CheckpointError(f"{file} is cut short or not JSON ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return values


def is_own_model(folder: Path) -> bool:
    """Whether the configuration in a folder is that of this package's models; errors are those of `read_json`."""
    return read_json(folder / CONFIG).get("model_type") == MODEL_TYPE
