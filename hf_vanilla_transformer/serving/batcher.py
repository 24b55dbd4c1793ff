"""Dynamic batching: texts of many requests share the batches of one model."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

# Source tokens of a batch. More fill the cores no better, and everything in a batch waits for its longest text.
BATCH_TOKENS = 1_024
# Source tokens that may wait: some ten seconds of a base-size model on two cores.
MAX_WAITING_TOKENS = 20_000
# After a batch of several texts, the next one waits this long for as many: clients that have just got an answer.
SECONDS_TO_GATHER = 0.004


class QueueFullError(Exception):
    """More waits than can be translated soon."""


Model = Callable[[list[str], int, str], list[list[str]]]
"""Translates texts into a target language; for each, it returns the given number of translations, the best first."""


@dataclass(eq=False)
class _Request:
    texts: Sequence[str]
    tokens: Sequence[int]
    options: tuple[int, str]  # n_best and target: what a batch has in common
    done: "asyncio.Future[None]"
    waiting: deque[int] = field(default_factory=deque)  # numbers of texts
    results: dict[int, list[str]] = field(default_factory=dict)

    @property
    def waiting_tokens(self) -> int:
        return sum(self.tokens[number] for number in self.waiting)


class Batcher:
    """Gathers waiting texts into batches for one model, which a thread of its own translates.

    An idle model begins at once. While it works, requests gather, and the next batch takes a text of each in turn, so
    that a request of many texts doesn't hold up short ones. After a batch of several texts, the next one waits for as
    many, a few milliseconds at most. A cancelled request leaves the queue.

    Args:
        translate: The model.
        count_tokens: Returns the number of tokens of each text.
        batch_tokens: Source tokens of a batch at most; a longer text is a batch by itself.
        max_waiting_tokens: Source tokens that may wait; each request counts for at most half of them.
        on_batch: Called after each batch with its number of texts and of tokens.
        thread: Where the model works; None: in a thread of its own. Load the model in the same thread, and let all
            models of a process share it: PyTorch has a thread pool for each thread that computes, and they contend
            for the cores.
    """

    def __init__(
        self,
        translate: Model,
        count_tokens: Callable[[list[str]], list[int]],
        *,
        batch_tokens: int = BATCH_TOKENS,
        max_waiting_tokens: int = MAX_WAITING_TOKENS,
        on_batch: Callable[[int, int], object] = lambda texts, tokens: None,
        thread: Executor | None = None,
    ) -> None:
        self._translate, self._count_tokens = translate, count_tokens
        self._batch_tokens, self._max_waiting_tokens, self._on_batch = batch_tokens, max_waiting_tokens, on_batch
        self._requests: list[_Request] = []  # those without an answer, the oldest first
        self._work: asyncio.Task[None] | None = None
        self._expected, self._gathered = 1, asyncio.Event()
        self._thread = thread or ThreadPoolExecutor(1)

    @property
    def waiting_tokens(self) -> int:
        """Source tokens that wait for a batch."""
        return sum(request.waiting_tokens for request in self._requests)

    async def translate(self, texts: Sequence[str], n_best: int = 1, target: str = "") -> list[list[str]]:
        """Translates the texts of one request.

        Args:
            texts: The texts.
            n_best: Translations of each.
            target: The target language.

        Returns:
            For each text, its translations, the best first.

        Raises:
            QueueFullError: Too much waits.
            Exception: What the model raised for one of the texts.
        """
        if not texts:
            return []
        tokens = [n_best * number for number in self._count_tokens(list(texts))]
        # A request counts for at most half of the limit, so that a long one doesn't keep out short ones.
        most = self._max_waiting_tokens // 2
        waiting = sum(min(one.waiting_tokens, most) for one in self._requests)
        if waiting + min(sum(tokens), most) > self._max_waiting_tokens:
            raise QueueFullError(f"{self.waiting_tokens:,} tokens wait already")
        done = asyncio.get_running_loop().create_future()
        request = _Request(texts, tokens, (n_best, target), done, deque(range(len(texts))))
        self._requests.append(request)
        if len(self._waiting()) >= self._expected:
            self._gathered.set()
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._translate_batches())
        try:
            await done
        finally:
            self._requests.remove(request)
        return [request.results[number] for number in range(len(texts))]

    async def _translate_batches(self) -> None:
        run = asyncio.get_running_loop().run_in_executor
        while batch := list(self._next_batch()):
            texts = [request.texts[number] for request, number in batch]
            outcomes = await run(self._thread, self._outcomes, texts, batch[0][0].options)
            for (request, number), outcome in zip(batch, outcomes, strict=True):
                if isinstance(outcome, list):
                    request.results[number] = outcome
                if request.done.done():
                    continue
                if isinstance(outcome, Exception):
                    request.done.set_exception(outcome)
                    request.waiting.clear()
                elif len(request.results) == len(request.texts):
                    request.done.set_result(None)
            n_best = batch[0][0].options[0]
            self._on_batch(len(batch), sum(request.tokens[number] for request, number in batch) // n_best)
            waiting = self._waiting()
            self._expected = len({request for request, _ in batch}.union(waiting))
            if self._expected > max(1, len(waiting)):
                self._gathered.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._gathered.wait(), SECONDS_TO_GATHER)

    def _waiting(self) -> list[_Request]:
        """Returns the requests with texts that wait."""
        return [request for request in self._requests if request.waiting]

    def _next_batch(self) -> Iterator[tuple[_Request, int]]:
        """Yields texts of requests with the options of the oldest one, one of each request in turn."""
        if not (waiting := self._waiting()):
            return
        options, left = waiting[0].options, self._batch_tokens
        turns = deque(request for request in waiting if request.options == options)
        first = True
        while turns:
            request = turns.popleft()
            left -= request.tokens[request.waiting[0]]
            if left < 0 and not first:
                return
            yield request, request.waiting.popleft()
            first = False
            if request.waiting:
                turns.append(request)

    def _outcomes(self, texts: list[str], options: tuple[int, str]) -> list[list[str] | Exception]:
        """Returns the translations of each text, or its error: one text's error isn't that of the others."""
        try:
            return [*self._translate(texts, *options)]
        except Exception as error:
            if len(texts) == 1:
                return [error]
        return [outcome for text in texts for outcome in self._outcomes([text], options)]
