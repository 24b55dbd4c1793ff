"""Where compiled programs are kept: in a folder of the user's own, as a process runs what it loads from there.

Whoever can write to that folder, or put another one in its place, could run code as the user. So nothing is loaded from
a folder that belongs to somebody else or that others may write, and the folders above it are looked at as well. A
program's file name ends in the SHA-256 of its content: a damaged file is noticed, and name and content can't be
separated by an interruption. While a program is compiled, the compiler keeps its files in a folder beside the programs.
"""

import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from transformers.utils import logging

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.get_logger(__name__)

FOLDER_VARIABLE = "HF_VANILLA_TRANSFORMER_CACHE"
OTHER_FOLDER = f"name another folder in the environment variable {FOLDER_VARIABLE}"

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
# The compiler's commands would take such a path for two.
UNQUOTED = re.compile(r"[\s'\"]")

WORKSPACE = ".compiling-"
# Seconds. A younger workspace without a lock may belong to a process that has not locked it yet.
TIME_TO_LOCK = 10
# Where there are no locks, one that is older was left over.
LONGEST_COMPILATION = 24 * 60 * 60


class UnusableFolderError(Exception):
    """Programs can't be kept in the folder; the message names it and the fix."""


def programs_folder() -> Path:
    """Returns the folder of compiled programs; a missing one is created, and nobody else may read it.

    Raises:
        UnusableFolderError: It can't be created, somebody else may write to it or replace it, or programs can't be
            compiled or run there.
    """
    folder = private_folder("programs", "compiled programs")
    if UNQUOTED.search(str(folder)):
        raise UnusableFolderError(
            f"PyTorch's compiler can't use {folder}, which has a space or a quote; {OTHER_FOLDER}"
        )
    if hasattr(os, "ST_NOEXEC") and os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise UnusableFolderError(f"{folder} is mounted noexec, so programs there can't run; {OTHER_FOLDER}")
    return folder


def private_folder(name: str, contents: str) -> Path:
    """Returns a folder in the user's cache; a missing one is created, and nobody else may read it.

    Args:
        name: The folder's.
        contents: What is kept there, for errors.

    Raises:
        UnusableFolderError: It can't be created, or somebody else may write to it or replace it.
    """
    try:
        folder = _cache_folder() / name
        for place in reversed([folder, *folder.parents]):
            if not place.exists():
                with suppress(FileExistsError):  # another process was faster
                    place.mkdir(0o700)
        folder = folder.resolve(strict=True)
        _check_folder(folder, contents)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        raise UnusableFolderError(f"there is no folder for {contents} ({error}); {OTHER_FOLDER}") from error
    return folder


def _cache_folder() -> Path:
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given).expanduser().absolute()
    return _platform_caches() / "hf_vanilla_transformer"


def _platform_caches() -> Path:
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return Path(local) if local else Path.home() / "AppData" / "Local"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return given if given.is_absolute() else Path.home() / ".cache"  # its specification ignores relative ones


def _check_folder(folder: Path, contents: str) -> None:
    """Checks that nobody but the user (and root) can write to a folder or replace it.

    Args:
        folder: Without symbolic links in its path. Once this has passed, nobody else can put any there.
        contents: What is kept there, for errors.

    Raises:
        UnusableFolderError: Somebody else can.
    """
    if not hasattr(os, "geteuid"):  # Windows, where a user's folders are private by default
        return
    # Within a user namespace, root's folders belong to a user of another number, and so does the topmost.
    trusted = {os.geteuid(), 0, os.stat(folder.anchor).st_uid}
    for place in (folder, *folder.parents):
        status, is_above = place.stat(), place != folder
        if status.st_uid not in (trusted if is_above else {os.geteuid()}):
            raise UnusableFolderError(
                f"{place} belongs to another user (number {status.st_uid}), so {contents} aren't loaded from "
                f"{'below it' if is_above else 'it'}; {OTHER_FOLDER}"
            )
        # In a sticky folder, such as /tmp, others can't rename what isn't theirs.
        if status.st_mode & OTHERS_MAY_WRITE and not (is_above and status.st_mode & stat.S_ISVTX):
            raise UnusableFolderError(
                f"other users may write to {place}, so {contents} aren't loaded from "
                f"{'below it' if is_above else 'it'}; run `chmod go-w {place}`, or {OTHER_FOLDER}"
            )


def kept_programs(folder: Path, name: str) -> Iterator[Path]:
    """Yields the files of a program that may be loaded; others are removed, with a warning.

    Args:
        folder: What `programs_folder` returned.
        name: The program's.
    """
    for path in sorted(folder.glob(f"{name}*")):
        if reason := _refusal(path, name):
            discard(path, reason)
        else:
            yield path


def _refusal(path: Path, name: str) -> str | None:
    """Says why a program must not be loaded; None: it may be."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return "is not a file"
        if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
            return f"belongs to another user (number {status.st_uid})"
        if hasattr(os, "geteuid") and status.st_mode & OTHERS_MAY_WRITE:
            return "may be written by other users"
        if path.stem != f"{name}-{_digest(path)}":
            return "is damaged: its content doesn't match the SHA-256 in its name"
    except OSError as error:
        return f"can't be read ({error.strerror})"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def discard(path: Path, reason: str) -> None:
    """Warns of a program that is not loaded, and removes it."""
    logger.warning(f"{path} {reason}; the decoder is compiled anew.")
    with suppress(OSError):
        path.unlink()


def keep(library: Path, folder: Path, name: str) -> Path:
    """Moves a program into the folder, under a name that has its digest.

    Args:
        library: A file in a workspace of the folder.
        folder: What `programs_folder` returned.
        name: The program's.

    Returns:
        Where it is now.

    Raises:
        OSError: It can't be moved.
    """
    library.chmod(0o600)
    kept = folder / f"{name}-{_digest(library)}{library.suffix}"
    os.replace(library, kept)  # at once, as other processes may look for it
    return kept


@contextmanager
def workspace(folder: Path) -> Iterator[Path]:
    """Yields a new folder for the compiler's own files, and removes it at the end.

    So it does with those that processes left over that were killed.

    Args:
        folder: What `private_folder` returned.

    Raises:
        OSError: The folder can't be written.
    """
    for left_over in folder.glob(f"{WORKSPACE}*"):
        if _is_abandoned(left_over):
            shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=WORKSPACE, dir=folder, ignore_cleanup_errors=True) as name:
        descriptor = _lock(Path(name))
        try:
            yield Path(name)
        finally:
            if descriptor is not None:
                os.close(descriptor)


def _lock(path: Path) -> int | None:
    """Locks a folder until its descriptor, which is returned, is closed or the process ends.

    Raises:
        BlockingIOError: Another process holds the lock.
    """
    if fcntl is None:
        return None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    return descriptor


def _is_abandoned(path: Path) -> bool:
    try:
        age = time.time() - path.stat().st_mtime
        if age > LONGEST_COMPILATION:
            return True
        if age < TIME_TO_LOCK or (descriptor := _lock(path)) is None:
            return False
    except OSError:  # it is locked, or has gone
        return False
    os.close(descriptor)
    return True
