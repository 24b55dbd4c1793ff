"""Translating many files: text, .gz, .tsv, .jsonl and .parquet, each into a file of the same name.

A file appears when it is complete, and a complete one is skipped, so that a killed run is started again by the same
command. A row that can't be translated is empty in the output, and `NAME.errors.jsonl` beside it says why.
"""

import gzip
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow
import pyarrow.parquet

from ..checkpoints.files import replacing
from ..data.formats import COMPRESSIONS, CorpusError, bounded_lines, check_start, table_format
from ..errors import first_line

ROWS = 1_000  # rows that are translated at a time; the same everywhere, as batches depend on it
TRANSLATION = "translation"  # the column that tables get
ERRORS = ".errors.jsonl"
TABLES = (".tsv", ".jsonl", ".parquet")


class Row(NamedTuple):
    """A row of a file.

    Attributes:
        text: What to translate; None where there is no text.
        error: Why there is none.
        cells: What a table has in the row.
    """

    text: str | None
    error: str = ""
    cells: Any = None


class Outcome(NamedTuple):
    """What became of a row: its translation, or an empty string and the reason."""

    translation: str
    error: str = ""


@dataclass(frozen=True)
class Job:
    """One file to translate.

    Attributes:
        source: The input.
        output: The file that will have its name, in the output folder.
    """

    source: Path
    output: Path

    @property
    def errors(self) -> Path:
        """The file beside the output with the rows that couldn't be translated, if there are any."""
        return self.output.with_name(self.output.name + ERRORS)


def jobs(inputs: Sequence[str | Path], output: str | Path, shard: tuple[int, int] = (1, 1)) -> list[Job]:
    """Returns the files to translate, in the order of their names.

    Args:
        inputs: Files, and folders, of which all files are taken that aren't hidden, with those of their subfolders.
        output: The folder for the translations. Subfolders of an input are kept.
        shard: I and N: every N-th file from the I-th on, counted from 1.

    Raises:
        CorpusError: An input doesn't exist, two have the same name, or an output would be its own input.
    """
    output, place = Path(output), Path(output).resolve()
    found: dict[Path, Path] = {}
    for given in map(Path, inputs):
        if not given.exists():
            raise CorpusError(f"{given}: no such file or folder")
        is_inside = place.is_relative_to(given.resolve())  # the translations are no inputs
        for file in sorted(given.rglob("*")) if given.is_dir() else [given]:
            name = file.relative_to(given) if given.is_dir() else Path(file.name)
            if not file.is_file() or any(part.startswith(".") for part in name.parts):
                continue
            real = file.resolve()
            if real == place / name:
                raise CorpusError(f"{file} is the input and the output; give another folder for the translations")
            if is_inside and real.is_relative_to(place):
                continue
            if name in found:
                raise CorpusError(f"{file} and {found[name]} have the same name; translate them into two folders")
            found[name] = file
    index, number = shard
    return [Job(found[name], output / name) for name in sorted(found)][index - 1 :: number]


@contextmanager
def rows_of(path: Path, column: str = "text") -> Iterator[tuple[IO[bytes], Iterator[Row]]]:
    """Opens a file: yields the file, whose position tells the progress, and its rows.

    Args:
        path: Text, one row per line, .gz or not; or a table, .tsv, .jsonl or .parquet.
        column: The column of a table.

    Raises:
        CorpusError: The file can't be read, is damaged or has no such column; raised when its place is reached.
    """
    table, suffix = table_format(path.name), path.suffix.lower()
    if table not in ("", *TABLES) or (suffix in COMPRESSIONS and suffix != ".gz"):
        raise CorpusError(f"{path}: can't be written back; make it text, .tsv, .jsonl or .parquet, or text as .gz")
    with ExitStack() as opened:
        with _reading(path):
            raw = opened.enter_context(path.open("rb"))
            file = opened.enter_context(gzip.open(raw)) if suffix == ".gz" else raw
        if table == ".parquet":
            rows = _parquet_rows(file, path, column)
        else:
            lines = _lines(file, path)
            kind = {".tsv": _tsv_rows, ".jsonl": _json_rows}.get(table)
            rows = map(_text_row, lines) if kind is None else kind(lines, path, column)
        yield raw, _guarded(rows, path)


def _lines(file: Any, path: Path) -> Iterator[bytes]:
    for number, line in enumerate(bounded_lines(file, str(path))):
        if not number:
            check_start(line, str(path))
        yield line.removeprefix(b"" if number else BOM_UTF8).removesuffix(b"\n").removesuffix(b"\r")


def _guarded(rows: Iterator[Row], path: Path) -> Iterator[Row]:
    with _reading(path):
        yield from rows


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns errors of reading a file into ones that name it."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error, pyarrow.ArrowException, OSError) as error:
        raise CorpusError(f"{path}: can't be read ({first_line(error)}); is it complete?") from error


def _check_columns(names: list[str], path: Path, column: str) -> None:
    if names.count(column) != 1:
        several = "several columns" if column in names else "no column"
        raise CorpusError(f"{path}: has {several} {column!r}; there are {', '.join(map(repr, names))}")
    if TRANSLATION in names:
        raise CorpusError(f"{path}: has a column {TRANSLATION!r} already; rename it")


def _text_row(line: bytes) -> Row:
    try:
        return Row(line.decode())
    except UnicodeDecodeError as error:
        return Row(None, f"not UTF-8 (byte 0x{line[error.start]:02x} at {error.start + 1})", "")


def _tsv_rows(lines: Iterator[bytes], path: Path, column: str) -> Iterator[Row]:
    header = _text_row(next(lines, b"")).text
    names = (header or "").split("\t")
    _check_columns(names, path, column)
    yield Row(None, "", header)  # the header's row is written, and has no text
    for line in lines:
        text, error, _ = _text_row(line)
        cells = (text or "").split("\t")
        if len(cells) != len(names):
            cells, error = [""] * len(names), error or f"{len(cells)} columns, not {len(names)}"
        yield Row(None if error else cells[names.index(column)], error, "\t".join(cells))


def _json_rows(lines: Iterator[bytes], path: Path, column: str) -> Iterator[Row]:
    for line in lines:
        try:
            cells = json.loads(line)
            text = cells[column]
            if TRANSLATION in cells:
                raise ValueError(f"{TRANSLATION!r} is there already")
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            yield Row(None, f"no JSON object with {column!r} ({first_line(error)})", {})
            continue
        yield Row(text, "", cells) if isinstance(text, str) else Row(None, f"{column!r} is no text", cells)


def _parquet_rows(file: Any, path: Path, column: str) -> Iterator[Row]:
    table = pyarrow.parquet.ParquetFile(file)
    _check_columns(table.schema_arrow.names, path, column)
    for batch in table.iter_batches(ROWS):
        for number, text in enumerate(batch.column(column).to_pylist()):
            cells = batch.slice(number, 1)
            yield Row(text, "", cells) if isinstance(text, str) else Row(None, f"{column!r} is no text", cells)


def outcomes(translate: Callable[[list[str]], list[str]], rows: Sequence[Row]) -> list[Outcome]:
    """Translates some rows of a file.

    Args:
        translate: Returns as many translations as it gets texts.
        rows: The rows.
    """
    done = iter(_translated(translate, [row.text for row in rows if row.text is not None]))
    return [next(done) if row.text is not None else Outcome("", row.error) for row in rows]


def _translated(translate: Callable[[list[str]], list[str]], texts: list[str]) -> list[Outcome]:
    """Translates texts; where one of them is refused, it alone is left out, found by halves."""
    try:
        return [Outcome(text) for text in translate(texts)] if texts else []
    except (ValueError, IndexError) as error:
        if len(texts) == 1:
            return [Outcome("", first_line(error))]
    half = len(texts) // 2
    return _translated(translate, texts[:half]) + _translated(translate, texts[half:])


def write(job: Job, column: str, translate: Callable[[list[Row]], list[Outcome]]) -> Iterator[int]:
    """Writes the output of one file, `ROWS` rows at a time; yields how many bytes of the input are read.

    Args:
        job: The file.
        column: The column of a table.
        translate: Returns what becomes of the next rows.

    Raises:
        CorpusError: The input can't be read.
        OSError: The output can't be written.
    """
    job.output.parent.mkdir(parents=True, exist_ok=True)
    errors: list[dict[str, Any]] = []
    with rows_of(job.source, column) as (raw, rows), replacing(job.output) as place, _writer(place, job) as put:
        for first in count(1, ROWS):
            if not (some := list(islice(rows, ROWS))):
                break
            done = translate(some)
            put(some, done)
            errors += [{"row": row, "error": one.error} for row, one in enumerate(done, first) if one.error]
            yield raw.tell()
        job.errors.unlink(missing_ok=True)
        if errors:
            lines = (json.dumps(error, ensure_ascii=False) + "\n" for error in errors)
            job.errors.write_text("".join(lines), encoding="utf-8")


Put = Callable[[Sequence[Row], Sequence[Outcome]], None]


@contextmanager
def _writer(path: Path, job: Job) -> Iterator[Put]:
    """Yields what writes rows with their translations, in the format of the input."""
    table = table_format(job.source.name)
    if table == ".parquet":
        with _reading(job.source), pyarrow.parquet.ParquetFile(job.source) as file:
            schema = file.schema_arrow.remove_metadata()
        schema = schema.append(pyarrow.field(TRANSLATION, pyarrow.string()))
        with pyarrow.parquet.ParquetWriter(path, schema) as writer:
            yield lambda rows, part: writer.write_table(
                pyarrow.Table.from_batches([row.cells for row in rows]).append_column(
                    TRANSLATION, [[one.translation for one in part]]
                )
            )
        return
    line = {".tsv": _tsv_line, ".jsonl": _json_line}.get(table, _line)
    with ExitStack() as opened:
        output: Any = opened.enter_context(path.open("wb"))
        if job.source.suffix.lower() == ".gz":  # without a name and a time, so that equal text gives equal bytes
            output = opened.enter_context(gzip.GzipFile("", "wb", fileobj=output, mtime=0))
        yield lambda rows, part: output.writelines(  # half a surrogate pair is written as JSON writes it, \ud83d
            f"{line(row, one)}\n".encode(errors="backslashreplace") for row, one in zip(rows, part, strict=True)
        )


def _line(row: Row, outcome: Outcome) -> str:
    return " ".join(outcome.translation.splitlines())


def _tsv_line(row: Row, outcome: Outcome) -> str:
    is_header = row.text is None and not row.error
    return f"{row.cells}\t{TRANSLATION if is_header else ' '.join(outcome.translation.split())}"


def _json_line(row: Row, outcome: Outcome) -> str:
    return json.dumps({**row.cells, TRANSLATION: outcome.translation}, ensure_ascii=False)
