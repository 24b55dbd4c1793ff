"""Files and folders: they appear when they are complete; files are recognised when they have changed."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

BLOCK = 64 * 1024  # bytes
BLOCKS = 256  # of a larger file: 16 MiB, read in seconds from any disk


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
    temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(4)}.partial")  # names have at most 255 bytes
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


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yields an empty folder, which becomes `output` at the end; after an error, nothing is there.

    Raises:
        OSError: It can't be written, or there is something at `output`.
    """
    output = output.absolute()  # "." can't be removed by that name
    parent = output.parent
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", suffix=".partial", dir=parent) as place:
        folder = Path(place) / "model"
        folder.mkdir()
        yield folder
        if output.exists():
            output.rmdir()
        folder.rename(output)


@dataclass(frozen=True)
class Fingerprint:
    """What is remembered of a file.

    Attributes:
        size: Bytes.
        modified: Modification time, in nanoseconds since 1970.
        sample: Digest of blocks all over the file, of all of it up to 16 MiB.
        digest: Digest of all of it, or "" if it wasn't asked for.
    """

    size: int
    modified: int
    sample: str
    digest: str = ""

    def difference(self, now: "Fingerprint") -> str | None:
        """Returns what has changed since this fingerprint was taken, or None if nothing has, as far as one can see."""
        if self.size != now.size:
            return f"had {self.size:,} bytes and has {now.size:,}"
        if self.sample != now.sample or (self.digest and now.digest and self.digest != now.digest):
            return "has the same size and another content"
        same = self.size <= BLOCK * BLOCKS or (self.digest and now.digest) or self.modified == now.modified
        # A copy has another time, too; only reading all of it can tell.
        return None if same else "has the same size, and was written since"


def fingerprint(path: str | Path, *, complete: bool = False) -> Fingerprint:
    """Reads a file's fingerprint.

    Args:
        path: The file.
        complete: Whether to read all of it, however large it is.
    """
    path = Path(path)
    status = path.stat()
    with path.open("rb") as file:
        sample = xxhash.xxh3_128()
        for start in _starts(status.st_size):
            file.seek(start)
            sample.update(file.read(BLOCK))
        digest = xxhash.xxh3_128()
        file.seek(0)
        while complete and (block := file.read(1 << 20)):
            digest.update(block)
    return Fingerprint(status.st_size, status.st_mtime_ns, sample.hexdigest(), digest.hexdigest() if complete else "")


def _starts(size: int) -> Iterator[int]:
    """Where the sampled blocks begin: all blocks of a small file; of a large one, evenly from the first to the last."""
    if size <= BLOCK * BLOCKS:
        yield from range(0, size, BLOCK)
    else:
        yield from (number * (size - BLOCK) // (BLOCKS - 1) for number in range(BLOCKS))
