"""Sources of corpora, and plain text, compressed or not; `data.tables` reads tables.

A problem with a file is a `CorpusError` that names the file, the line and the fix. This module imports nothing slow,
as the command line needs it before it starts to work.
"""

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count, zip_longest
from pathlib import Path
from typing import IO, Protocol

TABLES = (".tsv", ".csv", ".jsonl", ".json", ".parquet")
SUBTITLES, HTML = (".srt", ".vtt", ".ass", ".ssa"), (".html", ".htm")
# Other documents: read by lines, marks would be taken for words, and lines for sentences.
DOCUMENTS = (
    ".adoc", ".arb", ".asciidoc", ".dfxp", ".doc", ".docx", ".epub", ".ini", ".ipynb", ".lrc", ".markdown", ".md",
    ".mdx", ".mqxliff", ".odp", ".ods", ".odt", ".pdf", ".po", ".pot", ".ppt", ".pptx", ".properties", ".qmd", ".resx",
    ".rmd", ".rst", ".rtf", ".sbv", ".sdlxliff", ".sgm", ".sgml", ".smi", ".stl", ".strings", ".sub", ".svg", ".tbx",
    ".tex", ".tmx", ".toml", ".ttml", ".usf", ".xhtml", ".xlf", ".xliff", ".xls", ".xlsx", ".xml", ".yaml", ".yml",
)  # fmt: skip
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")  # suffixes of names; a file's first bytes decide how it is read
GZIP, XZ = b"\x1f\x8b", b"\xfd7zXZ\0"
ZSTD = re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")  # the latter: without text, as pzstd begins
BZIP2 = re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P)")
# First bytes of files that aren't plain text -> the format and the fix.
OTHER_FORMATS = {
    (b"\xff\xfe", b"\xfe\xff"): "UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8",
    (b"PK\x03\x04",): "a zip archive; extract it",
    (b"<?xml", b"<tmx", b"<srcset", b"<refset"): "XML, not a sentence per line; extract its sentences (TMX: to .tsv)",
}
LONGEST_LINE = 2**24  # bytes; without an end, a line would fill the memory
CONVERT = "convert it to UTF-8, with iconv for instance"
DEFAULT_COLUMNS = ("source", "target")

Pair = dict[str, str]  # with the keys "source" and "target"


class CorpusError(ValueError):
    """A corpus can't be read; the message names the file, the line and the fix."""


@dataclass(frozen=True)
class Corpus:
    """Sources of sentence pairs, read one after the other."""

    source: tuple[str, ...] = ()  # plain text files, one sentence per line
    target: tuple[str, ...] = ()  # their translations, file by file and line by line
    tables: tuple[str, ...] = ()  # files (.tsv, .csv, .jsonl, .parquet) with both sides, or data sets on the Hub
    source_column: str = DEFAULT_COLUMNS[0]  # of tables: a column, or a language of a "translation" column, "en"
    target_column: str = DEFAULT_COLUMNS[1]
    feature_columns: tuple[str, ...] = ()  # of the source: they follow it, each behind a tab, "walk\tV;PST"
    configuration: str | None = None  # of data sets on the Hub, "de-en"
    split: str = "train"  # of data sets on the Hub
    # Of the text files, then of the tables: each has this share of the pairs that are trained on. (): all are equal.
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise CorpusError(
                f"{len(self.source)} source files but {len(self.target)} target files; give each its translation"
            )
        for file in (*self.source, *self.target):
            check_file(Path(file))
        for table in self.tables:
            if is_table(table):
                check_file(Path(table))
            elif Path(table).is_file():
                is_xml = Path(table).suffix in (".tmx", ".xml", ".sgm", ".xliff")
                kind = "XML" if is_xml else "no table by its name"
                raise CorpusError(f"{table}: {kind}; give a table ({', '.join(TABLES)}), or text by source and target")

    def __bool__(self) -> bool:
        return bool(self.source or self.tables)

    @property
    def parts(self) -> "list[Corpus]":
        """The corpora that have a weight each; without weights, this one."""
        if not self.weights:
            return [self]
        alone = replace(self, source=(), target=(), tables=(), weights=())
        texts = zip(self.source, self.target, strict=True)
        return [
            *(replace(alone, source=(one,), target=(other,)) for one, other in texts),
            *(replace(alone, tables=(one,)) for one in self.tables),
        ]

    @property
    def name(self) -> str:
        """What a run's log calls it: its files without their folders."""
        return " + ".join(Path(name).name for name in (*self.source, *self.target, *self.tables))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of source, target and features."""
        return (self.source_column, self.target_column, *self.feature_columns)


def read_lines(path: str | Path) -> Iterator[str]:
    """Yields the lines of a UTF-8 text file, compressed (.gz, .bz2, .xz, .zst) or not, as `decode_lines` does."""
    number = 0
    try:
        with Path(path).open("rb") as raw, decompressed(raw) as file:
            for line in decode_lines(bounded_lines(file, str(path)), str(path)):
                number += 1
                yield line
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise CorpusError(
            f"{path}:{number + 1}: the compressed file is damaged ({error}); copy or download it again"
        ) from error
    except OSError as error:
        raise CorpusError(f"{path}: can't be read ({error.strerror or error}); name a readable file") from error


def decompressed(raw: IO[bytes]) -> IO[bytes] | io.BufferedIOBase:
    """Returns what reads an open file, compressed or not; its first bytes say how."""
    start = raw.read(10)
    raw.seek(0)
    if ZSTD.match(start):
        import pyarrow  # takes a while to import, and is needed for this alone

        return io.BufferedReader(pyarrow.input_stream(raw, compression="zstd"))
    if start.startswith(GZIP):
        return gzip.open(raw)
    if start.startswith(XZ):
        return lzma.open(raw)
    return bz2.open(raw) if BZIP2.match(start) else raw


class _LineReader(Protocol):
    def readline(self, size: int, /) -> bytes: ...


def bounded_lines(file: _LineReader, name: str) -> Iterator[bytes]:
    """Yields a binary file's lines with their ends, as the file itself does, but none that would fill the memory."""
    for number in count(1):
        line = file.readline(LONGEST_LINE + 1)
        if not line:
            return
        if number == 1 and not line.endswith(b"\n") and line.count(b"\r") > 2:
            raise CorpusError(f"{name}: its lines end with CR alone; convert them: tr '\\r' '\\n'")
        if len(line) > LONGEST_LINE:
            raise CorpusError(
                f"{name}:{number}: the line has no end within {LONGEST_LINE:,} bytes; give a sentence per line"
            )
        yield line


def decode_lines(lines: Iterable[bytes], name: str) -> Iterator[str]:
    r"""Yields lines decoded from UTF-8, without their ends ("\n" or "\r\n", nothing else) and a byte-order mark."""
    for number, line in enumerate(lines, start=1):
        if number == 1:
            check_start(line, name)
        if problem := utf8_problem(line):
            raise CorpusError(f"{name}:{number}: {problem}; {CONVERT}")
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        yield text[:-1].removesuffix("\r") if text.endswith("\n") else text


def utf8_problem(content: bytes) -> str:
    """Returns which byte isn't UTF-8; "": all are."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte 0x{content[error.start]:02x} at {error.start + 1})"
    return ""


def check_start(line: bytes, name: str) -> None:
    """Raises `CorpusError` if a file's first line shows that it isn't plain text."""
    for starts, kind in OTHER_FORMATS.items():
        if line.startswith(starts):
            raise CorpusError(f"{name}: the file is {kind}")
    if b"\0" in line:
        raise CorpusError(f"{name}: the file has NUL bytes: it is binary, or UTF-16 without a mark, not UTF-8")


def without_compression(name: str) -> str:
    """Returns a file's name without the suffix of a compression."""
    suffix = Path(name).suffix
    return name.removesuffix(suffix) if suffix.lower() in COMPRESSIONS else name


def form_of(name: str) -> str:
    """Returns the suffix of the name of a table or a document, compressed or not, in lower case; "" for a text's."""
    suffix = Path(without_compression(name)).suffix.lower()
    return suffix if suffix in (*TABLES, *SUBTITLES, *HTML, *DOCUMENTS) else ""


def table_format(name: str) -> str:
    """Returns the suffix of a table's name, compressed or not, in lower case; "" for other names."""
    return suffix if (suffix := form_of(name)) in TABLES else ""


def is_table(name: str) -> bool:
    """Whether the name is that of a table's file; otherwise it is a data set on the Hub."""
    return bool(table_format(name))


def check_file(path: Path) -> None:
    """Raises `CorpusError` if a corpus file is missing, a folder or empty."""
    if not path.is_file():
        raise CorpusError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}; name an existing file")
    if path.stat().st_size == 0:
        raise CorpusError(f"{path}: the file is empty; is it the right one, and was it written completely?")


def read_text(source_path: str, target_path: str) -> Iterator[Pair]:
    """Yields the pairs of two text files, line by line; a CorpusError if one has fewer lines than the other."""
    lines = zip_longest(read_lines(source_path), read_lines(target_path))
    for number, (source, target) in enumerate(lines, start=1):
        if source is None or target is None:
            short, long = (source_path, target_path) if source is None else (target_path, source_path)
            raise CorpusError(
                f"{short}: ends after line {number - 1}, but {long} is longer; the two files must be translations of "
                "each other, line by line"
            )
        yield {"source": source, "target": target}
