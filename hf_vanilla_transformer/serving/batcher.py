"""Dynamic batching: texts of many requests, each in pieces, share the batches of one model."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from ..documents.links import Linked, join_linked
from ..translation.reading import Piece

# Source tokens of a batch. More fill the cores no better, and everything in a batch waits for its longest text.
BATCH_TOKENS = 1_024
# Source tokens that may wait: some ten seconds of a base-size model on two cores.
MAX_WAITING_TOKENS = 20_000
# After a batch of several texts, the next one waits this long for as many: clients that have just got an answer.
SECONDS_TO_GATHER = 0.004
# Characters of a request from which its texts are divided in a thread, so that other requests go on meanwhile.
MANY_CHARACTERS = 2_000

Model = Callable[[list[str], int, str, str, bool], list[list[Linked]]]
"""Translates pieces of texts, by a `BatchKey`; for each, it returns `n_best` translations, the best first."""


class QueueFullError(Exception):
    """More waits than can be translated soon."""


class BatchKey(NamedTuple):
    """What the pieces of a batch have in common: the arguments of their requests."""

    n_best: int
    source: str
    target: str
    linked: bool


@dataclass(eq=False)
class _Request:
    pieces: Sequence[Piece]
    key: BatchKey
    done: "asyncio.Future[None]"
    waiting: deque[int] = field(default_factory=deque)  # numbers of pieces
    results: dict[int, list[Linked]] = field(default_factory=dict)

    def tokens(self, number: int) -> int:
        return self.key.n_best * self.pieces[number].num_tokens

    @property
    def waiting_tokens(self) -> int:
        return sum(map(self.tokens, self.waiting))


class Batcher:
    """Gathers waiting texts into batches for one model, which a thread of its own translates.

    An idle model begins at once. While it works, requests gather, and the next batch takes a piece of each in turn, so
    that long texts and requests of many texts don't hold up short ones. After a batch of several pieces, the next one
    waits for as many, a few milliseconds at most. A cancelled request leaves the queue.

    Load the model in the given `thread`, and let all models of a process share it: PyTorch has a thread pool for each
    thread that computes, and they contend for the cores.
    """

    def __init__(
        self,
        translate: Model,
        divide: Callable[[str, str], list[Piece]],  # a text in the given language, into pieces
        *,
        batch_tokens: int = BATCH_TOKENS,  # source tokens; a longer piece is a batch by itself
        max_waiting_tokens: int = MAX_WAITING_TOKENS,  # each request counts for at most half of them
        on_batch: Callable[[int, int], object] = lambda texts, tokens: None,  # with numbers of pieces and tokens
        thread: Executor | None = None,  # None: one of its own
    ) -> None:
        self._translate, self._divide = translate, divide
        self._batch_tokens, self._max_waiting_tokens, self._on_batch = batch_tokens, max_waiting_tokens, on_batch
        self._requests: list[_Request] = []  # those without an answer, the oldest first
        self._work: asyncio.Task[None] | None = None
        self._expected, self._gathered = 1, asyncio.Event()
        self._thread = thread or ThreadPoolExecutor(1)

    @property
    def waiting_tokens(self) -> int:
        """Source tokens that wait for a batch."""
        return sum(request.waiting_tokens for request in self._requests)

    async def translate(
        self, texts: Sequence[str], n_best: int = 1, *, source: str = "", target: str = "", linked: bool = False
    ) -> list[list[Linked]]:
        """Translates the texts of one request; raises `QueueFullError`, or what the model raised for one of the pieces.

        Returns each text's `n_best` translations, the best first; with `linked`, they are linked with their sources by
        the model's attention. Of a text in several pieces, each joins the pieces' translations of its rank, or the last
        ones that there are.
        """

        def divide() -> list[list[Piece]]:
            return [self._divide(text, source) for text in texts]

        divided = await asyncio.to_thread(divide) if sum(map(len, texts)) > MANY_CHARACTERS else divide()
        if not (pieces := [piece for some in divided for piece in some]):
            return [[join_linked([], [])] for _ in texts]
        key, done = BatchKey(n_best, source, target, linked), asyncio.get_running_loop().create_future()
        request = _Request(pieces, key, done, deque(range(len(pieces))))
        # A request counts for at most half of the limit, so that a long one doesn't keep out short ones.
        counted = (min(one.waiting_tokens, self._max_waiting_tokens // 2) for one in [*self._requests, request])
        if sum(counted) > self._max_waiting_tokens:
            raise QueueFullError(f"{self.waiting_tokens:,} tokens wait already")
        self._requests.append(request)
        if len(self._waiting()) >= self._expected:
            self._gathered.set()
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._translate_batches())
        try:
            await request.done
        finally:
            self._requests.remove(request)
        rows = iter(request.results[number] for number in range(len(pieces)))
        return [_joined(some, [next(rows) for _ in some]) for some in divided]

    async def _translate_batches(self) -> None:
        run = asyncio.get_running_loop().run_in_executor
        while batch := list(self._next_batch()):
            texts, key = [request.pieces[number].text for request, number in batch], batch[0][0].key
            outcomes = await run(self._thread, self._outcomes, texts, key)
            for (request, number), outcome in zip(batch, outcomes, strict=True):
                if isinstance(outcome, list):
                    request.results[number] = outcome
                if request.done.done():
                    continue
                if isinstance(outcome, Exception):
                    request.done.set_exception(outcome)
                    request.waiting.clear()
                elif len(request.results) == len(request.pieces):
                    request.done.set_result(None)
            self._on_batch(len(batch), sum(request.pieces[number].num_tokens for request, number in batch))
            waiting = self._waiting()
            self._expected = len({request for request, _ in batch}.union(waiting))
            if self._expected > max(1, len(waiting)):
                self._gathered.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._gathered.wait(), SECONDS_TO_GATHER)

    def _waiting(self) -> list[_Request]:
        return [request for request in self._requests if request.waiting]

    def _next_batch(self) -> Iterator[tuple[_Request, int]]:
        """Yields pieces of requests with the key of the oldest one, one of each request in turn."""
        if not (waiting := self._waiting()):
            return
        left, turns = self._batch_tokens, deque(request for request in waiting if request.key == waiting[0].key)
        first = True
        while turns:
            request = turns.popleft()
            left -= request.tokens(request.waiting[0])
            if left < 0 and not first:
                return
            yield request, request.waiting.popleft()
            first = False
            if request.waiting:
                turns.append(request)

    def _outcomes(self, texts: list[str], key: BatchKey) -> list[list[Linked] | Exception]:
        """Returns the translations of each piece, or its error: one piece's error isn't that of the others."""
        try:
            return [*self._translate(texts, *key)]
        except Exception as error:
            if len(texts) == 1:
                return [error]
        return [outcome for text in texts for outcome in self._outcomes([text], key)]


def _joined(pieces: list[Piece], rows: list[list[Linked]]) -> list[Linked]:
    """Returns the translations of a text, by rank, from those of its pieces."""
    ranks = range(max(map(len, rows), default=1))
    return [join_linked(pieces, [row[min(rank, len(row) - 1)] for row in rows]) for rank in ranks]
