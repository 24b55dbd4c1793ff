"""File formats of parallel corpora: plain text, .tsv, .csv, .jsonl and .parquet, all but the last compressed or not.

Whatever is wrong in a file is a `CorpusError` that names file, line and mend.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

TABLES = (".tsv", ".csv", ".jsonl", ".json", ".parquet")
PAIRS_A_BATCH = 1_000  # of what is read from Parquet

Pair = dict[str, str]  # of the keys "source" and "target"
Rows = Iterator[tuple[int, Mapping[str, Any]]]  # of a table: where each is, and its columns


class CorpusError(ValueError):
    """A corpus can't be read; the message names file, line and mend."""


def read_lines(path: str | Path) -> Iterator[str]:
    r"""Yields the lines of a UTF-8 text file, .gz or not, without their ends. Only "\n" and "\r\n" end a line.

    Raises:
        CorpusError: The file can't be read, a line is not UTF-8, or a .gz file is damaged or none at all.
    """
    path = Path(path)
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield text[:-1].removesuffix("\r") if text.endswith("\n") else text
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path}:{number}: not UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start + 1}); "
            "convert it first, for instance: iconv -f latin1 -t utf-8"
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CorpusError(f"{path}:{number + 1}: the compressed file is damaged ({error}); get it anew") from error
    except OSError as error:
        raise CorpusError(f"{path}: can't be read ({error.strerror or error}); name a file that can") from error


def is_table(name: str) -> bool:
    """Whether a table is a file by its name; a data set on the Hub otherwise."""
    return name.removesuffix(".gz").endswith(TABLES)


def check_file(path: Path) -> None:
    """Refuses a corpus file that is missing, a folder or empty."""
    if not path.is_file():
        raise CorpusError(f"{path}: {'a folder' if path.is_dir() else 'no such file'}; name a text file or a table")
    if path.stat().st_size == 0:
        raise CorpusError(f"{path}: the file is empty; is it the right one, and was it written to its end?")


def read_text(source_path: str, target_path: str) -> Iterator[Pair]:
    """Yields the pairs of two text files, line by line."""
    lines = zip_longest(read_lines(source_path), read_lines(target_path))
    for number, (source, target) in enumerate(lines, start=1):
        if source is None or target is None:
            short, long = (source_path, target_path) if source is None else (target_path, source_path)
            raise CorpusError(
                f"{short}: ends after line {number - 1}, but {long} goes on; they have to be translations of each "
                "other, line by line"
            )
        yield {"source": source, "target": target}


def read_table(path: str, columns: tuple[str, str]) -> Iterator[Pair]:
    """Yields the pairs of a table, whose source and target stand in the two columns."""
    readers: dict[str, Callable[[str, tuple[str, str]], Rows]]
    readers = {".tsv": _rows_of_tsv, ".csv": _rows_of_csv, ".parquet": _rows_of_parquet}
    read = readers.get(Path(path.removesuffix(".gz")).suffix, _rows_of_json)
    for number, row in read(path, columns):
        yield pair_of(row, columns, f"{path}:{number}")


def _rows_of_tsv(path: str, columns: tuple[str, str]) -> Rows:
    """Two columns without a header, or the columns that a header names; no quotes: a tab can't stand in a text."""
    header: Sequence[str] = columns
    for number, line in enumerate(read_lines(path), start=1):
        cells = line.split("\t")
        if number == 1 and set(columns) <= set(cells):
            header = cells
        elif len(cells) == len(header):
            yield number, dict(zip(header, cells, strict=True))
        elif line:
            raise CorpusError(
                f"{path}:{number}: {len(cells)} columns parted by tabs, not {len(header)}; if there are more than two, "
                f"the first line has to name them, {columns[0]!r} and {columns[1]!r} among them"
            )


def _rows_of_csv(path: str, columns: tuple[str, str]) -> Rows:
    reader = csv.reader((line + "\n" for line in read_lines(path)), strict=True)
    header: list[str] = []
    while True:
        number = reader.line_num + 1  # where the record begins, as a text can go over several lines
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise CorpusError(f"{path}:{number}: not CSV ({error}); is a quote left open?") from error
        if cells is None:
            return
        if not header:
            header = cells
        elif len(cells) == len(header):
            yield number, dict(zip(header, cells, strict=True))
        elif cells:
            mend = "a text with a comma, a quote or a line's end stands in quotes"
            raise CorpusError(f"{path}:{number}: {len(cells)} columns, not {len(header)}; {mend}")


def _rows_of_parquet(path: str, columns: tuple[str, str]) -> Rows:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(PAIRS_A_BATCH) for row in batch.to_pylist())
            yield from enumerate(rows, start=1)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path}: can't be read ({first_line(error)}); is it a whole Parquet file?") from error


def _rows_of_json(path: str, columns: tuple[str, str]) -> Rows:
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise CorpusError(f"{path}:{number}: not JSON ({error.msg}); write one object a line") from error
        if not isinstance(row, dict):
            raise CorpusError(f"{path}:{number}: a {type(row).__name__}; write one JSON object a line")
        yield number, row


def pair_of(row: Mapping[str, Any], columns: tuple[str, str], where: str) -> Pair:
    """Takes source and target from a row of a table, or from the row's "translation"."""
    row = row["translation"] if isinstance(row.get("translation"), Mapping) else row
    for column in columns:
        if problem := _problem(row, column):
            raise CorpusError(f"{where}: column {column!r} {problem} (`source_column` and `target_column` name them)")
    return {"source": row[columns[0]], "target": row[columns[1]]}


def _problem(row: Mapping[str, Any], column: str) -> str | None:
    if column not in row:
        return f"is missing; there are {', '.join(map(repr, row)) or 'none'}"
    text = row[column]
    if not isinstance(text, str):
        return "is empty (null), not a text" if text is None else f"is no text but of type {type(text).__name__}"
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can write it, "\ud83d"
        return "holds one half of a surrogate pair, which is no character"
    return None


def first_line(error: BaseException) -> str:
    """What an error says first, to be set into a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
