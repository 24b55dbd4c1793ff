"""The mean of several checkpoints' weights: section 6.1's "averaging the last 5 checkpoints"."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError, named
from .completeness import damage_of
from .files import check_links, new_folder
from .headers import read_json, tensors_in
from .kinds import CONFIG, REPORT_FILES, SAFETENSORS, SETTINGS_FILES, TOKENIZER, VOCABULARY_FILES
from .loading import load_model

# Fields of config.json that may differ: they only matter in training, or say how and where the model was saved. With
# any other field, the same weights would compute something else.
FREE_FIELDS = {
    "_name_or_path", "activation_dropout", "attention_dropout", "attention_init_gain", "auto_map", "custom_pipelines",
    "dropout", "dtype", "label_smoothing", "tokenizer_fingerprint", "transformers_version", "use_cache",
}  # fmt: skip
# Files copied with the weights; the states of optimizer and Trainer are not, as no training resumes from an average.
CARRIED_FILES = (*SETTINGS_FILES, "*.py", "LICENSE*")


def average_checkpoints(
    checkpoints: Sequence[Path], output: Path, *, overwrite: bool = False, trust_remote_code: bool = False
) -> None:
    """Writes a model whose weights are the arithmetic mean of those of the checkpoints.

    Sums are float32 (float64 for float64 weights): the error of the mean of n weights of magnitude up to m is at most
    n m 2^-24, or 3e-7 for five weights of magnitude 1. The mean has the dtype of the checkpoints, and ties the same
    weights. Configuration, generation configuration, tokenizer and code are the last checkpoint's. Memory: one model in
    float32.

    Checkpoints are folders that the Trainer or `save_pretrained` wrote, with weights in safetensors. The output, or
    what it is a link to, appears when it is complete. Where the last checkpoint has a model of its own code, that runs
    to check the weights.

    Raises:
        CheckpointError: A checkpoint is damaged, given twice or unlike the first; weights are not those of the
            configuration's model, or not finite; or `output` exists.
        LinkError: One of their files is a link to a file elsewhere.
        OSError: The output can't be written; an old one is as it was.
    """
    output = Path(os.path.realpath(output))
    _check_complete(checkpoints)
    _check_output(output, overwrite, checkpoints)
    if output in (checkpoint.resolve() for checkpoint in checkpoints):
        raise CheckpointError(f"{output} is one of the checkpoints; choose another output")
    for checkpoint in checkpoints[1:]:
        _check_alike(checkpoints[0], checkpoint)
    load_model(checkpoints[-1], trust_remote_code=trust_remote_code)  # checks that the model has these weights
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with new_folder(output, replace=overwrite) as folder:
            save_torch_state_dict(mean_of(checkpoints), folder, max_shard_size="50GB")
            # A licence of the user's is the replaced model's, too.
            for file in [*_files(output, ["LICENSE*"]), *_files(checkpoints[-1], CARRIED_FILES)]:
                shutil.copyfile(file, folder / file.name)
    except SafetensorError as error:  # a full disk, for instance
        raise OSError(f"averaging into {output} failed ({error})") from error


def _check_output(output: Path, overwrite: bool, checkpoints: Sequence[Path]) -> None:
    if not output.exists():
        return
    if not overwrite:
        raise CheckpointError(f"{output} exists; choose another output, or ask to overwrite it")
    # A run's folder is a saved model too, but it contains checkpoints, and these contain a training's state.
    known = {*CARRIED_FILES, SAFETENSORS, f"{SAFETENSORS}.index.json", *REPORT_FILES} - {"*.py"}
    known |= {file.name for file in _files(checkpoints[-1], ["*.py"])}
    entries = [*output.iterdir()] if output.is_dir() else [output]
    others = sorted(entry.name for entry in entries if entry.is_dir() or not any(map(entry.match, known)))
    if others or (entries and not (output / CONFIG).is_file()):
        found = f"it contains {others[0]}" if others else "it has no config.json"
        raise CheckpointError(f"{output} is not just a saved model ({found}), so it stays; choose another output")


def mean_of(checkpoints: Sequence[Path]) -> dict[str, Tensor]:
    """Returns the mean of each tensor over checkpoints of one architecture: name -> mean, in its shape and dtype."""
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for checkpoint in checkpoints:
        for name, tensor in _tensors(checkpoint):
            wide = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
            values = tensor.to(wide, copy=True)  # a copy, as the file's memory is unmapped
            if not values.isfinite().all():
                raise CheckpointError(
                    f"{checkpoint}: {name} contains NaN or infinity, as the training diverged; leave it out"
                )
            if name not in sums:
                sums[name], dtypes[name] = values, tensor.dtype
            elif tensor.is_floating_point():
                sums[name] += values
            elif not torch.equal(sums[name], tensor):
                raise CheckpointError(f"{checkpoint}: {name} is {tensor.dtype} and differs from {checkpoints[0]}'s")
    for name, dtype in dtypes.items():
        if dtype.is_floating_point:
            sums[name] = sums[name].div_(len(checkpoints)).to(dtype)
    return sums


def _tensors(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields one (name, tensor) at a time; the file is mapped into memory, not read at once."""
    entries = tensors_in(checkpoint)
    for file in sorted({file for file, _ in entries.values()}):
        with safe_open(file, framework="pt") as weights:
            for name in (name for name, (own, _) in entries.items() if own == file):
                yield name, weights.get_tensor(name)


def _check_complete(checkpoints: Sequence[Path]) -> None:
    if not checkpoints:
        raise CheckpointError("there are no checkpoints to average; give at least one")
    known: set[Path] = set()
    for checkpoint in checkpoints:
        if checkpoint.resolve() in known:
            raise CheckpointError(f"{checkpoint} is given twice; it would count double")
        known.add(checkpoint.resolve())
        # The average would contain files from elsewhere.
        check_links(checkpoint, _files(checkpoint, (SAFETENSORS, *CARRIED_FILES)), in_cache=True)
    damages = {checkpoint: damage_of(checkpoint, to_resume=False) for checkpoint in checkpoints}
    if damaged := "; ".join(f"{checkpoint}: {damage}" for checkpoint, damage in damages.items() if damage):
        raise CheckpointError(f"damaged checkpoints can't be averaged; leave them out ({damaged})")


def _files(checkpoint: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({file for pattern in patterns for file in checkpoint.glob(pattern) if file.is_file()})


def _check_alike(first: Path, other: Path) -> None:
    for what, read in (("tensors", _shapes), (CONFIG, _architecture), ("tokenizer", _vocabulary)):
        mine, others = read(first), read(other)
        if names := [name for name in mine.keys() | others.keys() if mine.get(name) != others.get(name)]:
            raise CheckpointError(
                f"the {what} of {other} and {first.name} differ in {named(names)}; average checkpoints of one run"
            )


def _shapes(checkpoint: Path) -> Mapping[str, object]:
    return {name: entry for name, (_, entry) in tensors_in(checkpoint).items()}


def _architecture(checkpoint: Path) -> Mapping[str, object]:
    config = read_json(checkpoint / CONFIG)
    return {field: value for field, value in config.items() if field not in FREE_FIELDS}


def _vocabulary(checkpoint: Path) -> Mapping[str, object]:
    """File name -> content; without tokenizer.json's padding and truncation, those of its latest call."""
    contents: dict[str, object] = {file.name: file.read_bytes() for file in _files(checkpoint, VOCABULARY_FILES)}
    if TOKENIZER in contents:
        content = json.loads((checkpoint / TOKENIZER).read_bytes())
        contents[TOKENIZER] = content | {"padding": None, "truncation": None}
    return contents
