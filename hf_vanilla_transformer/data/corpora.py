"""Parallel corpora: from files or the Hub to sentence pairs, and from pairs to token ids.

A corpus comes as pairs of plain text files, as tables (.tsv, .csv, .jsonl, .parquet) or as a data set on the Hub.
Plain text, .tsv, .csv and .jsonl may be compressed (.gz, .bz2, .xz, .zst).
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.compute
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher, generate_random_fingerprint
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..errors import first_line
from ..tokenization_vanilla_transformer import VanillaTransformerTokenizerFast
from .digests import digest_of
from .formats import Corpus, CorpusError, Pair, is_table, read_text, table_format
from .hub_names import revision_of
from .tables import pair_of, read_table

# With fewer pairs, starting several processes takes longer than tokenizing in one.
PAIRS_PER_PROCESS = 200_000
LONGEST_EPOCH = 100  # times the pairs of all corpora
PAIRS_PER_REPORT = 1_000_000  # pairs of a stream between two log lines about pairs left out

logger = logging.get_logger(__name__)


@dataclass
class Cleaning:
    """Rules by which pairs are left out, and the number of those that were."""

    max_length: int  # the most tokens on either side, the end of sentence included
    max_length_ratio: float | None = None  # how many times as many tokens one side may have as the other
    left_out: Counter[str] = field(default_factory=Counter)  # reason -> number of pairs
    kept: int = 0  # number of pairs

    def keeps(
        self, source: NDArray[np.int64], target: NDArray[np.int64], empty: tuple[int, int] = (1, 1)
    ) -> NDArray[np.bool_]:
        """Returns which pairs to keep, (N,), by their numbers of tokens, special ones included, and counts them.

        `empty` are the tokens of an empty source and target: the end of sentence, for most tokenizers.
        """
        longer, shorter = np.maximum(source, target), np.minimum(source, target)
        reasons = {
            "an empty side": (source <= empty[0]) | (target <= empty[1]),
            f"more than {self.max_length} tokens": longer > self.max_length,
        }
        if self.max_length_ratio is not None:
            reasons[f"a length ratio above {self.max_length_ratio}"] = longer > self.max_length_ratio * shorter
        stays = np.ones(len(source), dtype=bool)
        for reason, applies in reasons.items():
            if count := int((stays & applies).sum()):
                self.left_out[reason] += count
            stays &= ~applies
        self.kept += int(stays.sum())
        return stays

    @property
    def seen(self) -> int:
        """Number of pairs that have been checked."""
        return self.kept + self.left_out.total()

    def __str__(self) -> str:
        removed = ", ".join(f"{count:,} with {reason}" for reason, count in self.left_out.items())
        return f"{self.kept:,} pairs kept, {self.left_out.total():,} left out" + (f": {removed}" if removed else "")


def read_corpus(corpus: Corpus, streaming: bool = False) -> Dataset | IterableDataset:
    """Reads a corpus into the columns "source" and "target".

    datasets caches what is read; a file that has changed is read again. With `streaming`, lines are read while the
    pairs are used, for corpora too large for a copy on the disk.

    Raises:
        CorpusError: A file is missing, empty, not UTF-8 or shorter than its translation, or a row has no such column;
            the message names file and line. A stream raises it when it reaches the line.
    """
    sources: list[tuple[str, ...]] = [*zip(corpus.source, corpus.target, strict=True)]
    sources += [(table,) for table in corpus.tables]
    parts: list[Dataset | IterableDataset] = []
    for local, group in groupby(sources, key=lambda paths: len(paths) == 2 or is_table(paths[0])):
        if local:
            parts.append(_from_files(corpus.columns, list(group), streaming))
        else:
            parts += [_from_hub(corpus, name, streaming) for (name,) in group]
    if not parts:
        raise CorpusError("no corpus is given; name files or a data set on the Hub")
    return joined(parts)


def joined(parts: Sequence[Dataset | IterableDataset]) -> Dataset | IterableDataset:
    """Returns corpora one after the other, with a fingerprint of the pairs alone."""
    if len(parts) == 1:
        return parts[0]
    pairs = concatenate_datasets(parts)
    if isinstance(pairs, Dataset):
        pairs._fingerprint = Hasher.hash([part._fingerprint for part in parts])
    return pairs


def counts_per_epoch(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Returns how many pairs of each corpus an epoch has if they are mixed by their weights.

    The one that is largest for its weight occurs once, and the others as often as their weights say. A `CorpusError`
    refuses weights that would make an epoch of more than `LONGEST_EPOCH` times the pairs.
    """
    unit = max(size / weight for size, weight in zip(sizes, weights, strict=True))
    if unit * sum(weights) > LONGEST_EPOCH * sum(sizes):
        raise CorpusError(
            f"with weights {', '.join(map('{:g}'.format, weights))}, an epoch would have {unit * sum(weights):,.0f} "
            f"pairs, but the corpora have {sum(sizes):,}; weights are shares of the pairs, whatever the sizes: "
            "give numbers that differ less"
        )
    return [round(weight * unit) for weight in weights]


def mixed(parts: Sequence[Dataset | IterableDataset], weights: Sequence[float], seed: int) -> Dataset | IterableDataset:
    """Mixes corpora so that each has the share of the pairs that its weight is of all weights; without any, joins them.

    A data set has `counts_per_epoch` of each, the same in every epoch: complete copies, and pairs that the seed draws,
    each once, for what is left. Of a stream, each pair's corpus is drawn; one that ends begins again, until all have
    ended.
    """
    if not weights:
        return joined(parts)
    if isinstance(parts[0], IterableDataset):
        shares = [weight / sum(weights) for weight in weights]
        return interleave_datasets(list(parts), shares, seed=seed, stopping_strategy="all_exhausted")
    random, repeated = np.random.default_rng(seed), []
    for part, count in zip(parts, counts_per_epoch([len(one) for one in parts], weights), strict=True):
        copies, left = divmod(count, len(part))
        rows = [np.tile(np.arange(len(part)), copies), random.choice(len(part), left, replace=False)]
        repeated.append(part.select(np.concatenate(rows)))
    return concatenate_datasets(repeated)


def state_of(corpus: Corpus, pairs: Dataset | IterableDataset) -> str:
    """Returns a fingerprint of a corpus's content, wherever its files are.

    It is datasets' fingerprint of the pairs. Of a stream, whose files may be too large to be read twice, it is made of
    their sizes and modification times, and of the commits of data sets on the Hub.
    """
    if isinstance(pairs, Dataset):
        return str(pairs._fingerprint)
    facts: list[object] = []
    for name in (*corpus.source, *corpus.target, *corpus.tables):
        inside = sorted(path for path in Path(name).rglob("*") if path.is_file())  # a data set in a folder
        statuses = [path.stat() for path in (inside or [Path(name)]) if path.exists()]
        facts.append([(one.st_size, one.st_mtime_ns) for one in statuses] or revision_of(name, "dataset"))
    return str(Hasher.hash(facts))


def tokenize(
    pairs: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, cleaning: Cleaning
) -> Dataset | IterableDataset:
    """Tokenizes "source" into "input_ids" and "target" into "labels", and leaves out pairs as `cleaning` says.

    datasets caches the token ids: the same pairs are not tokenized twice by the same tokenizer.

    The counts of `cleaning` are increased. For a stream this happens while it is read, in the process that reads it; a
    warning has the counts every `PAIRS_PER_REPORT` pairs. A `CorpusError` says that no pair is left.
    """

    def encode(batch: Mapping[str, list[str]]) -> dict[str, list[list[int]]]:
        # White space alone has tokens, and is as empty as no text.
        sources, targets = ([text if text.strip() else "" for text in batch[side]] for side in ("source", "target"))
        encoded = tokenizer(sources, text_target=targets, verbose=False)
        return {"input_ids": encoded["input_ids"], "labels": encoded["labels"]}

    nothing = encode({"source": [""], "target": [""]})
    empty = len(nothing["input_ids"][0]), len(nothing["labels"][0])

    def encode_and_clean(batch: Mapping[str, list[str]]) -> dict[str, list[list[int]]]:
        columns, before = encode(batch), cleaning.seen
        source, target = (np.array([len(ids) for ids in columns[name]]) for name in ("input_ids", "labels"))
        stays = cleaning.keeps(source, target, empty)
        if cleaning.seen // PAIRS_PER_REPORT > before // PAIRS_PER_REPORT:
            logger.warning("Training data, as far as this process has read the stream: %s", cleaning)
        return {name: [ids for ids, keep in zip(rows, stays, strict=True) if keep] for name, rows in columns.items()}

    if isinstance(pairs, IterableDataset):
        return pairs.map(encode_and_clean, batched=True, remove_columns=pairs.column_names or ["source", "target"])
    encoded = pairs.map(
        encode,
        batched=True,
        num_proc=os.cpu_count() if len(pairs) > PAIRS_PER_PROCESS else None,  # the tokenizer uses all cores too
        new_fingerprint=_fingerprint(pairs, tokenizer),
        desc="Tokenizing",
    )
    stays = cleaning.keeps(lengths_of(encoded, "input_ids"), lengths_of(encoded, "labels"), empty)
    if not stays.any():
        raise CorpusError(f"no sentence pair is left of {len(pairs):,}: {cleaning}")
    return encoded if stays.all() else encoded.select(np.flatnonzero(stays))


def lengths_of(dataset: Dataset, column: str) -> NDArray[np.int64]:
    """Returns the length of each row in a column of lists, (N,), without turning the rows into Python lists."""
    table = dataset.select_columns([column]).with_format("arrow")[:]
    return np.asarray(pyarrow.compute.list_value_length(table[column]).to_numpy(), dtype=np.int64)


def rows_with(dataset: Dataset, column: str, number: int) -> NDArray[np.int64]:
    """Returns the places of the rows whose lists in a column contain a number."""
    values = dataset.select_columns([column]).with_format("arrow")[:][column].combine_chunks()
    found = np.flatnonzero(values.flatten().to_numpy() == number)
    ends = np.cumsum(lengths_of(dataset, column))
    return np.unique(np.searchsorted(ends, found, side="right"))


def _from_files(columns: tuple[str, ...], sources: list[tuple[str, ...]], streaming: bool) -> Dataset | IterableDataset:
    arguments = {"sources": sources, "columns": columns}
    if streaming:
        return IterableDataset.from_generator(_read_sources, gen_kwargs=arguments)
    # datasets' cache key: the content and how it is read, wherever the files are.
    fingerprint = Hasher.hash((columns, [[(table_format(path), _digest(path)) for path in paths] for paths in sources]))
    try:
        return Dataset.from_generator(_read_sources, gen_kwargs=arguments, fingerprint=fingerprint)
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, CorpusError):
            raise error.__cause__ from None
        raise


def _digest(path: str) -> str:
    try:
        return digest_of(path)
    except OSError as error:
        raise CorpusError(f"{path}: can't be read ({error.strerror or error}); name a readable file") from error


def _read_sources(sources: list[tuple[str, ...]], columns: tuple[str, ...]) -> Iterator[Pair]:
    for paths in sources:
        empty = True
        for pair in read_text(*paths) if len(paths) == 2 else read_table(paths[0], columns):
            empty = False
            yield pair
        if empty:
            raise CorpusError(f"{paths[0]}: contains no sentence pair; is it the right file?")


def _from_hub(corpus: Corpus, name: str, streaming: bool) -> Dataset | IterableDataset:
    """A data set that `datasets.load_dataset` loads, with the columns renamed."""
    columns = corpus.columns
    try:
        dataset = load_dataset(name, corpus.configuration, split=corpus.split, streaming=streaming)
        names = dataset.column_names or list(next(iter(dataset), {}))
    except Exception as error:  # its reader and the network raise errors of many kinds
        # For some errors, datasets' message only says that there was one.
        cause = (error.__cause__ if isinstance(error, DatasetGenerationError) else None) or error
        raise CorpusError(f"{name}: can't be loaded ({first_line(cause)}); name a data set on the Hub") from error
    if not names or (isinstance(dataset, Dataset) and not len(dataset)):
        raise CorpusError(f"{name}: its split {corpus.split!r} contains no sentence pair")

    def to_pairs(batch: Mapping[str, list[object]], places: list[int]) -> dict[str, list[str]]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        pairs = [pair_of(row, columns, f"{name}, row {place + 1}") for place, row in zip(places, rows, strict=True)]
        return {side: [pair[side] for pair in pairs] for side in ("source", "target")}

    options: dict[str, object] = {"batched": True, "with_indices": True, "remove_columns": names}
    if isinstance(dataset, Dataset):
        options["new_fingerprint"] = Hasher.hash((dataset._fingerprint, columns))
    return dataset.map(to_pairs, **options)


def _fingerprint(pairs: Dataset, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The cache key of the token ids: the pairs and what the tokenizer computes.

    datasets would include where the tokenizer was loaded from, so that a process that loads what another one has just
    trained would tokenize again. None: datasets makes the key, as for any other tokenizer.
    """
    if type(tokenizer) is not VanillaTransformerTokenizerFast:
        return None
    if tokenizer.backend_tokenizer.model.dropout:  # each call segments in another way
        return generate_random_fingerprint()
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content |= {"padding": None, "truncation": None}  # left over from its last call
    return Hasher.hash(("without white space", pairs._fingerprint, content, tokenizer.split_special_tokens))


__all__ = ["Cleaning", "Corpus", "read_corpus", "tokenize"]
