"""Documents with a text in each row: plain text and tables."""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BufferedIOBase, BytesIO
from itertools import islice
from typing import IO, Any, NamedTuple

from ..data.formats import CorpusError, bounded_lines, check_start, utf8_problem
from ..errors import first_line
from .links import Document, Linked

ROWS = 1_000  # of a part of a file; the same everywhere, as batches depend on it
TRANSLATION = "translation"  # the column that tables get

Lines = Iterable[tuple[str, str, str]]  # lines, their ends, and what isn't UTF-8


class Row(NamedTuple):
    """A row: what is written before a translation and after it, and the text; None: there is none, by an `error`."""

    text: str | None
    before: str = ""
    after: str = ""
    error: str = ""


class Rows(Document):
    """Rows of a file, of which the first one is in line `first`; `cell` writes a translation."""

    is_prose = is_linked = False

    def __init__(self, rows: Sequence[Row], cell: Callable[[str], str], first: int = 1) -> None:
        super().__init__()
        self.rows, self.cell = rows, cell
        for line, row in enumerate(rows, first):
            if row.text is not None:
                self.places[row.text].append(line)
            elif row.error:
                self.problems.append((line, row.error))

    def cells(self, translations: Mapping[str, Linked]) -> list[str]:
        """Returns the translation of each row; that of a text without one is empty."""
        found: dict[str | None, str] = {text: self.cell(one.text) for text, one in translations.items()}
        return ["" if row.text is None else found.get(row.text, self.cell("")) for row in self.rows]

    def translated(self, translations: Mapping[str, Linked]) -> str:
        """Returns the rows with their translations."""
        cells = self.cells(translations)
        return "".join(row.before + cell + row.after for row, cell in zip(self.rows, cells, strict=True))


def _line(translation: str) -> str:
    return " ".join(translation.splitlines())


def plain_text(text: str) -> Rows:
    """Returns a text of several lines, with the white space around each."""
    parts = (re.fullmatch(r"(\s*)(.*?)(\s*)", line, re.DOTALL) for line in re.split(r"(?<=\n)", text))
    return Rows([Row(part[2] or None, part[1], part[3]) for part in parts if part], _line)


def _text_rows(lines: Lines, column: str) -> Iterator[Row]:
    for line, end, error in lines:
        yield Row(None if error else line, "", end, error)


def _tsv_rows(lines: Lines, column: str) -> Iterator[Row]:
    header, end, _ = next(iter(lines), ("", "", ""))
    names = header.split("\t")
    _check_columns(names, column)
    yield Row(None, f"{header}\t{TRANSLATION}", end)
    for line, end, error in lines:
        cells = line.split("\t")
        if len(cells) != len(names):
            error = error or f"{len(cells)} columns, not {len(names)}"
        yield Row(None if error else cells[names.index(column)], f"{line}\t", end, error)


def _json_rows(lines: Lines, column: str) -> Iterator[Row]:
    for line, end, _ in lines:
        text, error = _json_text(line, column) if line.strip() else (None, "")
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
    "": (_text_rows, _line),
    ".tsv": (_tsv_rows, lambda translation: " ".join(translation.split())),
    ".jsonl": (_json_rows, lambda translation: json.dumps(translation, ensure_ascii=False)),
}


def row_parts(file: Any, name: str, form: str, column: str) -> Iterator[Rows]:
    """Yields the rows of a file that is open in binary mode, `ROWS` at a time; raises `CorpusError`.

    `file` has a buffer, `name` is for errors, `form` is a key of `FORMS`, and `column` that of a table.
    """
    read, cell = FORMS[form]
    begin = file.read(3).decode() if file.peek(3)[:3] == BOM_UTF8 else ""
    rows, first = read(_lines(file, name), column), 1
    while some := list(islice(rows, ROWS)):
        some[0] = some[0]._replace(before=begin + some[0].before)
        yield Rows(some, cell, first)
        begin, first = "", first + len(some)


def _lines(file: IO[bytes], name: str) -> Iterator[tuple[str, str, str]]:
    for number, line in enumerate(bounded_lines(file, name)):
        if not number:
            check_start(line, name)
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
        super().__init__(rows, str)

    def translated(self, translations: Mapping[str, Linked]) -> str:
        """Returns the Parquet file with a column more, its bytes as by "surrogateescape"."""
        import pyarrow.parquet

        column = pyarrow.array(self.cells(translations), pyarrow.string())
        output = BytesIO()
        pyarrow.parquet.write_table(self.table.append_column(TRANSLATION, column), output)
        return output.getvalue().decode(errors="surrogateescape")
