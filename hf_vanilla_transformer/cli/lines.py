"""The lines to translate, window by window: of a file, or what a terminal or a pipe has sent so far."""

import io
import os
import select
import stat
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .common import UsageError

# A window is sorted by length and translated in batches before its translations are written. It ends where one of
# these is reached, which also bounds what is read ahead.
LINES_PER_WINDOW = 5_000
CHARACTERS_PER_WINDOW = 2**20
BYTES_AT_ONCE = 2**16
# Seconds that a terminal or a pipe gets to send more before what it has sent is translated.
GRACE = 0.05


@dataclass
class Lines:
    """What a command translates.

    Attributes:
        windows: Lines without their ends, some thousands at a time.
        total: Their number, if it is known.
        unit: What one of them is called in a message.
    """

    windows: Iterator[list[str]]
    total: int | None
    unit: str = "line"


def of_arguments(sentences: list[str]) -> Lines:
    """Returns the sentences of the command line.

    Raises:
        UsageError: One of them is not UTF-8.
    """
    for number, sentence in enumerate(sentences, start=1):
        try:
            sentence.encode()
        except UnicodeEncodeError as error:  # surrogates, by which Python represents bytes that aren't UTF-8
            raise UsageError(f"sentence {number} is not valid UTF-8; encode it in UTF-8") from error
    return Lines(_windows(sentences), len(sentences), "sentence")


def of_file(name: str) -> Lines:
    """Returns the lines of a file, .gz or not, all of which are checked first, or of a named pipe.

    Raises:
        UsageError: It can't be read, is empty or damaged, or a line is not UTF-8; the message names file and line.
    """
    from ..data import formats

    path = Path(name)
    if path.exists() and not path.is_dir() and not path.is_file():
        return Lines(_of_stream(path.open("rb", buffering=0), name), None)
    try:
        formats.check_file(path)
        total = sum(1 for _ in formats.read_lines(path))
    except formats.CorpusError as error:
        raise UsageError(str(error)) from error
    return Lines(_windows(formats.read_lines(path)), total)


def of_standard_input(stream: Any) -> Lines:
    """Returns the lines of standard input; a file's are checked first.

    Args:
        stream: `sys.stdin`.

    Raises:
        UsageError: It is closed, or a line of a file is not UTF-8.
    """
    from ..data.formats import CorpusError, bounded_lines, decode_lines

    if stream is None or stream.closed or not hasattr(stream, "buffer"):
        raise UsageError("standard input is closed; give sentences as arguments, or a file by --input FILE")
    file, name = stream.buffer, "standard input"
    if not _is_file(file):
        return Lines(_of_stream(file.raw, name), None)
    start = file.tell()
    try:
        total = sum(1 for _ in decode_lines(bounded_lines(file, name), name))
    except CorpusError as error:
        raise UsageError(str(error)) from error
    file.seek(start)
    return Lines(_windows(decode_lines(bounded_lines(file, name), name)), total)


def _is_file(file: IO[bytes]) -> bool:
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except io.UnsupportedOperation:  # held in memory
        return True


def _windows(lines: Iterable[str]) -> Iterator[list[str]]:
    from ..data.formats import CorpusError

    window: list[str] = []
    size = 0
    try:
        for line in lines:
            window.append(line)
            size += len(line)
            if _is_full(window, size):
                yield window
                window, size = [], 0
    except CorpusError as error:  # the file has changed since it was checked
        raise UsageError(str(error)) from error
    if window:
        yield window


def _is_full(window: list[str], size: int) -> bool:
    return len(window) >= LINES_PER_WINDOW or size >= CHARACTERS_PER_WINDOW


def _of_stream(file: Any, name: str) -> Iterator[list[str]]:
    """Yields the lines that have come whenever a window is asked for: at least one, and what follows within `GRACE`.

    Args:
        file: Opened in binary mode without a buffer, so that a read returns what is there.
        name: The file's, for errors.

    Raises:
        UsageError: A line is not UTF-8 or has no end; those before it have been yielded.
        OSError: It can't be read.
    """
    from ..data.formats import LONGEST_LINE, CorpusError, decode_lines

    raw: deque[bytes] = deque()
    decoded = decode_lines(iter(raw.popleft, None), name)
    window: list[str] = []
    size, number, rest = 0, 1, b""
    try:
        while chunk := _read(file):
            *whole, rest = (rest + chunk).split(b"\n")
            raw.extend(line + b"\n" for line in whole)
            for _ in whole:
                window.append(next(decoded))
            size, number = size + len(chunk), number + len(whole)
            if len(rest) > LONGEST_LINE:
                raise CorpusError(
                    f"{name}:{number}: the line has no end within {LONGEST_LINE:,} bytes; give a sentence per line"
                )
            if window and (_is_full(window, size) or not _has_more(file)):
                yield window
                window, size = [], 0
        if rest:
            raw.append(rest)
            window.append(next(decoded))
    except (CorpusError, OSError) as error:
        if window:
            yield window
        if isinstance(error, CorpusError):
            raise UsageError(str(error)) from error
        raise
    if window:
        yield window


def _read(file: Any) -> bytes:
    """Returns what has come, b"" at the end."""
    while (chunk := file.read(BYTES_AT_ONCE)) is None:  # nothing has come, and the file doesn't wait
        time.sleep(GRACE)
    return bytes(chunk)


def _has_more(file: Any) -> bool:
    """Whether more comes within `GRACE`. False where the system can't tell: Windows, for a pipe."""
    try:
        return bool(select.select([file], [], [], GRACE)[0])
    except (OSError, ValueError):
        return False
