"""The mean of several checkpoints' weights: section 6.1's "averaging the last 5 checkpoints"."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor

from ..evaluation.loading import read_json, tensors_in
from .checkpoints import damage_of

# Fields of config.json that may differ: they only matter in training, or say how and where the model was saved. With
# any other field, the same weights would compute something else.
FREE_FIELDS = {
    "_name_or_path", "activation_dropout", "attention_dropout", "attention_init_gain", "auto_map", "dropout", "dtype",
    "label_smoothing", "transformers_version", "use_cache",
}  # fmt: skip
VOCABULARY_FILES = ("tokenizer.json", "vocab*", "merges.txt", "*.spm", "*.model")
# Files copied with the weights; the states of optimizer and Trainer are not, as no training resumes from an average.
CARRIED_FILES = (
    "config.json", "generation_config.json", "*.py", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", *VOCABULARY_FILES,
)  # fmt: skip


def average_checkpoints(
    checkpoints: Sequence[Path], output: Path, *, overwrite: bool = False, max_shard_size: int | str = "50GB"
) -> None:
    """Writes a model whose weights are the arithmetic mean of those of the checkpoints.

    Sums are float32 (float64 for float64 weights): the error of the mean of n weights of magnitude up to m is at most
    n m 2^-24, which is 3e-7 for five weights of magnitude 1; a single step of Adam changes them by about the learning
    rate. The mean has the dtype of the checkpoints. Integer tensors must be equal in all checkpoints. Tied weights are
    saved once, so they are tied in the mean as well.

    The output appears when it is complete; a killed call leaves a hidden folder, `.NAME.partial`, which the next call
    removes. The output has the last checkpoint's configuration, generation configuration, tokenizer and code, and is
    loaded in the same way. Memory: one model in float32.

    Args:
        checkpoints: Folders that the Trainer or `save_pretrained` wrote, weights in safetensors, one file or sharded.
        output: The folder to write.
        overwrite: Whether an existing model may be replaced.
        max_shard_size: A larger file of weights is split, as by `save_pretrained`: bytes, or "5GB".

    Raises:
        ValueError: A checkpoint is damaged, given twice or doesn't match the first (tensors, shapes, dtypes,
            architecture or vocabulary); weights are NaN; or `output` exists. The message names the file and the reason.
    """
    _check_output(output, overwrite)
    _check_complete(checkpoints)
    for checkpoint in checkpoints[1:]:
        _check_alike(checkpoints[0], checkpoint)
    with _appearing_when_complete(output) as folder:
        save_torch_state_dict(mean_of(checkpoints), folder, max_shard_size=max_shard_size)
        for pattern in CARRIED_FILES:
            for file in checkpoints[-1].glob(pattern):
                shutil.copyfile(file, folder / file.name)


def _check_output(output: Path, overwrite: bool) -> None:
    if not output.exists():
        return
    if not overwrite:
        raise ValueError(f"{output} exists; choose another output, or ask to overwrite it")
    # A run's folder is a saved model too, but it contains checkpoints, and these contain a training's state.
    is_model = (output / "config.json").is_file() and not (output / "trainer_state.json").exists()
    if not is_model or any(entry.is_dir() for entry in output.iterdir()):
        raise ValueError(f"{output} contains more than a saved model, so it is not overwritten; choose another output")


def mean_of(checkpoints: Sequence[Path]) -> dict[str, Tensor]:
    """Returns the mean of each tensor over checkpoints of one architecture.

    Args:
        checkpoints: Folders with weights in safetensors, with the same names and shapes.

    Returns:
        Tensor's name -> mean, in the tensor's shape and dtype.

    Raises:
        ValueError: An integer tensor differs, or a tensor contains NaN.
    """
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for checkpoint in checkpoints:
        for name, tensor in _tensors(checkpoint):
            if tensor.isnan().any():
                raise ValueError(f"{checkpoint}: {name} contains NaN, as the training diverged; leave it out")
            if name not in sums:
                dtypes[name] = tensor.dtype
                sums[name] = tensor.to(_sum_dtype(tensor.dtype), copy=True)  # a copy, as the file's memory is unmapped
            elif tensor.is_floating_point():
                sums[name] += tensor
            elif not torch.equal(sums[name], tensor):
                raise ValueError(f"{checkpoint}: {name} is {tensor.dtype} and differs from {checkpoints[0]}'s")
    for name, dtype in dtypes.items():
        if dtype.is_floating_point:
            sums[name] = sums[name].div_(len(checkpoints)).to(dtype)
    return sums


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _tensors(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields one (name, tensor) at a time; the file is mapped into memory, not read at once."""
    names_of: dict[Path, list[str]] = {}
    for name, (file, _) in tensors_in(checkpoint).items():
        names_of.setdefault(file, []).append(name)
    for file, names in names_of.items():
        with safe_open(file, framework="pt") as weights:
            for name in names:
                yield name, weights.get_tensor(name)


def _check_complete(checkpoints: Sequence[Path]) -> None:
    """Checks that there are checkpoints, each of them once, undamaged and in safetensors."""
    if not checkpoints:
        raise ValueError("there are no checkpoints to average; give at least one")
    damages = []
    for checkpoint in checkpoints:
        if damage := damage_of(checkpoint, to_resume=False):
            damages.append(f"{checkpoint}: {damage}")
        elif not any(checkpoint.glob("model*.safetensors")):
            raise ValueError(f"{checkpoint} has no safetensors; `accelerate merge-weights` converts FSDP's shards")
    if damages:
        raise ValueError(f"damaged checkpoints can't be averaged; leave them out ({'; '.join(damages)})")
    resolved = [checkpoint.resolve() for checkpoint in checkpoints]
    for checkpoint in checkpoints:
        if resolved.count(checkpoint.resolve()) > 1:
            raise ValueError(f"{checkpoint} is given twice; it would count double")


def _check_alike(first: Path, other: Path) -> None:
    """Checks that two checkpoints have one architecture and vocabulary, before any weights are read."""
    _check_tensors_alike(first, other)
    mine, others = _architecture(first), _architecture(other)
    for field in sorted(mine.keys() | others.keys()):
        if mine.get(field) != others.get(field):
            raise ValueError(
                f"{other / 'config.json'} has {field}={others.get(field)!r}, but {first.name} {mine.get(field)!r}; "
                "only checkpoints of one architecture can be averaged"
            )
    my_vocabulary, other_vocabulary = _vocabulary(first), _vocabulary(other)
    for name in sorted(my_vocabulary.keys() | other_vocabulary.keys()):
        if my_vocabulary.get(name) != other_vocabulary.get(name):
            raise ValueError(f"{other / name} differs from {first.name}'s; their tokens mean different things")


def _check_tensors_alike(first: Path, other: Path) -> None:
    mine, others = tensors_in(first), tensors_in(other)
    for name in sorted(mine.keys() ^ others.keys()):
        where, lacking = (first, other) if name in mine else (other, first)
        raise ValueError(f"{lacking} has no {name}, which {where} has; average checkpoints of one run")
    for name, (_, entry) in mine.items():
        for field in ("shape", "dtype"):
            value = others[name][1][field]
            if value != entry[field]:
                raise ValueError(f"{other}: {name} has {field} {value}, but {entry[field]} in {first.name}")


def _architecture(checkpoint: Path) -> dict[str, Any]:
    config = read_json(checkpoint / "config.json")
    assert isinstance(config, dict)  # _check_complete has read it
    return {field: value for field, value in config.items() if field not in FREE_FIELDS}


def _vocabulary(checkpoint: Path) -> dict[str, Any]:
    """File name -> content; without tokenizer.json's padding and truncation, which are those of its latest call."""
    contents: dict[str, Any] = {}
    for pattern in VOCABULARY_FILES:
        for file in checkpoint.glob(pattern):
            contents[file.name] = file.read_bytes()
    if "tokenizer.json" in contents:
        contents["tokenizer.json"] = json.loads(contents["tokenizer.json"]) | {"padding": None, "truncation": None}
    return contents


@contextmanager
def _appearing_when_complete(output: Path) -> Iterator[Path]:
    """Yields a folder to fill, which replaces `output` at the end and is removed after an error."""
    partial, old = (output.with_name(f".{output.name}.{part}") for part in ("partial", "old"))
    for leftover in (partial, old):  # from a killed call
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial)
        raise
    if output.exists():
        output.rename(old)
    partial.rename(output)
    shutil.rmtree(old, ignore_errors=True)
