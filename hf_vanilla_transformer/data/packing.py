"""Sentence pairs packed one behind the other into rows of one shape, in place of sentences with padding.

A packed batch has R rows of S source and T target positions. The pairs of a row are numbered from 1, with one number on
both sides; what is left at the row's end is filler, with number 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from .batching import BatchingError, Lengths, TokenBudgetBatchSampler

ROW_TOKENS = 1024  # 1% of the positions is filler with Multi30k's lengths, 3% where sentences are twice as long
OPEN_ROWS = 8  # that may still be filled; more change nothing


class PackedShape(NamedTuple):
    """Rows of a batch, and source and target positions of a row."""

    rows: int
    source: int
    target: int

    @classmethod
    def within(cls, max_tokens: int, row_tokens: int = ROW_TOKENS, ratio: float = 1.0) -> "PackedShape":
        """Divides at most `max_tokens` of either side into rows; `ratio` is that of source to target tokens."""
        longer = min(max_tokens, row_tokens)
        source, target = (min(math.ceil(longer * part / 8) * 8, longer) for part in (min(ratio, 1), min(1 / ratio, 1)))
        return cls(max_tokens // longer, source, target)


class PackedBatchSampler(TokenBudgetBatchSampler):
    """Batches of sentence pairs that fit into rows of one shape, reshuffled in each epoch.

    Every epoch puts the same lengths together in a row, so that it has the same number of batches; which of the pairs
    of these lengths they are, and which rows make up a batch, is drawn anew. Processes share the batches as those of
    TokenBudgetBatchSampler.

    Args:
        source_lengths: Tokens of each source sentence, (N,).
        target_lengths: Tokens of each target sentence, (N,).
        shape: The largest that a batch may have.
        **kwargs: Of TokenBudgetBatchSampler.

    Attributes:
        shape: Of all batches; it has no more rows than they need.

    Raises:
        BatchingError: There are too few pairs for that many batches, or a sentence is longer than a row.
    """

    def __init__(self, source_lengths: Lengths, target_lengths: Lengths, shape: PackedShape, **kwargs: Any) -> None:
        self.shape = shape
        super().__init__(source_lengths, target_lengths, shape.rows * max(shape[1:]), **kwargs)

    def _plan(self, multiple: int) -> None:
        source, target, shape = self.source_lengths, self.target_lengths, self.shape
        order = np.random.default_rng(self.seed).permutation(len(source))
        rows = _first_fit(source[order], target[order], shape)
        self._count = self._rounded(-(-len(rows) // shape.rows), multiple)
        while len(rows) < self._count:
            largest = max(rows, key=len)
            rows.append([largest.pop() for _ in range(len(largest) // 2)])
        self.shape = shape._replace(rows=-(-len(rows) // self._count))
        self._places = order[np.concatenate(rows)]  # for each place in the rows, a pair of the lengths it is made for
        self._ends = np.cumsum([len(row) for row in rows])
        positions = self._count * self.shape.rows * sum(self.shape[1:])
        self.padding_waste = 1 - (source.sum() + target.sum()) / positions

    def _batches(self, random: np.random.Generator) -> list[Lengths]:
        source, target, places = self.source_lengths, self.target_lengths, self._places
        pairs = np.empty_like(places)
        # Sorted by length, the n-th pair has the lengths of the n-th place.
        pairs[np.lexsort((source[places], target[places]))] = np.lexsort((random.random(len(pairs)), source, target))
        rows = np.split(pairs, self._ends[:-1])
        parts = np.array_split(random.permutation(len(rows)), self._count)
        return [np.concatenate([rows[row] for row in part]) for part in parts]


def _first_fit(source: Lengths, target: Lengths, shape: PackedShape) -> list[list[int]]:
    """Puts pairs, in their order, into the first of the open rows with room for both sides; returns each row's."""
    for lengths, room in ((source, shape.source), (target, shape.target)):
        if lengths.min(initial=1) < 1 or lengths.max(initial=0) > room:
            raise BatchingError(
                f"sentences have {lengths.min()} to {lengths.max()} tokens, but a packed row takes 1 to {room}; leave "
                "others out (`max_length`), or train without packing"
            )
    rows: list[list[int]] = []
    opened: list[list[int]] = []  # number of the row, and its room on each side
    for pair, (s, t) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        row = next((row for row in opened if s <= row[1] and t <= row[2]), None)
        if row is None:
            row = [len(rows), *shape[1:]]
            rows.append([])
            opened.append(row)
        rows[row[0]].append(pair)
        row[1:] = row[1] - s, row[2] - t
        if len(opened) > OPEN_ROWS:
            opened.remove(min(opened, key=lambda row: min(row[1:])))
    return rows


@dataclass(frozen=True)
class PackingCollator:
    """Packs pairs into rows, in their order: each into the row of the last one, or the next where that is full.

    Attributes:
        shape: Of every batch.
        pad: The token of filler.
        start: The token that targets begin with.
    """

    shape: PackedShape
    pad: int
    start: int

    @classmethod
    def of(cls, config: VanillaTransformerConfig, shape: PackedShape) -> "PackingCollator":
        """Takes the tokens of a model's configuration.

        Raises:
            ValueError: It has no such tokens.
        """
        if config.pad_token_id is None or config.decoder_start_token_id is None:
            raise ValueError("packing needs `pad_token_id` and `decoder_start_token_id` in the model's configuration")
        return cls(shape, config.pad_token_id, config.decoder_start_token_id)

    def __call__(self, pairs: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Packs pairs of `input_ids` and `labels`.

        Returns:
            `input_ids` and, as `encoder_attention_mask`, the numbers of their pairs, (R, S); `decoder_input_ids`, their
            numbers `decoder_attention_mask`, and `labels` with -100 for filler, (R, T).

        Raises:
            BatchingError: The pairs don't fit into the rows.
            ValueError: A side of a pair is empty.
        """
        most, width, target_width = self.shape
        fill = {"input_ids": (width, self.pad), "encoder_attention_mask": (width, 0), "labels": (target_width, -100)}
        fill |= {"decoder_input_ids": (target_width, self.pad), "decoder_attention_mask": (target_width, 0)}
        rows: list[dict[str, list[int]]] = []
        s = t = number = 0  # tokens in the last row, and its pairs
        for pair in pairs:
            source, target = list(pair["input_ids"]), list(pair["labels"])
            if not (source and target):
                raise ValueError("a pair with an empty side can't be packed; leave it out")
            if not rows or s + len(source) > width or t + len(target) > target_width:
                rows.append({name: [] for name in fill})
                s = t = number = 0
            s, t, number = s + len(source), t + len(target), number + 1
            before = [self.pad if label == -100 else label for label in target[:-1]]
            rows[-1]["input_ids"] += source
            rows[-1]["encoder_attention_mask"] += [number] * len(source)
            rows[-1]["decoder_input_ids"] += [self.start, *before]
            rows[-1]["decoder_attention_mask"] += [number] * len(target)
            rows[-1]["labels"] += target
        if len(rows) > most or any(len(row[name]) > size for row in rows for name, (size, _) in fill.items()):
            raise BatchingError(
                f"{len(pairs)} pairs don't fit into {most} rows of {width} source and {target_width} target tokens; "
                "make smaller batches, more rows or longer ones"
            )
        rows += [{name: [] for name in fill}] * (most - len(rows))
        return {
            name: torch.tensor([row[name] + [filler] * (size - len(row[name])) for row in rows])
            for name, (size, filler) in fill.items()
        }
