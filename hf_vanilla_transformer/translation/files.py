"""Translating many files: text, .gz, tables, subtitles and HTML, each into a file of the same name.

A file appears when it is complete, and a complete one is skipped, so that a killed run is started again by the same
command: a hidden record beside it says what it was made from. A row that can't be translated is empty in the output,
and `NAME.errors.jsonl` beside it says why.
"""

import gzip
import hashlib
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import pyarrow
import pyarrow.parquet
from huggingface_hub import try_to_load_from_cache

from ..checkpoints.files import replacing, write_text
from ..checkpoints.kinds import CONFIG
from ..data.digests import digest_of
from ..data.formats import COMPRESSIONS, HTML, SUBTITLES, CorpusError, bounded_lines, check_start, form_of
from ..data.hub_names import revision_of
from ..errors import first_line
from . import markup, subtitles

if TYPE_CHECKING:
    from .translator import Translator

ROWS = 1_000  # rows that are translated at a time; the same everywhere, as batches depend on it
TRANSLATION = "translation"  # the column that tables get
ERRORS = ".errors.jsonl"
PARQUET = ".parquet"
WHOLE = (*SUBTITLES, *HTML)  # of whose lines every byte counts
# Files of a model's folder that it doesn't translate with: cards, and the state of a training.
OTHERS = ("*.md", "model_card.json", "*.pt", "*.pth")

Call = Callable[[list[str]], list[str]]  # texts -> their translations


class Row(NamedTuple):
    """A row of a file.

    Attributes:
        text: What to translate; None where there is no text.
        error: Why there is none.
        cells: What a table has in the row; of other files, what stays as it is.
    """

    text: str | None
    error: str = ""
    cells: Any = None


class Outcome(NamedTuple):
    """What became of a row: its translation, or an empty string and the reason."""

    translation: str
    error: str = ""


@dataclass(frozen=True)
class FileJob:
    """One file to translate.

    Attributes:
        source: The input.
        output: The file that will have its name, in the output folder.
        how: What its translation depends on beside the input: `model`, options; the `column` of a table (default:
            text), and whether the `format` is text whatever the name says.

    Raises:
        CorpusError: The input has a format that isn't written, or the name of another output's report.
    """

    source: Path
    output: Path
    how: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        other, suffix = self.output.name.removesuffix(ERRORS), self.source.suffix.lower()
        if other != self.output.name:
            raise CorpusError(f"{self.output} would have the name of the report on {other}; rename {self.source.name}")
        if self.form not in (*FORMATS, PARQUET) or (suffix in COMPRESSIONS and suffix != ".gz"):
            raise CorpusError(
                f"{self.source}: can't be written back; make it text, a table (.tsv, .jsonl, .parquet), subtitles "
                "(.srt, .vtt), HTML, or text as .gz; or give --format text if each of its lines is a text"
            )

    @property
    def errors(self) -> Path:
        """The file beside the output with the rows that couldn't be translated, if there are any."""
        return self.output.with_name(self.output.name + ERRORS)

    @property
    def record(self) -> Path:
        """The hidden file beside the output that says what this was made from."""
        return self.output.with_name(f".{self.output.name}.json")

    @property
    def column(self) -> str:
        """The column of a table."""
        return self.how.get("column") or "text"

    @property
    def form(self) -> str:
        """How the input is read: ".tsv", ".srt" and so on; "" for a text per line."""
        return "" if self.how.get("format") == "text" else form_of(self.source.name)

    def origin(self) -> dict[str, Any]:
        """Returns all that the translation depends on, for the record; raises `CorpusError`."""
        with _reading(self.source):
            status = self.source.stat()
        return {"input": [status.st_size, status.st_mtime_ns], **self.how}

    def problem(self) -> str | None:
        """Returns why an output that exists isn't that of this job; None: it is."""
        new = self.origin()
        try:
            old = dict(json.loads(self.record.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return f"{self.output} has no record of what it was made from; it is older, or your own"
        others = [name for name in new if old.get(name) != new[name]]
        shown = [one if one in ("input", "model") else f"{one} ({old.get(one)}, not {new[one]})" for one in others]
        return f"{self.output} was made with another {', '.join(shown)}" if others else None


def version_of(model: str) -> str:
    """Returns what tells models of one name apart: the commit on the Hub, or a digest of a folder's files."""
    if not Path(model).is_dir():
        return revision_of(model) or Path(str(try_to_load_from_cache(model, CONFIG))).parent.name
    files = sorted(file for file in Path(model).iterdir() if file.is_file() and not any(map(file.match, OTHERS)))
    return hashlib.sha256(repr([(file.name, digest_of(file)) for file in files]).encode()).hexdigest()


def file_jobs(
    inputs: Sequence[str | Path],
    output: str | Path,
    shard: tuple[int, int] = (1, 1),
    how: Mapping[str, Any] | None = None,
) -> list[FileJob]:
    """Returns the files to translate, in the order of their names.

    Args:
        inputs: Files, and folders, of which all files are taken that aren't hidden, with those of their subfolders.
        output: The folder for the translations. Subfolders of an input are kept.
        shard: I and N: every N-th file from the I-th on, counted from 1.
        how: As for `FileJob`.

    Raises:
        CorpusError: As for `FileJob`; an input doesn't exist, two have one name, or an output would be its own input.
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
    return [FileJob(found[name], output / name, how or {}) for name in sorted(found)][index - 1 :: number]


@contextmanager
def rows_of(path: Path, form: str = "", column: str = "text") -> Iterator[tuple[IO[bytes], Iterator[Row]]]:
    """Opens a file: yields the file, whose position tells the progress, and its rows.

    Args:
        path: The file, .gz or not.
        form: As `FileJob.form`. Subtitles have a row for each line, HTML has one.
        column: The column of a table.

    Raises:
        CorpusError: The file can't be read, is damaged or has no such column; raised when its place is reached.
    """
    with ExitStack() as opened:
        with _reading(path):
            raw = opened.enter_context(path.open("rb"))
            file = opened.enter_context(gzip.open(raw)) if path.suffix.lower() == ".gz" else raw
        yield raw, _rows(file, path, form, column)


def _rows(file: Any, path: Path, form: str, column: str) -> Iterator[Row]:
    with _reading(path):
        if form == PARQUET:
            yield from _parquet_rows(file, path, column)
        else:
            read, _ = FORMATS[form]
            yield from read(_lines(file, path, is_whole=form in WHOLE), path, column)


def _lines(file: Any, path: Path, is_whole: bool) -> Iterator[bytes]:
    for number, line in enumerate(bounded_lines(file, str(path))):
        if not number:
            check_start(line, str(path))
        plain = line.removeprefix(b"" if number else BOM_UTF8).removesuffix(b"\n").removesuffix(b"\r")
        yield line if is_whole else plain


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns errors of reading a file into ones that name it."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error, pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
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
            json.dumps(cells, allow_nan=False)  # 1e400 is read as infinity, which JSON lacks
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            yield Row(None, f"no JSON object with {column!r} ({first_line(error)})", {})
            continue
        yield Row(text, "", cells) if isinstance(text, str) else Row(None, f"{column!r} is no text", cells)


def _page_row(lines: Iterator[bytes], path: Path, column: str) -> Iterator[Row]:
    yield Row(b"".join(lines).decode())


def _subtitle_rows(lines: Iterator[bytes], path: Path, column: str) -> Iterator[Row]:
    is_vtt = form_of(path.name) == ".vtt"
    for part, is_speech in subtitles.speeches(lines):
        text, error, _ = _text_row(raw := b"".join(part))
        if text is None or not is_speech:  # .srt has nothing but numbers and times outside of cues
            is_stray = not is_vtt and not subtitles.TIMES.match(raw) and any(map(str.isalpha, text or ""))
            yield Row(None, error or "no part of a cue" * is_stray, raw)
        else:
            before, text, after = subtitles.text_of(text, is_vtt)
            yield Row(text, "", (before, after, is_vtt))
        yield from (Row(None, "", b"") for _ in part[1:])


def _parquet_rows(file: Any, path: Path, column: str) -> Iterator[Row]:
    table = pyarrow.parquet.ParquetFile(file)
    _check_columns(table.schema_arrow.names, path, column)
    for batch in table.iter_batches(ROWS):
        for number, text in enumerate(batch.column(column).to_pylist()):
            cells = batch.slice(number, 1)
            yield Row(text, "", cells) if isinstance(text, str) else Row(None, f"{column!r} is no text", cells)


def caller(translator: "Translator", form: str, **options: Any) -> Call:
    """Returns what translates the texts of files of one form; those of HTML are pages."""
    if form in HTML:
        return lambda pages: [markup.translate_html(translator, page, **options) for page in pages]
    return partial(translator, **options)


def outcomes(translate: Call, rows: Sequence[Row]) -> list[Outcome]:
    """Translates some rows of a file.

    Args:
        translate: Returns as many translations as it gets texts.
        rows: The rows.
    """
    done = iter(_translated(translate, [row.text for row in rows if row.text is not None]))
    return [next(done) if row.text is not None else Outcome("", row.error) for row in rows]


def _translated(translate: Call, texts: list[str]) -> list[Outcome]:
    """Translates texts; where one of them is refused, it alone is left out, found by halves."""
    try:
        return [Outcome(text) for text in translate(texts)] if texts else []
    except (ValueError, IndexError) as error:
        if len(texts) == 1:
            return [Outcome("", first_line(error))]
    half = len(texts) // 2
    return _translated(translate, texts[:half]) + _translated(translate, texts[half:])


def write(job: FileJob, translate: Callable[[list[Row]], list[Outcome]]) -> Iterator[int]:
    """Writes the output of one file, `ROWS` rows at a time; yields how many bytes of the input are read.

    Args:
        job: The file.
        translate: Returns what becomes of the next rows.

    Raises:
        CorpusError: The input can't be read, or changes meanwhile.
        OSError: The output can't be written.
    """
    job.output.parent.mkdir(parents=True, exist_ok=True)
    errors: list[dict[str, Any]] = []
    origin = job.origin()
    with rows_of(job.source, job.form, job.column) as (raw, rows), replacing(job.output) as place:
        with _writer(place, job) as put:
            for first in count(1, ROWS):
                if not (some := list(islice(rows, ROWS))):
                    break
                done = translate(some)
                put(some, done)
                errors += [{"row": row, "error": one.error} for row, one in enumerate(done, first) if one.error]
                yield raw.tell()
        if job.origin() != origin:
            raise CorpusError(f"{job.source}: has changed while it was read; start again")
        for old in (job.output, job.errors):  # the new record isn't that of an old output
            old.unlink(missing_ok=True)
        if errors:
            lines = (json.dumps(error, ensure_ascii=False) + "\n" for error in errors)
            job.errors.write_text("".join(lines), encoding="utf-8")
        write_text(job.record, json.dumps(origin))


Put = Callable[[Sequence[Row], Sequence[Outcome]], None]


@contextmanager
def _writer(path: Path, job: FileJob) -> Iterator[Put]:
    """Yields what writes rows with their translations, in the format of the input."""
    if job.form == PARQUET:
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
    _, line = FORMATS[job.form]
    with ExitStack() as opened:
        output: Any = opened.enter_context(path.open("wb"))
        if job.source.suffix.lower() == ".gz":  # without a name and a time, so that equal text gives equal bytes
            output = opened.enter_context(gzip.GzipFile("", "wb", fileobj=output, mtime=0))
        yield lambda rows, part: output.writelines(line(row, one) for row, one in zip(rows, part, strict=True))


def _line(row: Row, outcome: Outcome) -> bytes:
    return f"{' '.join(outcome.translation.splitlines())}\n".encode()


def _tsv_line(row: Row, outcome: Outcome) -> bytes:
    is_header = row.text is None and not row.error
    return f"{row.cells}\t{TRANSLATION if is_header else ' '.join(outcome.translation.split())}\n".encode()


def _json_line(row: Row, outcome: Outcome) -> bytes:
    text = json.dumps({**row.cells, TRANSLATION: outcome.translation}, ensure_ascii=False)
    return f"{text}\n".encode(errors="backslashreplace")  # half a surrogate pair is written as JSON writes it, \ud83d


def _subtitle_line(row: Row, outcome: Outcome) -> bytes:
    if row.text is None:
        return bytes(row.cells)
    return subtitles.speech_of(outcome.translation, *row.cells).encode()


FORMATS: dict[str, tuple[Callable[[Iterator[bytes], Path, str], Iterator[Row]], Callable[[Row, Outcome], bytes]]] = {
    "": (lambda lines, *_: map(_text_row, lines), _line),
    ".tsv": (_tsv_rows, _tsv_line),
    ".jsonl": (_json_rows, _json_line),
    **dict.fromkeys(SUBTITLES, (_subtitle_rows, _subtitle_line)),
    **dict.fromkeys(HTML, (_page_row, lambda _, outcome: outcome.translation.encode())),
}
