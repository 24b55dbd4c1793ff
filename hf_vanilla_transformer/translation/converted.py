"""Models of other systems, each converted once into a cache of the user's own."""

import hashlib
import json
import os
import re
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.utils import cached_file, logging
from transformers.utils.hub import extract_commit_hash

from ..checkpoints.loading import CONFIG, CheckpointError
from ..errors import first_line
from ..interop import marian
from ..interop.conversion import ConversionError
from ..interop.convert import convert

logger = logging.get_logger(__name__)

FOLDER_VARIABLE = "HF_VANILLA_TRANSFORMER_CACHE"
# Part of the key of each conversion, to be raised when a conversion writes something else.
VERSION = 2


def converted(
    name: str | Path, *, revision: str | None = None, token: str | bool | None = None, local_only: bool = False
) -> Path | None:
    """Returns the folder of a Marian model's conversion, which is made on first use and when the model changes.

    Args:
        name: A folder, or a name on the Hub.
        revision: Branch, tag or commit on the Hub.
        token: For the Hub, as for `from_pretrained`.
        local_only: Whether a name on the Hub is only looked for among the files of earlier downloads.

    Returns:
        The converted checkpoint's folder; None: it is no Marian model, one that can't be found, or one with another
        tokenizer than OPUS-MT's, which transformers loads as it is.

    Raises:
        CheckpointError: The model can't be converted, or the conversion can't be written.
    """
    where: dict[str, Any] = {"revision": revision, "token": token, "local_files_only": local_only}
    config = _file(name, CONFIG, where)
    if config is None or not marian.recognises(Path(config).parent):
        return None
    if _file(name, "source.spm", where) is None and _file(name, "tokenizer.json", where) is not None:
        return None
    if not Path(name).is_dir():
        where["revision"] = extract_commit_hash(config, None) or revision
    try:
        root = _cache_folder() / "converted"
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = root / f"{_readable(name)}-{_key(name, where['revision'])}"
        if not (folder / CONFIG).is_file():
            logger.info(f"{name} is a Marian model; it is converted once, into {folder}.")
            _convert(name, root, folder, where)
    except ConversionError as error:
        raise CheckpointError(f"can't convert {name} ({first_line(error)})") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        raise CheckpointError(
            f"can't keep the conversion of {name} ({first_line(error)}); name another folder in the environment "
            f"variable {FOLDER_VARIABLE}"
        ) from error
    return folder


def _cache_folder() -> Path:
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given).expanduser().absolute()
    if sys.platform == "win32":
        caches = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
        caches = caches if caches.is_absolute() else Path.home() / ".cache"  # its specification ignores relative ones
    return caches / "hf_vanilla_transformer"


def _file(name: str | Path, file: str, where: dict[str, Any]) -> str | None:
    """Returns where a file of a model is; None: it has none, or it can't be found; loading it says so."""
    quiet = {f"_raise_exceptions_for_{problem}": False for problem in ("missing_entries", "connection_errors")}
    try:
        return cached_file(name, file, **quiet, **where)
    except (OSError, ValueError):
        return None


def _convert(name: str | Path, root: Path, folder: Path, where: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=root, ignore_cleanup_errors=True) as place:
        made = Path(place) / "model"
        convert(name, made, system="marian", **where)
        with suppress(OSError):  # there is one already if another process was faster
            os.rename(made, folder)
        if not (folder / CONFIG).is_file():
            raise ConversionError(f"the conversion can't be moved to {folder}")


def _readable(name: str | Path) -> str:
    # The last part of a path, and user and model of a name on the Hub.
    place = Path(name)
    return re.sub(r"[^\w.-]+", "--", (place.resolve().name if place.is_dir() else str(name)))[-100:]


def _key(name: str | Path, commit: str | None) -> str:
    """Returns what is another one for each state of a model: of a commit, or of a folder's files."""
    facts: list[Any] = [VERSION, str(name), commit]
    if Path(name).is_dir():
        for file in sorted(file for file in Path(name).iterdir() if file.is_file()):
            status = file.stat()
            facts.append((file.name, status.st_size, status.st_mtime_ns))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
