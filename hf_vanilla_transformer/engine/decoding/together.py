"""Searches of several batches at once: the last sentences of a batch take their steps with the next batch.

A batch's sentences end at different steps. A step for the few that are left takes almost as long as one for many, as
all weights are read for it. So the next batch begins when many of the former ones' sentences have ended, and the matrix
products of a step are those of all rows.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from .generate import Begun, Output
from .incremental import IncrementalDecoder, step_together

Item = TypeVar("Item")


def run_together(begin: Callable[[Item], Begun | Output], items: Iterable[Item]) -> Iterator[tuple[Item, Output]]:
    """Begins a search for each item, in order, and runs them together.

    Args:
        begin: Returns what `Engine.begin` does.
        items: Its arguments. The next one is taken when many sentences of the former ones have ended.

    Yields:
        Item and what `generate()` returns, as soon as it is complete, in any order.
    """
    running: list[tuple[Item, Begun]] = []
    for item in items:
        begun = begin(item)
        if not isinstance(begun, Begun):
            yield item, begun
        elif not isinstance(begun.decoder, IncrementalDecoder) or begun.decoder.folded:
            yield item, begun.run()  # an ensemble or folded attention can't step together with others
        else:
            running.append((item, begun))
            yield from _finish(running, begun.decoder.num_sentences // 2)
    yield from _finish(running, 0)


def _finish(running: list[tuple[Item, Begun]], enough: int) -> Iterator[tuple[Item, Output]]:
    """Takes steps until no more than `enough` sentences are left; removes and yields complete ones."""
    while sum(one.decoder.num_sentences for _, one in running) > enough:
        complete = _step([one for _, one in running])
        for number in sorted(complete, reverse=True):
            item, _ = running.pop(number)
            yield item, complete[number]


@torch.no_grad()
def _step(searches: list[Begun]) -> dict[int, Output]:
    """Takes a step of each search; returns the results of those at their end, by their number."""
    complete = {}
    logits = step_together([one.decoder for one in searches], [one.tokens for one in searches])
    for number, (one, own) in enumerate(zip(searches, logits, strict=True)):
        try:
            one.tokens = one.search.send(own)
        except StopIteration as end:
            complete[number] = end.value
    return complete
