"""The lines to translate, window by window: of a file, or what a terminal or a pipe has sent so far."""

import io
import os
import stat
import threading
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
    """Starts to read and returns the windows: what has come whenever one is asked for, at least a line.

    Args:
        file: Opened without a buffer. A thread that waits for a buffered file at the program's end would crash it.
        name: The file's, for errors.
    """
    ahead = _Ahead(file, name)
    threading.Thread(target=ahead.read, daemon=True).start()  # nobody waits for it at the program's end
    return ahead.windows()


class _Ahead:
    """Lines that a thread reads ahead: about a window of them, at most.

    Args:
        file: A binary file without a buffer.
        name: The file's, for errors.
    """

    def __init__(self, file: Any, name: str) -> None:
        self.file, self.name = file, name
        self.changed = threading.Condition()
        self.lines: list[str] = []
        self.size = 0  # of these lines
        self.end: Exception | None = None  # EOFError, or what went wrong

    def read(self) -> None:
        """Reads to the end, pausing while a window waits; runs in a thread."""
        end: Exception
        try:
            for lines in self._decoded():
                with self.changed:
                    self.lines += lines
                    self.size += sum(map(len, lines))
                    self.changed.notify_all()
                    self.changed.wait_for(lambda: not _is_full(self.lines, self.size))
            end = EOFError()
        except Exception as error:
            end = error
        with self.changed:
            self.end = end
            self.changed.notify_all()

    def windows(self) -> Iterator[list[str]]:
        """Yields what has come; then raises what went wrong, if anything did.

        Raises:
            UsageError: A line is not UTF-8 or has no end; those before it have been yielded.
            OSError: It can't be read.
        """
        from ..data.formats import CorpusError

        while window := self._window():
            yield window
        if isinstance(self.end, CorpusError):
            raise UsageError(str(self.end)) from self.end
        if self.end is not None and not isinstance(self.end, EOFError):
            raise self.end

    def _window(self) -> list[str]:
        """Waits for a line and, shortly, for more; nothing at the end."""
        with self.changed:
            while not self.lines and self.end is None:
                self.changed.wait(0.5)  # not for ever, during which Windows would not let Ctrl-C through
            self.changed.wait_for(lambda: self.end is not None or _is_full(self.lines, self.size), GRACE)
            window, self.lines, self.size = self.lines, [], 0
            self.changed.notify_all()
        return window

    def _decoded(self) -> Iterator[list[str]]:
        """Yields lines as they come; those before one that can't be decoded, too."""
        from ..data.formats import CorpusError, decode_lines

        raw: deque[bytes] = deque()
        decoded = decode_lines(iter(raw.popleft, None), self.name)
        for block in self._blocks():
            raw.extend(block)
            lines: list[str] = []
            try:
                for _ in block:
                    lines.append(next(decoded))
            except CorpusError:
                yield lines
                raise
            yield lines

    def _blocks(self) -> Iterator[list[bytes]]:
        """Yields the lines that have come since the last ones, with their ends."""
        from ..data.formats import LONGEST_LINE, CorpusError

        begun, size, number = [b""], 0, 1  # parts of a line without its end
        while (chunk := self.file.read(BYTES_AT_ONCE)) != b"":
            if chunk is None:  # nothing has come, and the file doesn't wait
                time.sleep(GRACE)
                continue
            whole, end, rest = chunk.rpartition(b"\n")
            if end:
                block = io.BytesIO(b"".join([*begun, whole, end])).readlines()
                yield block
                begun, size, number = [], 0, number + len(block)
            begun.append(rest)
            size += len(rest)
            if size > LONGEST_LINE:
                raise CorpusError(
                    f"{self.name}:{number}: the line has no end within {LONGEST_LINE:,} bytes; give a sentence per line"
                )
        if size:
            yield [b"".join(begun)]
