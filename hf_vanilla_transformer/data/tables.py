"""Tables of parallel corpora: .tsv, .csv, .jsonl and .parquet, all but the last compressed or not.

A problem with a file is a `CorpusError` that names the file, the line and the fix. That is why tables are read by
csv, json and pyarrow.parquet behind `read_lines` rather than by datasets' loaders or pyarrow's readers of CSV and JSON:
those don't name the line of a bad byte or a missing cell, and read an unclosed quote or a stray byte without an error.
"""

import csv
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import pyarrow
import pyarrow.parquet

from ..errors import first_line
from .formats import DEFAULT_COLUMNS, LONGEST_LINE, CorpusError, Pair, read_lines, table_format

PAIRS_PER_BATCH = 1_000  # rows of Parquet in memory at a time
csv.field_size_limit(LONGEST_LINE)  # Python's own limit would end a training at a row that is just too long

QUOTED = re.compile(r'(?:^|\t)"(?:[^"\t]|"")*""(?:[^"\t]|"")*"(?:\t|$)')  # a cell as CSV quotes it, with "" for "

logger = logging.getLogger(__name__)

Rows = Iterator[tuple[int, Mapping[str, object]]]  # the line or row number, and column -> value


def read_table(path: str, columns: Sequence[str]) -> Iterator[Pair]:
    """Yields the pairs of a table, whose format the end of its name says.

    The columns are the source's, the target's and those with features of the source. Those of a .tsv without a header
    are `DEFAULT_COLUMNS`, or numbers from 1 on.
    """
    readers: dict[str, Callable[[str, Sequence[str]], Rows]]
    readers = {".tsv": _rows_of_tsv, ".csv": _rows_of_csv, ".parquet": _rows_of_parquet}
    read = readers.get(table_format(path), _rows_of_json)
    for number, row in read(path, columns):
        yield pair_of(row, columns, f"{path}:{number}")


def _rows_of_tsv(path: str, columns: Sequence[str]) -> Rows:
    """Source and target without a header, numbered columns, or a header's names; no quoting, so no text has a tab."""
    header: Sequence[str] = ()
    is_quoted = False
    for number, line in enumerate(read_lines(path), start=1):
        if not is_quoted and '""' in line and QUOTED.search(line):
            is_quoted = True
            logger.warning(
                f"{path}:{number}: a cell is quoted as in CSV, but a .tsv has no quoting: the quotes stay in the text; "
                "write the table without quotes (csv.QUOTE_NONE), or as .csv"
            )
        cells = line.split("\t")
        if line and not header:
            header = _header(path, cells, columns)
            if header is cells:
                continue
        if len(cells) == len(header):
            yield number, dict(zip(header, cells, strict=True))
        elif line:
            raise CorpusError(
                f"{path}:{number}: {len(cells)} columns separated by tabs, not {len(header)}; if there are more than "
                f"two, the first line must name them, {columns[0]!r} and {columns[1]!r} among them, or number them: "
                "source_column 1"
            )


def _header(path: str, cells: list[str], columns: Sequence[str]) -> Sequence[str]:
    """The names of a table's columns, by the cells of its first line: numbers, or the cells themselves, or ours."""
    places = [str(place) for place in range(1, len(cells) + 1)]
    if set(columns) <= set(places):  # though the cells may be numbers, too
        return places
    if set(columns) <= set(cells):
        return cells
    if 0 < sum(map(str.isdecimal, columns)) < len(columns):
        raise CorpusError(f"{path}: its first line names no columns; give all by number, not {', '.join(columns)}")
    if tuple(columns) == DEFAULT_COLUMNS:
        return columns
    known = places if all(map(str.isdecimal, columns)) else cells
    missing = next(column for column in columns if column not in known)  # by position, sides could be exchanged
    raise CorpusError(
        f"{path}: column {missing!r} is missing; the first line has {', '.join(map(repr, cells))}; if these aren't "
        "names, number the columns: source_column 1, target_column 2"
    )


def _rows_of_csv(path: str, columns: Sequence[str]) -> Rows:
    """The columns that the first record names."""
    reader = csv.reader((line + "\n" for line in read_lines(path)), strict=True)
    header: list[str] = []
    while True:
        number = reader.line_num + 1  # where the record begins: a quoted text may span several lines
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise CorpusError(f"{path}:{number}: not CSV ({error}); is a quote not closed?") from error
        if cells is None:
            return
        if not header:
            header = cells
        elif len(cells) == len(header):
            yield number, dict(zip(header, cells, strict=True))
        elif cells:
            fix = "put a text that contains a comma, a quote or a line break in quotes"
            raise CorpusError(f"{path}:{number}: {len(cells)} columns, not {len(header)}; {fix}")


def _rows_of_parquet(path: str, columns: Sequence[str]) -> Rows:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(PAIRS_PER_BATCH) for row in batch.to_pylist())
            yield from enumerate(rows, start=1)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path}: can't be read ({first_line(error)}); is it a complete Parquet file?") from error


def _rows_of_json(path: str, columns: Sequence[str]) -> Rows:
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # a number of thousands of digits and deep nesting, too
            problem = getattr(error, "msg", first_line(error))
            raise CorpusError(f"{path}:{number}: not JSON ({problem}); write one object per line") from error
        if not isinstance(row, dict):
            raise CorpusError(f"{path}:{number}: a {type(row).__name__}; write one JSON object per line")
        yield number, row


def pair_of(row: Mapping[str, object], columns: Sequence[str], where: str) -> Pair:
    """Takes source and target from a row of a table, or from the row's "translation"; errors begin with `where`."""
    nested = row.get("translation")
    row = nested if isinstance(nested, Mapping) else row
    for column in columns:
        if problem := _problem(row, column):
            raise CorpusError(f"{where}: column {column!r} {problem} (`source_column` and `target_column` name them)")
    source, target, *features = (str(row[column]) for column in columns)
    return {"source": "\t".join([source, *filter(None, features)]), "target": target}


def _problem(row: Mapping[str, object], column: str) -> str | None:
    if column not in row:
        return f"is missing; the columns are {', '.join(map(repr, row)) or 'none'}"
    text = row[column]
    if not isinstance(text, str):
        return "is empty (null), not text" if text is None else f"is not text but of type {type(text).__name__}"
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can write it, "\ud83d"
        return "contains half of a surrogate pair, not a character"
    return None
