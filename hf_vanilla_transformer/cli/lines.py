"""The lines that commands read: in windows, of arguments, files, terminals and pipes; or of two files, as pairs."""

import io
import os
import select
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .output import UsageError

# A window is sorted by length and translated in batches; then its translations are written. These limits also bound
# how many lines are read ahead.
LINES_PER_WINDOW = 5_000
CHARACTERS_PER_WINDOW = 2**20
BYTES_AT_ONCE = 2**16
# Seconds that a terminal or a pipe has to send more lines before those that have arrived are translated.
GRACE = 0.05


@dataclass
class Lines:
    """The lines that a command translates.

    Attributes:
        windows: Lines without their ends, some thousands at a time.
        total: Their number, if it is known.
        unit: "line" or "sentence", for messages.
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
    """Returns the lines of a file, compressed or not, all of which are checked first, or of a named pipe.

    Raises:
        CorpusError: It can't be read, is empty or damaged, or a line is not UTF-8; the message names file and line.
    """
    from ..data import formats

    path = Path(name)
    if path.exists() and not path.is_dir() and not path.is_file():
        return Lines(_of_stream(path.open("rb", buffering=0), name), None)
    formats.check_file(path)
    total = sum(1 for _ in formats.read_lines(path))
    return Lines(_windows(formats.read_lines(path)), total)


def of_standard_input(stream: Any) -> Lines:
    """Returns the lines of standard input; a file's are checked first.

    Raises:
        UsageError: It is closed.
        CorpusError: A line of a file is not UTF-8.
    """
    from ..data.formats import bounded_lines, decode_lines

    if stream is None or stream.closed or not hasattr(stream, "buffer"):
        raise UsageError("standard input is closed; give sentences as arguments, or a file by --input FILE")
    file, name = stream.buffer, "standard input"
    if not _is_file(file):
        return Lines(_of_stream(file.raw, name), None)
    start = file.tell()
    total = sum(1 for _ in decode_lines(bounded_lines(file, name), name))
    file.seek(start)
    return Lines(_windows(decode_lines(bounded_lines(file, name), name)), total)


def _is_file(file: IO[bytes]) -> bool:
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except io.UnsupportedOperation:  # held in memory
        return True


def _windows(lines: Iterable[str], pauses: Callable[[], bool] = lambda: False) -> Iterator[list[str]]:
    """Yields lines in windows; one ends early if `pauses` tells that the next line has not arrived yet."""
    from ..data.formats import CorpusError

    window: list[str] = []
    size = 0
    try:
        for line in lines:
            window.append(line)
            size += len(line)
            if len(window) >= LINES_PER_WINDOW or size >= CHARACTERS_PER_WINDOW or pauses():
                yield window
                window, size = [], 0
    except (CorpusError, OSError):
        if window:
            yield window
        raise
    if window:
        yield window


def _of_stream(file: Any, name: str) -> Iterator[list[str]]:
    """Yields windows of the lines that have arrived: at least one line, and those that follow within `GRACE`.

    The file is opened in binary mode without a buffer, so that a read returns the available bytes.
    """
    from ..data.formats import bounded_lines, decode_lines

    stream = _Stream(file)
    return _windows(decode_lines(bounded_lines(stream, name), name), stream.pauses)


class _Stream:
    """A terminal or a pipe: reads lines, and tells whether the next one has arrived."""

    def __init__(self, file: Any) -> None:
        self.file, self.buffer, self.ended = file, b"", False

    def readline(self, size: int) -> bytes:
        """Returns a line with its end, or its first `size` bytes; b"" at the end of the file."""
        while b"\n" not in self.buffer and len(self.buffer) < size and not self.ended:
            chunk = self.file.read(BYTES_AT_ONCE)
            if chunk is None:  # nothing has arrived, and the file doesn't wait
                time.sleep(GRACE)
            else:
                self.buffer += chunk
                self.ended = not chunk
        end = self.buffer.find(b"\n", 0, size) + 1 or size
        line, self.buffer = self.buffer[:end], self.buffer[end:]
        return line

    def pauses(self) -> bool:
        return b"\n" not in self.buffer and not self.ended and not _has_more(self.file)


def _has_more(file: Any) -> bool:
    """Whether more arrives within `GRACE`. False where the system can't tell: Windows, for a pipe."""
    try:
        return bool(select.select([file], [], [], GRACE)[0])
    except (OSError, ValueError):
        return False


def read_parallel(source: str, reference: str) -> tuple[list[str], list[str]]:
    """Reads two UTF-8 text files with corresponding lines, compressed or not.

    Raises:
        CorpusError: One is missing, empty, damaged or not UTF-8, or has fewer lines.
    """
    from ..data import formats

    for name in (source, reference):
        formats.check_file(Path(name))
    pairs = list(formats.read_text(source, reference))
    if not pairs:  # empty files, compressed
        raise UsageError(f"{source} and {reference} are empty; give text files with one sentence per line")
    return [pair["source"] for pair in pairs], [pair["target"] for pair in pairs]
