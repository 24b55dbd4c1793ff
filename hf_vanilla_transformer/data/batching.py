"""Batches of approximately equal numbers of tokens (section 5.1): sentences of similar length, with little padding.

A batch is bounded by its padded tokens, on the source side and on the target side alike: with a budget of 4,096 it has
up to 4,096 source tokens and up to 4,096 target tokens, padding included.
"""

import copy
from collections.abc import Iterator
from itertools import count, islice

import numpy as np
from datasets import IterableDataset as Stream
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, Sampler, get_worker_info

Lengths = NDArray[np.int64]
Example = dict[str, list[int]]  # with "input_ids" and "labels"


class BatchingError(ValueError):
    """The sentences can't be batched so; the message says why and names the fix."""


class TokenBudgetBatchSampler(Sampler[list[int]]):
    """Batches of sentence pairs within a budget of tokens, reshuffled in each epoch.

    All processes make the same plan and take turns: of n processes, process r takes the batches r, r + n, r + 2n ...
    The number of batches is a multiple of n times the accumulation steps, so that all processes have the same number of
    batches and every update has all of its batches. The plan depends on that product alone: two processes train on the
    same updates as one process that accumulates twice as many batches.

    With a `length_tolerance` of 0.25, sentences of 8 and 9 tokens are as if they were equal, those of 10 and 11, of 12
    to 14 ... More is padded, and each batch has more kinds of sentences. `padding_waste` is the part of the first
    epoch's tokens that is padding.

    Raises:
        BatchingError: There are too few sentences for that many batches, or one is longer than the budget.
    """

    def __init__(
        self,
        source_lengths: Lengths,  # tokens of each source sentence, (N,)
        target_lengths: Lengths,
        max_tokens: int,  # padded ones per batch, on either side
        *,
        num_processes: int = 1,  # that share the batches
        process_index: int = 0,
        accumulation_steps: int = 1,  # batches of each process per update
        length_tolerance: float = 0.0,  # how far lengths are rounded before sentences are sorted by them
        seed: int = 0,  # of the order; with the epoch's number it determines every batch
    ) -> None:
        self.source_lengths, self.target_lengths = np.asarray(source_lengths), np.asarray(target_lengths)
        self._source_keys = _rounded_up(self.source_lengths, length_tolerance)
        self._target_keys = _rounded_up(self.target_lengths, length_tolerance)
        self.max_tokens, self.seed, self.epoch = max_tokens, seed, 0
        self.num_processes, self.process_index = num_processes, process_index
        self._plan(num_processes * accumulation_steps)

    def _plan(self, multiple: int) -> None:
        order = self._by_length(np.random.default_rng([self.seed, 0]))
        ends = _ends(self._source_keys[order], self._target_keys[order], self.max_tokens)  # which all epochs keep
        self._count = self._rounded(len(ends), multiple)
        self._ends = split_largest(ends, multiple)
        padded = _padded_tokens(self.source_lengths[order], self.target_lengths[order], self._ends)
        self.padding_waste: float = 1 - (self.source_lengths.sum() + self.target_lengths.sum()) / padded

    def _rounded(self, count: int, multiple: int) -> int:
        """Rounds a number of batches up to a multiple, if there are enough pairs."""
        rounded, pairs, processes = -(-count // multiple) * multiple, len(self.source_lengths), self.num_processes
        if rounded > pairs:
            raise BatchingError(
                f"{pairs} sentence pairs are too few for {processes} processes with {multiple // processes} batches "
                "each per update; use fewer processes or batches, more tokens per batch or more data"
            )
        return rounded

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, from 0, whose order the next iteration has."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._count // self.num_processes

    def __iter__(self) -> Iterator[list[int]]:
        random = np.random.default_rng([self.seed, self.epoch])
        batches = self._batches(random)
        for batch in random.permutation(len(batches))[self.process_index :: self.num_processes]:
            yield batches[batch].tolist()

    def _batches(self, random: np.random.Generator) -> list[Lengths]:
        return np.split(self._by_length(random), self._ends[:-1])

    def _by_length(self, random: np.random.Generator) -> Lengths:
        """Indices of the pairs by rounded target length, then source length; equal ones in random order, (N,).

        The source lengths rise and fall alternately, so that a batch that spans two target lengths doesn't combine long
        and short sources: on Multi30k this removes a third of the padding.
        """
        turn = np.where(self._target_keys % 2, self._source_keys, -self._source_keys)
        return np.lexsort((random.random(len(turn)), turn, self._target_keys))


class TokenBudgetStream(IterableDataset[list[Example]]):
    """Endless batches within a budget of tokens, from a dataset that is read as a stream.

    Every process needs its own part of the stream (`datasets.distributed.split_dataset_by_node`); data loader workers
    split it among themselves. After its last example the stream starts again, in another order, so that no process runs
    out of batches before the others.

    Raises:
        ValueError: While iterating: the stream has no example, or one is longer than the budget.
    """

    def __init__(
        self,
        dataset: Stream,  # of examples, in an order that `set_epoch` changes
        max_tokens: int,  # padded ones per batch, on either side
        window: int,  # examples held in memory and sorted into batches
        *,
        length_tolerance: float = 0.0,  # how far lengths are rounded before examples are sorted by them
        seed: int = 0,  # of the order of the batches
    ) -> None:
        self.dataset, self.max_tokens, self.window = dataset, max_tokens, window
        self.length_tolerance, self.seed = length_tolerance, seed

    def __iter__(self) -> Iterator[list[Example]]:
        # A copy, because workers share the epoch's number in memory, but are not in the same epoch.
        dataset = copy.deepcopy(self.dataset)
        numbers = count()
        for epoch in count():
            dataset.set_epoch(epoch)
            examples, empty = iter(dataset), True
            while window := list(islice(examples, self.window)):
                empty = False
                yield from self._batches(window, next(numbers))
            if empty:
                worker = get_worker_info()
                if worker is not None and worker.id > 0:
                    return  # there are more workers than files
                raise ValueError("the stream has no sentence pair for this process; were all of them left out?")

    def _batches(self, window: list[Example], number: int) -> Iterator[list[Example]]:
        source = np.array([len(example["input_ids"]) for example in window])
        target = np.array([len(example["labels"]) for example in window])
        sampler = TokenBudgetBatchSampler(
            source, target, self.max_tokens, length_tolerance=self.length_tolerance, seed=self.seed
        )
        sampler.set_epoch(number)  # each window of each pass has its own order
        for batch in sampler:
            yield [window[place] for place in batch]


def _rounded_up(lengths: Lengths, tolerance: float) -> Lengths:
    """Rounds lengths, (N,), up to the longest of those that are up to `tolerance` longer than one another."""
    if not tolerance or not len(lengths):
        return lengths
    bucket = np.floor(np.log(np.maximum(lengths, 1)) / np.log1p(tolerance)).astype(np.int64)
    longest = np.zeros(bucket.max() + 1, dtype=np.int64)
    np.maximum.at(longest, bucket, lengths)
    return longest[bucket]


def _ends(source: Lengths, target: Lengths, max_tokens: int) -> Lengths:
    """Returns the end of each batch if sentences are taken in order until the budget is full, (batches,)."""
    longest = np.maximum(source, target)
    if len(longest) and longest.max() > max_tokens:
        raise BatchingError(
            f"a sentence of {longest.max()} tokens is longer than a batch of {max_tokens} tokens; raise the tokens per "
            "batch, or leave out long sentences (`max_length`)"
        )
    ends, start, width = [], 0, 0
    for place, length in enumerate(longest.tolist()):
        width = max(width, length)
        if (place - start + 1) * width > max_tokens:
            ends.append(place)
            start, width = place, length
    return np.array([*ends, len(longest)])


def split_largest(ends: Lengths, multiple: int) -> Lengths:
    """Splits the batches with the most sentences in two until the number of batches is a multiple of `multiple`."""
    bounds = [0, *ends.tolist()]
    while (len(bounds) - 1) % multiple:
        largest = int(np.argmax(np.diff(bounds)))
        bounds.insert(largest + 1, (bounds[largest] + bounds[largest + 1]) // 2)
    return np.array(bounds[1:])


def _padded_tokens(source: Lengths, target: Lengths, ends: Lengths) -> int:
    starts = np.concatenate([[0], ends[:-1]])
    width = np.maximum.reduceat(source, starts) + np.maximum.reduceat(target, starts)
    return int(((ends - starts) * width).sum())
