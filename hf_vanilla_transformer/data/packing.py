"""Pairs of sentences packed one behind the other into rows of one shape, in place of padding.

A packed batch has R rows of S source and T target positions. The pairs of a row are numbered from 1; what is left at
its end is filler, with number 0.
"""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .batching import BatchingError, Example, Lengths, TokenBudgetBatchSampler, split_largest

ROW_TOKENS = 1024  # 1% of the positions is filler with Multi30k's lengths, 3% where sentences are twice as long
OPEN_ROWS = 8  # that may still be filled; more change nothing


class PackedBatchSampler(TokenBudgetBatchSampler):
    """Batches of pairs that fit into rows of one shape, reshuffled in each epoch.

    Each epoch puts the same lengths together in a row, so that it has the same number of batches. Which of the pairs of
    these lengths they are, and which rows make up a batch, is drawn again. Arguments are those of
    TokenBudgetBatchSampler, and the most tokens of a row; `shape` is that of all batches.
    """

    def __init__(self, *args: Any, row_tokens: int = ROW_TOKENS, **kwargs: Any) -> None:
        self.row_tokens = row_tokens
        super().__init__(*args, **kwargs)

    def _plan(self, multiple: int) -> None:
        source, target = self.source_lengths, self.target_lengths
        longer, most = min(self.max_tokens, self.row_tokens), max(source.sum(), target.sum(), 1)
        shares = (max(math.ceil(longer * side.sum() / most / 8) * 8, side.max(initial=0)) for side in (source, target))
        widths = [min(int(share), longer) for share in shares]
        order = np.random.default_rng(self.seed).permutation(len(source))
        rows = _first_fit(source[order], target[order], *widths)
        self._places = order[np.concatenate(rows)]  # for each place in the rows, a pair of the lengths it is made for
        self._count = self._rounded(-(-len(rows) // (self.max_tokens // longer)), multiple)
        ends = np.cumsum([len(row) for row in rows])
        self._ends = split_largest(ends, multiple) if len(ends) < self._count else ends
        self.shape = (-(-len(self._ends) // self._count), widths[0], widths[1])
        self.padding_waste = 1 - (source.sum() + target.sum()) / (self._count * self.shape[0] * sum(widths))

    def _batches(self, random: np.random.Generator) -> list[Lengths]:
        source, target, places = self.source_lengths, self.target_lengths, self._places
        pairs = np.empty_like(places)
        # Sorted by length, the n-th pair has the lengths of the n-th place.
        pairs[np.lexsort((source[places], target[places]))] = np.lexsort((random.random(len(pairs)), source, target))
        rows = np.split(pairs, self._ends[:-1])
        parts = np.array_split(random.permutation(len(rows)), self._count)
        return [np.concatenate([rows[row] for row in part]) for part in parts]


def _first_fit(source: Lengths, target: Lengths, width: int, target_width: int) -> list[list[int]]:
    """Puts pairs, in their order, into the first of the open rows with room for both sides; returns each row's."""
    for lengths, room in ((source, width), (target, target_width)):
        if lengths.min(initial=1) < 1 or lengths.max(initial=0) > room:
            raise BatchingError(
                f"sentences have {lengths.min()} to {lengths.max()} tokens, but a packed row takes 1 to {room}; leave "
                "others out (`max_length`), or train without packing"
            )
    rows: list[list[int]] = []
    opened: list[tuple[list[int], list[int]]] = []  # the room on each side, and the row
    for pair, (s, t) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        fitting = next((one for one in opened if s <= one[0][0] and t <= one[0][1]), None)
        if fitting is None:
            rows.append([])
            fitting = [width, target_width], rows[-1]
            opened = [*opened[1 - OPEN_ROWS :], fitting]
        left, row = fitting
        left[:] = left[0] - s, left[1] - t
        row.append(pair)
    return rows


class PackingCollator:
    """Packs pairs into rows, in their order: each into the row of the last one, or the next where that is full.

    Of the model's `config`, `pad_token_id` is filler, and targets start with `decoder_start_token_id`; `shape` is the
    number of a batch's rows, and the source and target positions of a row.
    """

    def __init__(self, config: PreTrainedConfig, shape: tuple[int, int, int]) -> None:
        self.shape, self.pad, self.start = shape, config.pad_token_id, config.decoder_start_token_id

    def __call__(self, pairs: Sequence[Example]) -> dict[str, Tensor]:
        """Packs pairs of `input_ids` and `labels`.

        Returns:
            `input_ids` and, as `encoder_attention_mask`, the numbers of their pairs, (R, S); `decoder_input_ids`, their
            numbers `decoder_attention_mask`, and `labels` with -100 for filler, (R, T).

        Raises:
            BatchingError: The pairs don't fit into the rows, or have an empty side.
        """
        most, width, target_width = self.shape
        rows: list[list[tuple[list[int], list[int]]]] = []
        s, t = width, target_width  # tokens in the last row: there is none yet
        for pair in pairs:
            source, target = list(pair["input_ids"]), list(pair["labels"])
            if not (source and target):
                raise BatchingError("a pair with an empty side can't be packed; leave it out")
            if s + len(source) > width or t + len(target) > target_width:
                rows.append([])
                s = t = 0
            s, t = s + len(source), t + len(target)
            rows[-1].append((source, target))
            if s > width or t > target_width or len(rows) > most:
                raise BatchingError(
                    f"{len(pairs)} pairs don't fit into {most} rows of {width} source and {target_width} target "
                    "tokens; make smaller batches, or more or longer rows"
                )
        rows += [[]] * (most - len(rows))

        def filled(ids_of: Callable[..., list[int]], size: int, filler: int) -> Tensor:
            flat = [list(chain.from_iterable(ids_of(n, *pair) for n, pair in enumerate(row, 1))) for row in rows]
            return torch.tensor([ids + [filler] * (size - len(ids)) for ids in flat])

        before = filled(lambda n, source, target: [self.start, *target[:-1]], target_width, self.pad)
        return {
            "input_ids": filled(lambda n, source, target: source, width, self.pad),
            "encoder_attention_mask": filled(lambda n, source, target: [n] * len(source), width, 0),
            "decoder_input_ids": before.masked_fill(before == -100, self.pad),
            "decoder_attention_mask": filled(lambda n, source, target: [n] * len(target), target_width, 0),
            "labels": filled(lambda n, source, target: target, target_width, -100),
        }
