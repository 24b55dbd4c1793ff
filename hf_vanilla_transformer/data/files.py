"""Writing files so that an interrupted or failed call leaves what was there before."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yields the name of a file beside `path`, to be written, which replaces `path` at the end.

    Nobody sees half of a file. After an error, a full disk for instance, the new file is removed and the old one is
    what it was. A device or a pipe, such as /dev/stdout, is yielded itself.

    Args:
        path: The file to write; if it is a symbolic link, the file that it refers to is replaced.

    Raises:
        OSError: There is no such folder, or it can't be written.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        yield path
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield temporary
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    r"""Writes a UTF-8 text file with "\n" as line ends, all of it or nothing.

    Raises:
        OSError: There is no such folder, it can't be written, or the disk is full.
    """
    with replacing(path) as file:
        file.write_text(text, encoding="utf-8", newline="\n")
