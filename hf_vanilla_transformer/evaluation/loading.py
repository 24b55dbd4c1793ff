"""Opening a checkpoint: its files' headers, and the checks that its weights and its tokenizer have to pass."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
# What safetensors says of a file that ends too early (or goes on after its last tensor).
CUT_SHORT = ("header too small", "invalid header length", "file not fully covered")


def tensors_in(checkpoint: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Returns the tensors of a model in safetensors, one file or sharded, without reading their values.

    Args:
        checkpoint: A folder that `save_pretrained` wrote.

    Returns:
        Tensor's name -> its file, and its `dtype` ("F32", "BF16" ...) and `shape` (a list).

    Raises:
        ValueError: Files are missing or cut short, or the index doesn't match them; the message names the file.
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
    """Tensor's name -> dtype and shape, from the header of a safetensors file."""
    if not file.is_file():
        raise ValueError(f"{file.name} is missing")
    try:
        with safe_open(file, framework="pt") as weights:
            slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
            return {name: {"dtype": one.get_dtype(), "shape": one.get_shape()} for name, one in slices.items()}
    except SafetensorError as error:
        if any(words in str(error) for words in CUT_SHORT):
            raise ValueError(f"{file.name} is cut short ({error})") from error
        raise ValueError(f"{file.name} is not in safetensors' format ({error})") from error


def read_json(file: Path) -> dict[str, Any] | str:
    """Returns a JSON file's object, or a sentence that says why it can't be read."""
    if not file.is_file():
        return f"{file.name} is missing"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # JSON's and Unicode's errors
        return f"{file.name} is cut short or not JSON ({error})"
    return values if isinstance(values, dict) else f"{file.name} is not a JSON object"
