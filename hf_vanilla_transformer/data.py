"""Parallel corpora: from files or the Hub to sentence pairs, and from pairs to token ids.

A corpus is given as pairs of plain text files, as tables (.tsv, .csv, .jsonl, .parquet) or as a data set on the Hub.
Plain text and tables may be compressed (.gz).
"""

import csv
import gzip
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute
from datasets import Dataset, IterableDataset, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError
from numpy.typing import NDArray

TABLES = (".tsv", ".csv", ".jsonl", ".json", ".parquet")
# Above so many pairs, several processes tokenize; below, starting them takes longer than the work.
PAIRS_A_PROCESS = 200_000

Pair = dict[str, str]  # of the keys "source" and "target"


class CorpusError(ValueError):
    """A corpus can't be read; the message names file, line and mend."""


@dataclass(frozen=True)
class Corpus:
    """Where sentence pairs come from: several sources, read one after the other.

    Attributes:
        source: Plain text files, one sentence a line.
        target: Their translations, file by file and line by line.
        tables: Files (.tsv, .csv, .jsonl, .parquet) that hold both sides, or names of data sets on the Hub.
        source_column: The column of the source in tables: "source", or a language of a "translation" column, "en".
        target_column: The column of the target.
        configuration: A Hub data set's configuration, "de-en".
        split: A Hub data set's split.
    """

    source: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    source_column: str = "source"
    target_column: str = "target"
    configuration: str | None = None
    split: str = "train"

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise CorpusError(
                f"{len(self.source)} source files but {len(self.target)} target files; give each its translation"
            )
        for file in (*self.source, *self.target, *(table for table in self.tables if _is_file_name(table))):
            _check_file(Path(file))

    def __bool__(self) -> bool:
        return bool(self.source or self.tables)


@dataclass
class Cleaning:
    """Which pairs are left out, and how many were.

    Attributes:
        max_length: Tokens of a side at most, the end of sentence included.
        max_length_ratio: How many times as many tokens one side may have as the other; None: any.
        left_out: Reason -> number of pairs.
        kept: Number of pairs that are left.
    """

    max_length: int
    max_length_ratio: float | None = None
    left_out: Counter[str] = field(default_factory=Counter)
    kept: int = 0

    def keeps(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tells which pairs stay, and counts.

        Args:
            source: Tokens of each source with its end of sentence, (N,): an empty text has 1.
            target: Tokens of each target, likewise.
        """
        longer, shorter = np.maximum(source, target), np.minimum(source, target)
        ratio = np.inf if self.max_length_ratio is None else self.max_length_ratio
        reasons = {
            "an empty side": shorter <= 1,
            f"more than {self.max_length} tokens": longer > self.max_length,
            f"a length ratio above {self.max_length_ratio}": longer > ratio * shorter,
        }
        stays = np.ones(len(source), dtype=bool)
        for reason, applies in reasons.items():
            if count := int((stays & applies).sum()):
                self.left_out[reason] += count
            stays &= ~applies
        self.kept += int(stays.sum())
        return stays

    def __str__(self) -> str:
        removed = ", ".join(f"{count:,} with {reason}" for reason, count in self.left_out.items())
        return f"{self.kept:,} pairs kept, {self.left_out.total():,} left out" + (f": {removed}" if removed else "")


def read_corpus(corpus: Corpus, streaming: bool = False) -> Dataset | IterableDataset:
    """Reads a corpus into the columns "source" and "target".

    What is read is cached by datasets; a file that changes is read anew.

    Args:
        corpus: What to read.
        streaming: Reads while it is used, in place of all at once: for what doesn't fit on the disk a second time.

    Raises:
        CorpusError: A file is missing, empty, not UTF-8 or shorter than its translation, a row has no such column; with
            file and line. A stream says so when it comes to the line.
    """
    files = [_Source("text", (s, t)) for s, t in zip(corpus.source, corpus.target, strict=True)]
    files += [_Source("table", (table,)) for table in corpus.tables if _is_file_name(table)]
    local = [file for file in files if not file.paths[0].endswith(".parquet")]
    parts: list[Any] = []
    if local:
        # Size and time of change stand for the content, so that datasets doesn't take a stale copy from its cache.
        stamps = [[(os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in file.paths] for file in local]
        arguments = {"sources": local, "stamps": stamps, "columns": (corpus.source_column, corpus.target_column)}
        parts.append(_from_generator(arguments, streaming))
    parquet = [file.paths[0] for file in files if file.paths[0].endswith(".parquet")]
    if parquet:
        parts.append(_loaded(corpus, streaming, "parquet", data_files=parquet, split="train"))
    for name in (table for table in corpus.tables if not _is_file_name(table)):
        parts.append(_loaded(corpus, streaming, name, corpus.configuration, split=corpus.split))
    if not parts:
        raise CorpusError("no corpus is given; name its files or a data set on the Hub")
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def tokenize(
    pairs: Dataset | IterableDataset, tokenizer: Any, cleaning: Cleaning, num_proc: int | None = None
) -> Dataset | IterableDataset:
    """Makes "input_ids" and "labels" of "source" and "target", and leaves out what `cleaning` says.

    Args:
        pairs: Columns "source" and "target".
        tokenizer: Ends each sequence with its end-of-sentence token.
        cleaning: What to leave out; its counts are raised (a stream's, as far as it is read, in its own process).
        num_proc: Processes; None: one, or all cores for a large corpus. The tokenizer itself uses all cores too.

    Raises:
        CorpusError: Nothing is left.
    """

    def encode(batch: Mapping[str, list[str]]) -> dict[str, Any]:
        encoded = tokenizer(list(batch["source"]), text_target=list(batch["target"]), verbose=False)
        return {"input_ids": encoded["input_ids"], "labels": encoded["labels"]}

    def encode_and_clean(batch: Mapping[str, list[str]]) -> dict[str, Any]:
        columns = encode(batch)
        stays = cleaning.keeps(*(np.array([len(ids) for ids in columns[name]]) for name in ("input_ids", "labels")))
        return {name: [ids for ids, keep in zip(rows, stays, strict=True) if keep] for name, rows in columns.items()}

    if isinstance(pairs, IterableDataset):
        return pairs.map(encode_and_clean, batched=True, remove_columns=pairs.column_names or ["source", "target"])
    if num_proc is None and len(pairs) > PAIRS_A_PROCESS:
        num_proc = os.cpu_count()
    encoded = pairs.map(encode, batched=True, num_proc=num_proc, desc="Tokenizing")
    stays = cleaning.keeps(lengths_of(encoded, "input_ids"), lengths_of(encoded, "labels"))
    if not stays.any():
        raise CorpusError(f"no sentence pair is left of {len(pairs):,}: {cleaning}")
    return encoded if stays.all() else encoded.select(np.flatnonzero(stays))


def lengths_of(dataset: Dataset, column: str) -> NDArray[np.int64]:
    """Numbers of elements in each row of a column of lists, (N,), without making Python lists of them."""
    table = dataset.with_format("arrow")[:]
    return np.asarray(pyarrow.compute.list_value_length(table[column]).to_numpy(), dtype=np.int64)


def read_lines(path: str | Path) -> Iterator[str]:
    r"""Yields the lines of a UTF-8 text file, .gz or not, without their ends. Only "\n" and "\r\n" end a line.

    Raises:
        CorpusError: A line is not UTF-8, or the file is no .gz file although it is named so.
    """
    path = Path(path)
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield text.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path}:{number}: not UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start + 1}); "
            "convert it first, for instance: iconv -f latin1 -t utf-8"
        ) from error
    except (gzip.BadGzipFile, EOFError) as error:
        raise CorpusError(f"{path}:{number + 1}: the compressed file is damaged ({error}); get it anew") from error


@dataclass(frozen=True)
class _Source:
    kind: str  # "text": two files side by side; "table": one that holds both
    paths: tuple[str, ...]


def _is_file_name(name: str) -> bool:
    return name.removesuffix(".gz").endswith(TABLES)


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise CorpusError(f"{path}: {'a folder' if path.is_dir() else 'no such file'}; name a text file or a table")
    if path.stat().st_size == 0:
        raise CorpusError(f"{path}: the file is empty; is it the right one, and was it written to its end?")


def _from_generator(arguments: dict[str, Any], streaming: bool) -> Dataset | IterableDataset:
    if streaming:
        return IterableDataset.from_generator(_read_sources, gen_kwargs=arguments)
    try:
        return Dataset.from_generator(_read_sources, gen_kwargs=arguments)
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, CorpusError):
            raise error.__cause__ from None
        raise


def _read_sources(sources: list[_Source], stamps: list[Any], columns: tuple[str, str]) -> Iterator[Pair]:
    for source in sources:
        read = _read_text if source.kind == "text" else _read_table
        empty = True
        for pair in read(source.paths, columns):
            empty = False
            yield pair
        if empty:
            raise CorpusError(f"{source.paths[0]}: no sentence pair in it; is it the right file?")


def _read_text(paths: tuple[str, ...], columns: tuple[str, str]) -> Iterator[Pair]:
    source_path, target_path = paths
    lines = zip_longest(read_lines(source_path), read_lines(target_path))
    for number, (source, target) in enumerate(lines, start=1):
        if source is None or target is None:
            short, long = paths if source is None else (target_path, source_path)
            raise CorpusError(
                f"{short}: ends after line {number - 1}, but {long} goes on; they have to be translations of each "
                "other, line by line"
            )
        yield {"source": source, "target": target}


def _read_table(paths: tuple[str, ...], columns: tuple[str, str]) -> Iterator[Pair]:
    path = paths[0]
    suffix = Path(path.removesuffix(".gz")).suffix
    rows: Callable[..., Iterator[tuple[int, Mapping[str, Any]]]]
    rows = {".tsv": _rows_of_tsv, ".csv": _rows_of_csv}.get(suffix, _rows_of_json)
    for number, row in rows(path, columns):
        yield _pair_of(row, columns, f"{path}:{number}")


def _rows_of_tsv(path: str, columns: tuple[str, str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Two columns without a header, or the columns that a header names; no quotes: a tab can't stand in a text."""
    header: Sequence[str] | None = None
    for number, line in enumerate(read_lines(path), start=1):
        cells = line.split("\t")
        if number == 1 and set(columns) <= set(cells):
            header = cells
            continue
        if len(cells) < 2 or (header is not None and len(cells) != len(header)):
            raise CorpusError(f"{path}:{number}: {len(cells)} columns, not {len(header or columns)}, parted by tabs")
        yield number, dict(zip(header or columns, cells, strict=False))


def _rows_of_csv(path: str, columns: tuple[str, str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    lines = (line + "\n" for line in read_lines(path))
    reader = csv.DictReader(lines, strict=True)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise CorpusError(f"{path}:{reader.line_num}: not CSV ({error})") from error


def _rows_of_json(path: str, columns: tuple[str, str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
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


def _pair_of(row: Mapping[str, Any], columns: tuple[str, str], where: str) -> Pair:
    row = row["translation"] if isinstance(row.get("translation"), Mapping) else row
    pair = {}
    for side, column in zip(("source", "target"), columns, strict=True):
        if not isinstance(row.get(column), str):
            problem = "is no text" if column in row else f"is missing; there are {', '.join(map(repr, row)) or 'none'}"
            raise CorpusError(f"{where}: column {column!r} {problem} (`source_column` and `target_column` name them)")
        pair[side] = row[column]
    return pair


def _loaded(corpus: Corpus, streaming: bool, *names: Any, **options: Any) -> Dataset | IterableDataset:
    """A data set that datasets itself can read, with the columns renamed."""
    columns = (corpus.source_column, corpus.target_column)
    where = ", ".join(map(str, options.get("data_files") or names[:1]))
    try:
        dataset = load_dataset(*names, streaming=streaming, **options)
    except Exception as error:  # of whatever kind its reader or the network raises
        raise CorpusError(f"{where}: can't be loaded ({str(error).splitlines()[0]})") from error

    def to_pairs(batch: Mapping[str, list[Any]], places: list[int]) -> dict[str, list[str]]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        pairs = [_pair_of(row, columns, f"{where}, row {place + 1}") for place, row in zip(places, rows, strict=True)]
        return {side: [pair[side] for pair in pairs] for side in ("source", "target")}

    names_of_columns = dataset.column_names or list(next(iter(dataset)))
    return dataset.map(to_pairs, batched=True, with_indices=True, remove_columns=names_of_columns)


def texts_of(pairs: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Yields both sides of each pair, to learn a joint vocabulary from (5.1)."""
    for pair in pairs:
        yield pair["source"]
        yield pair["target"]


__all__ = ["Cleaning", "Corpus", "CorpusError", "lengths_of", "read_corpus", "read_lines", "texts_of", "tokenize"]
