"""Files and folders that appear when they are complete."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class LinkError(ValueError):
    """A file of a folder is a symbolic link to somewhere else; the message names both."""


def check_links(folder: Path, files: Iterable[Path] | None = None, *, in_cache: bool = False) -> None:
    """Raises `LinkError` if files of a folder are links out of it, before they are written, copied or sent.

    The folder may be a link itself, and needn't exist; nor need the files. Without `files`, all are meant, and those of
    subfolders. `in_cache`: the folder is only read, and a snapshot in the Hub's cache may have links to `../../blobs`.
    """
    if files is None:
        files = (*folder.iterdir(), *folder.glob("*/*")) if folder.is_dir() else ()
    real = Path(os.path.realpath(folder))
    for file in files:
        target = Path(os.path.realpath(file))
        is_blob = in_cache and real.parent.name == "snapshots" and target.parent == real.parent.parent / "blobs"
        if not (target.is_relative_to(real) or is_blob):
            raise LinkError(f"{file} is a link to {target}, out of the folder; put a copy there, or remove it")


def _beginning(path: Path) -> str:
    """Returns how the name of what becomes `path` at the end begins: hidden, and not too long for a file system."""
    return f".{path.name[:50]}."


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yields the name of a file to write beside `path`; it replaces `path`, or what that link refers to, at the end.

    The file is never half written. After an error, a full disk for instance, the new file is removed and the old one is
    what it was. A device or a pipe, such as /dev/stdout, is yielded itself. Raises OSError if there is no such folder,
    or it can't be written.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a pipe's real path isn't one that can be opened
        yield path
        return
    path = path.resolve()
    temporary = path.with_name(f"{_beginning(path)}{secrets.token_hex(4)}.partial")
    try:
        yield temporary
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    r"""Writes a UTF-8 text file with "\n" as line ends, all of it or nothing."""
    try:
        with replacing(path) as file:
            file.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:  # that of a full disk doesn't name the file
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_new_folder(output: Path) -> None:
    """Raises `OSError`, before any work is done, if `new_folder` couldn't make a folder."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise FileExistsError(f"{output} exists; choose another output")
    if output.is_mount():
        raise FileExistsError(f"{output} is where a file system is mounted; give a new folder in it")
    if not output.absolute().parent.is_dir():
        raise FileNotFoundError(f"{output} can't be written: there is no folder {output.absolute().parent}")


@contextmanager
def new_folder(output: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields an empty folder that becomes `output` at the end; after an error, `output` is as it was.

    A killed process leaves a hidden folder beside `output`, .NAME.*.partial. Raises OSError if it can't be written, or
    there are files in `output` and these aren't to be replaced.
    """
    output = Path(os.path.realpath(output))  # neither "." nor a link can be removed by that name
    with tempfile.TemporaryDirectory(prefix=_beginning(output), suffix=".partial", dir=output.parent) as place:
        folder, old = Path(place, "model"), Path(place, "old")
        folder.mkdir()
        yield folder
        for file in (file for file in folder.rglob("*") if file.is_file()):
            with file.open("rb+") as written:
                os.fsync(written.fileno())  # a power failure can't leave the new name with empty files
        if replace and output.exists():
            output.rename(old)
        elif output.exists():
            output.rmdir()
        try:
            folder.rename(output)
        except BaseException:
            if old.exists():
                old.rename(output)
            raise
