"""Reads what other systems write: pickles of PyTorch, texts and YAML; only data, and nothing that could run code."""

import argparse
import collections
import pickletools
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..errors import first_line
from .interface import ConversionError, Settings

SCALAR: Any = np.float64(0).__reduce__()[0]  # what makes a NumPy number of its bytes


class Figures:
    """Stands in for classes with figures of a training; nothing of them is used."""


# Classes that other systems' checkpoints hold beside tensors. Making one runs nothing but what is written here.
HARMLESS: list[Callable[..., object] | tuple[Callable[..., object], str]] = [
    argparse.Namespace,
    collections.Counter,
    collections.defaultdict,
    np.dtype,
    SCALAR,
    (SCALAR, "numpy.core.multiarray.scalar"),  # its name before NumPy 2
    *(type(np.dtype(kind)) for kind in ("bool", "int32", "int64", "float32", "float64")),
    int,  # the factory of a defaultdict
    *((Figures, f"fairseq.meters.{name}Meter") for name in ("Average", "Stopwatch", "Time")),  # until 0.9
]


def read(file: Path) -> Any:
    """Reads a file of `torch.save`, with no other class than `HARMLESS` and PyTorch's own list, or of safetensors."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        with torch.serialization.safe_globals(HARMLESS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error says more of a refused format
            return torch.load(file, "cpu", weights_only=True)
    except Exception as error:  # a damaged or hostile file raises whatever its reader raises
        raise ConversionError(f"{file} can't be read ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    """Says why a file can't be read; PyTorch's own message advises users to run the code in it."""
    message = str(error)
    if planted := re.search(r"GLOBAL (\S+)", message):
        return f"it holds {planted[1]}, and only data is read, no code"
    if isinstance(error, OSError | SafetensorError):
        return first_line(error)
    return "torch.save didn't write it, or not as plain data"


def checkpoint_in(source: Path, names: Sequence[str], pattern: str) -> Path:
    """Returns a source that is a file, a folder's first file of these names, or its only one of a pattern."""
    if source.is_file():
        return source
    found = [source / name for name in names if (source / name).is_file()] or sorted(source.glob(pattern))
    if not found or (found[0].name not in names and len(found) > 1):
        others = f"{len(found) or 'no'} others ({pattern})"
        raise ConversionError(f"{source} has no {' or '.join(names)}, and {others}; give the checkpoint itself")
    return found[0]


def read_text(file: Path | Traversable) -> str:
    """Reads a text in UTF-8; raises `ConversionError` if it is none."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"{file} can't be read ({first_line(error)})") from error


def parse_yaml(text: str | bytes, name: object) -> Any:
    """Returns what a text in YAML says; raises `ConversionError`, which calls it by this name, if it is damaged."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConversionError(f"{name} can't be read ({first_line(error)})") from error


def texts_in(file: Path) -> set[str]:
    """Returns the texts and the names of classes in a file of `torch.save`, without making anything of them.

    By these, a system's files are recognised; it is empty if the file is no such file.
    """

    def texts(pickled: bytes | IO[bytes]) -> set[str]:
        return {text for _, text, _ in pickletools.genops(pickled) if isinstance(text, str)}

    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                return texts(archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl"))))
        with file.open("rb") as opened:  # before PyTorch 1.6: three short pickles, then that of the content
            return set().union(*(texts(opened) for _ in range(4)))
    except Exception:  # a damaged file raises whatever its reader raises
        return set()


def fields_of(value: object) -> Settings:
    """Returns what a table or a Namespace has; nothing of anything else."""
    if isinstance(value, argparse.Namespace):
        return vars(value)
    return dict(value) if isinstance(value, Mapping) else {}


def tensors_of(value: object, file: Path) -> dict[str, Tensor]:
    """Returns a state dict's tensors; raises `ConversionError` if it is no table of tensors."""
    if not isinstance(value, Mapping) or not value:
        raise ConversionError(f"{file} has no table of tensors where one is expected")
    if wrong := [str(name) for name, one in value.items() if not (isinstance(name, str) and isinstance(one, Tensor))]:
        raise ConversionError(f"{file}: {wrong[0]} in its table of tensors isn't a tensor")
    return dict(value)
