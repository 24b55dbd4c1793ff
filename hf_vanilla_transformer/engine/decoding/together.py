"""Searches of several batches at once: the last sentences of a batch take their steps with the next batch.

A batch's sentences end at different steps. A step for the few that are left takes almost as long as one for many, as
all weights are read for it. So the next batch begins when many of the former ones' sentences have ended, and the matrix
products of a step are those of all rows.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from ...generation_vanilla_transformer import DecodingMixin
from .incremental import IncrementalDecoder, step_together
from .search import Search, run

Item = TypeVar("Item")
_thread = threading.local()


class Postponed:
    """What `generate()` returns inside of `together`: a search that has yielded its first tokens.

    Args:
        search: It returns what `generate()` would have.
        decoder: Its decoder.
    """

    def __init__(self, search: Search[Any], decoder: IncrementalDecoder) -> None:
        self.search, self.decoder, self.tokens = search, decoder, next(search)


def run_or_postpone(search: Search[Any], decoder: Any) -> Any:
    """Runs a search with its decoder, or returns it as `Postponed` where `together` has asked for that.

    A decoder joins others if its steps are those of `step_together`: it is an `IncrementalDecoder`, not a subclass, and
    its attention isn't folded.
    """
    if not getattr(_thread, "is_postponing", False) or type(decoder) is not IncrementalDecoder or decoder.folded:
        return run(search, decoder)
    return Postponed(search, decoder)


def together(model: Any, generate: Callable[[Item], Any], items: Iterable[Item]) -> Iterator[tuple[Item, Any]]:
    """Calls a function for each item, in order; the engine's searches in it are run together.

    Args:
        model: The model; one whose class or user has a `generate()` of their own runs each search by itself.
        generate: Returns what one call of `model.generate()` returns, as it is.
        items: Its arguments.

    Yields:
        Item and result, when it is complete, which need not be in the items' order.
    """
    running: list[tuple[Item, Postponed]] = []
    is_ours = getattr(type(model), "generate", None) is DecodingMixin.generate and "generate" not in vars(model)
    for item in items:
        _thread.is_postponing = is_ours
        try:
            output = generate(item)
        finally:
            _thread.is_postponing = False
        if not isinstance(output, Postponed):
            yield item, output
            continue
        if running and output.decoder.weights is not running[0][1].decoder.weights:  # they have changed since
            yield from _finish(running, 0)
        running.append((item, output))
        yield from _finish(running, output.decoder.num_sentences // 2)
    yield from _finish(running, 0)


def _finish(running: list[tuple[Item, Postponed]], enough: int) -> Iterator[tuple[Item, Any]]:
    """Takes steps until no more than `enough` sentences are left; removes and yields what is complete."""
    while sum(one.decoder.num_sentences for _, one in running) > enough:
        complete = _step([one for _, one in running])
        for number in sorted(complete, reverse=True):
            item, _ = running.pop(number)
            yield item, complete[number]


@torch.no_grad()
def _step(searches: list[Postponed]) -> dict[int, Any]:
    """Takes a step of each search; returns the results of those at their end, by their number."""
    complete = {}
    logits = step_together([one.decoder for one in searches], [one.tokens for one in searches])
    for number, (one, own) in enumerate(zip(searches, logits, strict=True)):
        try:
            one.tokens = one.search.send(own)
        except StopIteration as end:
            complete[number] = end.value
    return complete
