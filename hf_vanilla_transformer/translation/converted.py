"""Marian models, each converted once into huggingface_hub's cache of assets."""

import hashlib
import json
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import cached_assets_path
from transformers.utils import cached_file, logging
from transformers.utils.hub import extract_commit_hash

from ..checkpoints.loading import CONFIG, CheckpointError
from ..errors import first_line
from ..interop.base import ConversionError
from ..interop.convert import convert
from ..interop.marian import is_marian

logger = logging.get_logger(__name__)

# Part of each key; raise it when conversions change.
VERSION = 2


def converted(
    name: str | Path, *, revision: str | None = None, token: str | bool | None = None, local_only: bool = False
) -> Path | None:
    """Returns the folder of a Marian model's conversion, which is made on first use and when the model changes.

    None: it is no Marian model, one that can't be found, or one with another tokenizer than OPUS-MT's, which
    transformers loads as it is. With `local_only`, a name on the Hub is looked for among earlier downloads alone.

    Raises:
        CheckpointError: The model can't be converted, or the conversion can't be written.
    """
    where: dict[str, Any] = {"revision": revision, "token": token, "local_files_only": local_only}
    config = _file(name, CONFIG, where)
    if config is None or not is_marian(Path(config).parent):
        return None
    if _file(name, "source.spm", where) is None and _file(name, "tokenizer.json", where) is not None:
        return None
    if not Path(name).is_dir():
        where["revision"] = extract_commit_hash(config, None) or revision
    try:
        root = cached_assets_path("hf_vanilla_transformer", "converted", "marian")
        # The last part of a path, or user and model of a name on the Hub.
        title = re.sub(r"[^\w.-]+", "--", Path(name).resolve().name if Path(name).is_dir() else str(name))
        folder = root / f"{title[-100:]}-{_key(name, where['revision'])}"
        if not (folder / CONFIG).is_file():
            logger.info(f"{name} is a Marian model; it is converted once, into {folder}.")
            with tempfile.TemporaryDirectory(prefix=".converting-", dir=root, ignore_cleanup_errors=True) as place:
                convert(name, Path(place) / "model", system="marian", **where)
                with suppress(OSError):  # another process was faster
                    os.rename(Path(place) / "model", folder)
        if not (folder / CONFIG).is_file():
            raise ConversionError(f"the conversion can't be moved to {folder}")
    except ConversionError as error:
        raise CheckpointError(f"can't convert {name} ({first_line(error)})") from error
    except OSError as error:
        raise CheckpointError(
            f"can't keep the conversion of {name} ({first_line(error)}); name another folder in the environment "
            "variable HF_ASSETS_CACHE"
        ) from error
    return folder


def _file(name: str | Path, file: str, where: dict[str, Any]) -> str | None:
    """Returns where a file of a model is; None: it has none, or it can't be found; loading it says so."""
    quiet = {f"_raise_exceptions_for_{problem}": False for problem in ("missing_entries", "connection_errors")}
    try:
        return cached_file(name, file, **quiet, **where)
    except (OSError, ValueError):
        return None


def _key(name: str | Path, commit: str | None) -> str:
    """Returns a key of a model's state: of its commit, or of its folder's files."""
    facts: list[Any] = [VERSION, str(name), commit]
    if Path(name).is_dir():
        for file in sorted(file for file in Path(name).iterdir() if file.is_file()):
            status = file.stat()
            facts.append((file.name, status.st_size, status.st_mtime_ns))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
