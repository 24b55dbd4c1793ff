"""Translating files: text, compressed or not, tables, subtitles and HTML, each into a file of the same name.

A file appears when it is complete, and a complete one is skipped, so that a killed run is started again by the same
command: a hidden record beside it says what it was made from. `NAME.errors.jsonl` beside it names the lines that can't
be translated.
"""

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoints.files import replacing, write_text
from ..data.digests import digest_of
from ..data.formats import COMPRESSIONS, CONVERT, HTML, SUBTITLES, CorpusError, decompressed, form_of, utf8_problem
from ..errors import first_line
from ..translation.division import UNDETERMINED
from ..translation.translator import Translator
from .document import Part, languages, open_document, translate_document
from .links import Document
from .rows import FORMS, Table, row_parts

ERRORS = ".errors.jsonl"
PARQUET = ".parquet"
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, OSError)
LARGEST = 2**26  # bytes of a document that isn't read in parts
# Files of a model's folder that it doesn't translate with: cards, and the state of a training.
OTHERS = ("*.md", "model_card.json", "*.pt", "*.pth")


@dataclass(frozen=True)
class FileJob:
    """One file to translate, and the file that it becomes; a name that can't be written raises `CorpusError`.

    `how` is what its translation depends on beside the input: `model`, options; the `column` of a table (default:
    text), and whether the `format` is text whatever the name says.
    """

    source: Path
    output: Path
    how: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        suffix = self.source.suffix.lower()
        if self.form not in (*FORMS, *SUBTITLES, *HTML, PARQUET) or (suffix in COMPRESSIONS and suffix != ".gz"):
            raise CorpusError(
                f"{self.source}: can't be written back; make it text, a table (.tsv, .jsonl, .parquet), subtitles "
                "(.srt, .vtt, .ass), HTML, or one of them as .gz; or give --format text if each of its lines is a text"
            )

    @property
    def errors(self) -> Path:
        """The file beside the output with the lines that couldn't be translated, if there are any."""
        return self.output.with_name(self.output.name + ERRORS)

    @property
    def record(self) -> Path:
        """The hidden file beside the output that says what this was made from."""
        return self.output.with_name(f".{self.output.name}.json")

    @property
    def form(self) -> str:
        """How the input is read: ".tsv", ".srt" and so on; "" for a text per line."""
        return "" if self.how.get("format") == "text" else form_of(self.source.name)

    def origin(self) -> dict[str, object]:
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
        from ..data.hub_names import cached_folder, revision_of

        return revision_of(model) or (cached_folder(model) or Path()).name
    files = sorted(file for file in Path(model).iterdir() if file.is_file() and not any(map(file.match, OTHERS)))
    return hashlib.sha256(repr([(file.name, digest_of(file)) for file in files]).encode()).hexdigest()


def file_jobs(
    inputs: Sequence[str | Path],
    output: str | Path,
    shard: tuple[int, int] = (1, 1),
    how: Mapping[str, object] | None = None,
) -> list[FileJob]:
    """Returns the files to translate, in the order of their names: every N-th from the I-th on, of a shard I, N.

    Of a folder, all files are taken but hidden ones and reports of errors, also those of subfolders, which the
    output's folder gets, too.
    Raises `CorpusError` if an input doesn't exist, two have one name, or an output would be its own input.
    """
    output, place = Path(output), Path(output).resolve()
    found: dict[Path, Path] = {}
    for given in map(Path, inputs):
        if not given.exists():
            raise CorpusError(f"{given}: no such file or folder")
        files, folder = (_files_in(given), given) if given.is_dir() else ([given], given.parent)
        has_output = place.is_relative_to(given.resolve())
        for file in files:
            name, real = file.relative_to(folder), file.resolve()
            if real == (place / name).resolve():
                raise CorpusError(f"{file} is the input and the output; give another folder for the translations")
            if has_output and real.is_relative_to(place):  # translations are no inputs
                continue
            if name in found:
                raise CorpusError(f"{file} and {found[name]} have the same name; translate them into two folders")
            found[name] = file
    index, number = shard
    return [FileJob(found[name], output / name, how or {}) for name in sorted(found)][index - 1 :: number]


def _files_in(folder: Path) -> list[Path]:
    """Returns the files of a folder and of its subfolders to translate, in the order of their names."""

    def is_left_out(file: Path) -> bool:
        return file.name.endswith(ERRORS) or any(part.startswith(".") for part in file.relative_to(folder).parts)

    return sorted(file for file in folder.rglob("*") if file.is_file() and not is_left_out(file))


def translate_files(
    jobs: Iterable[FileJob],
    translator: Translator,
    options: Mapping[str, Any],  # for its calls
    tell: Callable[[int], object] = lambda size: None,  # with numbers of bytes that are done
) -> Iterator[tuple[FileJob, str]]:
    """Translates files, and yields each with the reason why it can't be read; "": it is translated."""
    source, target = languages(translator, options)
    translate = partial(translate_document, translator, language=source or UNDETERMINED, **options)
    for job in jobs:
        try:
            _translate(job, translate, target, tell)
        except CorpusError as error:
            yield job, str(error)
        else:
            yield job, ""


def _translate(
    job: FileJob, translate: Callable[[Document], Part], target: str | None, tell: Callable[[int], object]
) -> None:
    job.output.parent.mkdir(parents=True, exist_ok=True)
    origin, place, errors = job.origin(), 0, list[str]()
    is_zipped = job.source.suffix.lower() == ".gz"  # without a name and a time, equal text gives equal bytes
    with replacing(job.output) as name:
        with name.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) if is_zipped else file as output:
            for document, end in _documents(job, target):
                data, wrong = translate(document)
                output.write(data.encode(errors="surrogateescape"))
                errors += (json.dumps({"row": row, "error": error}, ensure_ascii=False) + "\n" for row, error in wrong)
                tell(end - place)
                place = end
        if job.origin() != origin:
            raise CorpusError(f"{job.source}: has changed while it was read; start again")
        for old in (job.output.resolve(), job.errors):  # the new record isn't that of an old output
            old.unlink(missing_ok=True)
        if errors:
            write_text(job.errors, "".join(errors))
        write_text(job.record, json.dumps(origin))


def _documents(job: FileJob, target: str | None) -> Iterator[tuple[Document, int]]:
    """Yields the documents of a file, and how much of it is read: of text, .tsv and .jsonl, one for each `ROWS` rows.

    A file that can't be read, is damaged or has no such column raises `CorpusError` when its place is reached.
    """
    path, form, column = job.source, job.form, str(job.how.get("column") or "text")
    with _reading(path), path.open("rb") as raw, decompressed(raw) as file:
        if form in FORMS:
            yield from ((rows, raw.tell()) for rows in row_parts(file, str(path), form, column))
        elif form == PARQUET:
            yield Table(file, column), raw.tell()
        elif len(content := file.read(LARGEST + 1)) > LARGEST:
            raise CorpusError(f"{path}: has more than {LARGEST:,} bytes; divide it")
        elif problem := utf8_problem(content):
            raise CorpusError(f"{path}: {problem}; {CONVERT}")
        else:
            yield open_document(content.decode(), form, target), raw.tell()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns errors of reading a file into ones that name it."""
    try:
        yield
    except CorpusError as error:
        raise error if str(path) in str(error) else CorpusError(f"{path}: {error}") from error
    except Exception as error:
        if not (isinstance(error, DAMAGED) or type(error).__module__.startswith("pyarrow")):
            raise
        raise CorpusError(f"{path}: can't be read ({first_line(error)}); is it complete?") from error
