"""What commands print and write: errors, warnings, tables, and the check of an output file."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import printable

PROGRAM = "vanilla-transformer"
SECONDS_PER_LINE = 60  # of progress


class UsageError(Exception):
    """A mistake that the user can fix; the message says how. The command prints it as one line and exits with 2."""


class RunError(Exception):
    """A failure of the work itself, such as a training that diverges. The command prints one line and exits with 1."""


def show(text: str, notes: Iterable[str] = ()) -> None:
    """Prints text that may come from a file, and notes; control characters in them take no effect."""
    print(printable("\n".join([text, *(f"note: {note}" for note in notes)])), flush=True)


def say_written(*names: str | None) -> None:
    """Prints which files were written; devices, such as /dev/stdout, and None are left out."""
    for name in names:
        if name is not None and Path(name).is_file():
            show(f"wrote {name}")


def table(rows: Iterable[Sequence[str]], *, indent: str = "", align: str = "<") -> str:
    """Formats rows as lines of columns, two spaces apart; `align` ("<" or ">") is that of all columns but the first."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(f"{cell:{align if place else '<'}{widths[place]}}" for place, cell in enumerate(row)) for row in rows
    )
    return "\n".join(indent + line.rstrip() for line in lines)


def check_output(option: str, name: str, overwrite: bool, taken: Sequence[str | None] = ()) -> None:
    """Checks, before any work is done, that the file of an option can be written and is no other option's."""
    path = Path(name)
    if any(file is not None and path.resolve() == Path(file).resolve() for file in taken):
        raise UsageError(f"{option} {name} is the file of another option; give another one")
    if path.is_dir() or not path.parent.is_dir():
        problem = "is a folder" if path.is_dir() else f"can't be written: there is no folder {path.parent}"
        raise UsageError(f"{option} {name} {problem}; give a file in a folder that exists")
    if path.is_file() and not overwrite:
        raise UsageError(f"{option} {name} exists; give another file, or --overwrite to replace it")


def check_output_folder(name: str, hint: str = "") -> None:
    """Checks, before any work is done, that a new folder can be written; errors end with the hint."""
    from ..checkpoints.files import check_new_folder

    try:
        check_new_folder(Path(name))
    except OSError as error:
        raise UsageError(f"{error}{hint}") from error


@contextmanager
def progress_bar(
    total: int | None, unit: str, *, hidden: bool = False, **more: bool
) -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal, else a line a minute on standard error; yields what notes how many more are done."""
    from tqdm import tqdm

    begun = said = time.monotonic()
    done = 0

    def update(number: int) -> None:
        nonlocal done, said
        done, now = done + number, time.monotonic()
        bar.update(number)
        if bar.disable and not hidden and now - said >= SECONDS_PER_LINE:
            said, of = now, "" if total is None else f" of {total:,}"
            print(f"{done:,}{of} {unit.strip()} after {(now - begun) / 60:.0f} min", file=sys.stderr, flush=True)

    with tqdm(total=total, unit=unit, disable=True if hidden else None, leave=False, **more) as bar:
        yield update


def warn(message: str) -> None:
    """Prints a warning to standard error, above the progress bar if there is one."""
    from tqdm import tqdm

    tqdm.write(f"{PROGRAM}: warning: {message}", file=sys.stderr)


def warn_of_line(line: str, limit: int, consequence: str) -> None:
    """Prints that a line ("line 3") has more tokens than the limit, and what happens to it."""
    warn(f"{line} has more than {limit:,} tokens (--max-source-tokens): {consequence}")
