"""The lines that commands read: in windows, of arguments, files, terminals and pipes; or of two files, as pairs."""

import select
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

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
    """The lines that a command translates."""

    windows: Iterator[list[str]]  # without their ends, some thousands at a time
    total: int | None  # if it is known
    unit: str = "line"  # or "sentence", for messages


def of_arguments(sentences: list[str]) -> Lines:
    """Returns the sentences of the command line; raises `UsageError` for one that is not UTF-8."""
    for number, sentence in enumerate(sentences, start=1):
        try:
            sentence.encode()
        except UnicodeEncodeError as error:  # surrogates, by which Python represents bytes that aren't UTF-8
            raise UsageError(f"sentence {number} is not valid UTF-8; encode it in UTF-8") from error
    return Lines(_windows(sentences), len(sentences), "sentence")


def of_file(name: str) -> Lines:
    """Returns the lines of a file, compressed or not, all of which are checked first, or of a named pipe."""
    from ..data import formats

    path = Path(name)
    if path.exists() and not path.is_dir() and not path.is_file():
        return Lines(_of_stream(path.open("rb", buffering=0), name), None)
    formats.check_file(path)
    return Lines(_windows(formats.read_lines(path)), sum(1 for _ in formats.read_lines(path)))


def of_standard_input(stream: Any) -> Lines:
    """Returns the lines of standard input; a file's are checked first. Errors are `UsageError` and `CorpusError`."""
    from ..data.formats import bounded_lines, decode_lines

    if stream is None or stream.closed or not hasattr(stream, "buffer"):
        raise UsageError("standard input is closed; give sentences as arguments, or a file by --input FILE")
    file, name = stream.buffer, "standard input"
    if not file.seekable():
        return Lines(_of_stream(file.raw, name), None)
    start = file.tell()
    total = sum(1 for _ in decode_lines(bounded_lines(file, name), name))
    file.seek(start)
    return Lines(_windows(decode_lines(bounded_lines(file, name), name)), total)


def _windows(lines: Iterable[str], pauses: Callable[[], bool] = lambda: False) -> Iterator[list[str]]:
    """Yields lines in windows; one ends early if `pauses` tells that the next line has not arrived yet."""
    window: list[str] = []
    size = 0
    try:
        for line in lines:
            window.append(line)
            size += len(line)
            if len(window) >= LINES_PER_WINDOW or size >= CHARACTERS_PER_WINDOW or pauses():
                yield window
                window, size = [], 0
    except (ValueError, OSError):  # CorpusError: what came before it is translated
        if window:
            yield window
        raise
    if window:
        yield window


def _of_stream(file: RawIOBase, name: str) -> Iterator[list[str]]:
    """Yields windows of the lines of an unbuffered file that have arrived, and those that follow within `GRACE`."""
    from ..data.formats import bounded_lines, decode_lines

    stream = _Stream(file)
    return _windows(decode_lines(bounded_lines(stream, name), name), stream.pauses)


class _Stream:
    """A terminal or a pipe: reads lines, and tells whether the next one has arrived."""

    def __init__(self, file: RawIOBase) -> None:
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
        """Whether no other line arrives within `GRACE`, as far as the system can tell: for a pipe, Windows can't."""
        if b"\n" in self.buffer or self.ended:
            return False
        try:
            return not select.select([self.file], [], [], GRACE)[0]
        except (OSError, ValueError):
            return True


def read_parallel(source: str, reference: str) -> tuple[list[str], list[str]]:
    """Reads two text files with corresponding lines, compressed or not; raises `CorpusError` and `UsageError`."""
    from ..data import formats

    for name in (source, reference):
        formats.check_file(Path(name))
    pairs = list(formats.read_text(source, reference))
    if not pairs:  # empty files, compressed
        raise UsageError(f"{source} and {reference} are empty; give text files with one sentence per line")
    return [pair["source"] for pair in pairs], [pair["target"] for pair in pairs]
