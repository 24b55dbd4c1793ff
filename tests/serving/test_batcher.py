"""The queue: which texts share a batch, whose answer is whose, and what happens to those who leave."""

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hf_vanilla_transformer.documents.links import Linked
from hf_vanilla_transformer.serving.batcher import Batcher, QueueFullError
from hf_vanilla_transformer.translation.reading import Piece

pytestmark = pytest.mark.anyio  # its plugin, a part of what FastAPI installs, runs asynchronous tests


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Model:
    """Translates into capitals, and keeps what it was called with."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, texts: list[str], n_best: int, source: str, target: str, linked: bool) -> list[list[Linked]]:
        self.batches.append(texts)
        assert self.go_on.wait(60)
        if any("bad" in text for text in texts):
            raise ValueError("a bad text")
        return [[Linked(f"{text.upper()}{target}{number}") for number in range(n_best)] for text in texts]


def sentences(text: str, language: str) -> list[Piece]:
    return [Piece(part, len(part)) for part in text.split(" / ")]


class Queue(Batcher):
    """A queue before a Model of its own; it returns the translations' texts."""

    def __init__(self, **options: Any) -> None:
        self.model = Model()
        super().__init__(self.model, sentences, **options)

    async def translate(self, *args: Any, **options: Any) -> Any:
        return [[one.text for one in row] for row in await super().translate(*args, **options)]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def waiting(queue: Queue, *requests: list[str]) -> list[asyncio.Task[Any]]:
    """Starts requests one after the other while the model works on the first."""
    queue.model.go_on.clear()
    tasks = []
    for request in requests:
        tasks.append(asyncio.create_task(queue.translate(request)))
        await asyncio.sleep(0)
        await until(lambda: bool(queue.model.batches))
    return tasks


async def test_ten_thousand_numbered_texts_come_back_to_their_requests() -> None:
    queue = Queue(max_waiting_tokens=10**9)
    numbers = iter(range(10_000))

    async def client(seed: int) -> None:
        chance = random.Random(seed)
        while some := [f"n{number}" for _, number in zip(range(chance.randint(1, 9)), numbers, strict=False)]:
            rows = await queue.translate(some)
            assert rows == [[f"{text.upper()}0"] for text in some]

    await asyncio.gather(*(client(seed) for seed in range(64)))
    texts = [text for batch in queue.model.batches for text in batch]
    assert sorted(texts) == sorted(f"n{number}" for number in range(10_000))
    assert len(queue.model.batches) < 1_000


async def test_a_request_of_many_texts_does_not_hold_up_a_short_one() -> None:
    queue = Queue(batch_tokens=8)
    tasks = await waiting(queue, ["aa"], ["bb"] * 20, ["cc"])
    queue.model.go_on.set()
    await asyncio.gather(*tasks)
    assert queue.model.batches[1] == ["bb", "cc", "bb", "bb"]


async def test_a_long_text_takes_turns_by_its_pieces_and_leaves_when_its_client_does() -> None:
    queue = Queue(batch_tokens=8)
    tasks = await waiting(queue, ["aa"], [" / ".join(["bb"] * 2_000)], ["cc / dd"])
    await until(lambda: queue.waiting_tokens > 4_000)  # it was divided in a thread
    queue.model.go_on.set()
    assert await tasks[2] == [["CC0 DD0"]]
    assert sorted(text for batch in queue.model.batches[1:3] for text in batch if text != "bb") == ["cc", "dd"]
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await queue.translate(["ee"]) == [["EE0"]]
    assert len(queue.model.batches) < 1_000


async def test_requests_that_wait_for_several_batches_wait_for_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_vanilla_transformer.serving.batcher.SECONDS_TO_GATHER", 600)
    queue = Queue(batch_tokens=4)
    async with asyncio.timeout(60):
        await asyncio.gather(*(queue.translate(["aa"] * 20) for _ in range(2)))


async def test_batches_have_their_tokens_and_a_longer_text_is_a_batch_by_itself() -> None:
    queue = Queue(batch_tokens=10)
    texts = ["a" * 30, "b" * 6, "c" * 4, "d" * 5]
    assert [row[0] for row in await queue.translate(texts)] == [f"{text.upper()}0" for text in texts]
    assert queue.model.batches == [texts[:1], texts[1:3], texts[3:]]


async def test_requests_with_other_options_are_in_other_batches() -> None:
    queue = Queue()
    queue.model.go_on.clear()
    options: list[dict[str, Any]] = [{}, {"n_best": 2}, {"target": "deu"}, {"n_best": 2}]
    tasks = [asyncio.create_task(queue.translate([f"t{at}"], **one)) for at, one in enumerate(options)]
    await until(lambda: bool(queue.model.batches))
    queue.model.go_on.set()
    assert await asyncio.gather(*tasks) == [[["T00"]], [["T10", "T11"]], [["T2deu0"]], [["T30", "T31"]]]
    assert queue.model.batches == [["t0"], ["t1", "t3"], ["t2"]]


async def test_one_texts_error_is_that_of_its_request_alone_which_leaves_the_queue() -> None:
    queue = Queue(batch_tokens=9)
    tasks = await waiting(queue, ["first"], ["bad", "good", "not read"], ["fine"])
    queue.model.go_on.set()
    first, second, third = await asyncio.gather(*tasks, return_exceptions=True)
    assert (first, third) == ([["FIRST0"]], [["FINE0"]])
    assert isinstance(second, ValueError)
    await queue.translate(["six"])
    assert ["not read"] not in queue.model.batches


async def test_a_cancelled_request_leaves_the_queue() -> None:
    queue = Queue()
    first, second, third = await waiting(queue, ["first"], ["second"] * 3, ["third"])
    second.cancel()
    await asyncio.sleep(0)
    assert queue.waiting_tokens == len("third")
    queue.model.go_on.set()
    await asyncio.gather(first, third)
    assert queue.model.batches == [["first"], ["third"]]


async def test_a_full_queue_is_refused_and_an_empty_one_takes_any_request() -> None:
    queue = Queue(max_waiting_tokens=10)
    first, *others = await waiting(queue, ["first"], ["x" * 20], ["z"], ["x" * 20])
    with pytest.raises(QueueFullError, match="21 tokens wait already"):
        await asyncio.wait_for(others.pop(), 60)
    queue.model.go_on.set()
    await asyncio.gather(first, *others)
    assert await queue.translate(["y"]) == [["Y0"]]
