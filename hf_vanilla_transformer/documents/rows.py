"""Documents with a text in each row: plain text and tables."""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BufferedIOBase, BytesIO
from itertools import islice
from typing import IO, NamedTuple

from ..data.formats import CorpusError, bounded_lines, check_start, utf8_problem
from ..errors import first_line
from .links import Document, Linked

ROWS = 1_000  # of a part of a file; the same everywhere, as batches depend on it
TRANSLATION = "translation"  # the column that tables get

MARK = "\ufeff"  # the byte-order mark
LINE = re.compile(r"[^\n]*\n|[^\n]+")  # and its end
Lines = Iterable[tuple[str, str, str]]  # lines, their ends, and what isn't UTF-8


class Row(NamedTuple):
    """A row: what is written before a translation and after it, and the text; None: there is none, by an `error`."""

    text: str | None
    before: str = ""
    after: str = ""
    error: str = ""


class Rows(Document):
    """Rows of a file, of which the first one is in line `first`; `written` is how the file has a translation.

    Each line of a cell is a text; the white space around it stays.
    """

    is_prose = is_linked = False

    def __init__(self, rows: Sequence[Row], written: Callable[[str], str] = str, first: int = 1) -> None:
        super().__init__()
        self.rows, self.written = rows, written
        for line, row in enumerate(rows, first):
            for _, text, _ in _divided(row.text or ""):
                if text:
                    self.places[text].append(line)
            if row.error:
                self.problems.append((line, row.error))

    def cells(self, translations: Mapping[str, Linked]) -> list[str]:
        """Returns the translation of each row; that of a text without one is empty."""
        known = {text: " ".join(one.text.splitlines()) for text, one in translations.items()} | {"": ""}

        def cell(text: str) -> str:
            parts = _divided(text)
            if any(one not in known for _, one, _ in parts):
                return ""
            return "".join(before + known[one] + after for before, one, after in parts)

        return ["" if row.text is None else self.written(cell(row.text)) for row in self.rows]

    def translated(self, translations: Mapping[str, Linked]) -> str:
        """Returns the rows with their translations."""
        cells = self.cells(translations)
        return "".join(row.before + cell + row.after for row, cell in zip(self.rows, cells, strict=True))


def _divided(text: str) -> list[tuple[str, str, str]]:
    """Returns each line of a text, and what is before and after it: white space, and a byte-order mark."""
    lines = (re.fullmatch(rf"({MARK}?\s*)(.*?)(\s*)", line, re.DOTALL) for line in LINE.findall(text))
    return [(line[1], line[2], line[3]) for line in lines if line]


def plain_text(text: str) -> Rows:
    """Returns a text of several lines."""
    return Rows([Row(line) for line in LINE.findall(text)])


def _text_rows(lines: Lines, column: str) -> Iterator[Row]:
    for line, end, error in lines:
        yield Row(None if error else line, "", end, error)


def _tsv_rows(lines: Lines, column: str) -> Iterator[Row]:
    header, end, _ = next(iter(lines), ("", "", ""))
    names = header.removeprefix(MARK).split("\t")
    _check_columns(names, column)
    yield Row(None, f"{header}\t{TRANSLATION}", end)
    for line, end, error in lines:
        cells = line.split("\t")
        if len(cells) != len(names):
            error = error or f"{len(cells)} columns, not {len(names)}"
        yield Row(None if error else cells[names.index(column)], f"{line}\t", end, error)


def _json_rows(lines: Lines, column: str) -> Iterator[Row]:
    for line, end, _ in lines:
        text, error = _json_text(line.removeprefix(MARK), column) if line.strip() else (None, "")
        if text is None:
            yield Row(None, line, end, error)
        else:
            yield Row(text, f'{line.rstrip()[:-1].rstrip()}, "{TRANSLATION}": ', f"}}{end}")


def _json_text(line: str, column: str) -> tuple[str | None, str]:
    """Returns a row's text, or None and the reason."""
    try:
        cells = json.loads(line)
        text = cells[column]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        return None, f"no JSON object with {column!r} ({first_line(error)})"
    if TRANSLATION in cells:
        return None, f"{TRANSLATION!r} is there already; rename it"
    return (text, "") if isinstance(text, str) else (None, f"{column!r} is no text")


def _check_columns(names: Sequence[str], column: str) -> None:
    if names.count(column) != 1:
        several = "several columns" if column in names else "no column"
        raise CorpusError(f"has {several} {column!r}; there are {', '.join(map(repr, names))}")
    if TRANSLATION in names:
        raise CorpusError(f"has a column {TRANSLATION!r} already; rename it")


FORMS: dict[str, tuple[Callable[[Lines, str], Iterator[Row]], Callable[[str], str]]] = {
    "": (_text_rows, str),
    ".tsv": (_tsv_rows, lambda translation: " ".join(translation.split())),
    ".jsonl": (_json_rows, lambda translation: json.dumps(translation, ensure_ascii=False)),
}


def row_parts(file: IO[bytes] | BufferedIOBase, name: str, form: str, column: str) -> Iterator[Rows]:
    """Yields the rows of a file that is open in binary mode, `ROWS` at a time; raises `CorpusError`.

    `name` is for errors, `form` is a key of `FORMS`, and `column` that of a table.
    """
    read, written = FORMS[form]
    rows, first = read(_lines(file, name), column), 1
    while some := list(islice(rows, ROWS)):
        yield Rows(some, written, first)
        first += len(some)


def _lines(file: IO[bytes] | BufferedIOBase, name: str) -> Iterator[tuple[str, str, str]]:
    for number, line in enumerate(bounded_lines(file, name)):
        if not number:
            check_start(line.removeprefix(BOM_UTF8), name)
        text = line.decode(errors="surrogateescape")
        plain = text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
        yield plain, text[len(plain) :], utf8_problem(line)


class Table(Rows):
    """The rows of a Parquet file; raises `CorpusError` without such a column."""

    def __init__(self, file: IO[bytes] | BufferedIOBase, column: str) -> None:
        import pyarrow.parquet

        self.table = pyarrow.parquet.read_table(file).replace_schema_metadata()
        _check_columns(self.table.column_names, column)
        texts = self.table[column].to_pylist()
        rows = [Row(one) if isinstance(one, str) else Row(None, error=f"{column!r} is no text") for one in texts]
        super().__init__(rows)

    def translated(self, translations: Mapping[str, Linked]) -> str:
        """Returns the Parquet file with a column more, its bytes as by "surrogateescape"."""
        import pyarrow.parquet

        column = pyarrow.array(self.cells(translations), pyarrow.string())
        output = BytesIO()
        pyarrow.parquet.write_table(self.table.append_column(TRANSLATION, column), output)
        return output.getvalue().decode(errors="surrogateescape")
