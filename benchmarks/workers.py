"""Contenders that take turns, each in its own process, so that memory and the allocator's settings aren't shared."""

import multiprocessing
import os
import re
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from transformers.utils import logging

from hf_vanilla_transformer.engine.memory import keep_freed_memory

from .work import BenchmarkError

PAUSE = 0.25  # seconds; idle OpenMP threads keep a core busy for up to 0.2 seconds


class Timing(NamedTuple):
    """Seconds and tokens of one turn, and in decoding the translations, each without its last token.

    The last one may be forced to be the end of sentence, or not.
    """

    seconds: float
    tokens: int
    outputs: list[list[int]] | None = None


@dataclass(frozen=True)
class Facts:
    """Properties of a contender other than its speed.

    Attributes:
        parameters: Number of trained parameters; None: unknown.
        alone: Parameters that only this contender has: name -> number.
        note: How it is called.
        has_memory: Whether its peak memory is meaningful.
        in_dtype: Whether it computes in the type whose peak FLOP/s are measured.
    """

    parameters: int | None = None
    alone: dict[str, int] = field(default_factory=dict)
    note: str = ""
    has_memory: bool = False
    in_dtype: bool = True


class Contender(Protocol):
    """One implementation with its model."""

    def run(self, case: str) -> Timing:
        """Does the work of a case and returns the time it took."""

    def facts(self, case: str = "") -> Facts:
        """Returns its properties, and how it does the work of a case."""


@dataclass(frozen=True)
class Entrant:
    """How to make a contender.

    Attributes:
        name: Its name in the tables.
        make: Makes it; can be pickled.
        keep_freed_memory: Whether its process gets the allocator's settings of our command line.
        library: The library that it imports, which doesn't count as its memory.
        environment: Variables that are set before that.
    """

    name: str
    make: Callable[[], Contender]
    keep_freed_memory: bool = False
    library: str = "torch"
    environment: dict[str, str] = field(default_factory=dict)


class LocalWorker:
    """A contender in this process; its memory can't be measured separately."""

    def __init__(self, entrant: Entrant, device: str, threads: int | None) -> None:
        self.name = entrant.name
        set_threads(threads)
        self.contender = entrant.make()

    def run(self, case: str) -> Timing:
        """Does the work of a case."""
        return self.contender.run(case)

    def facts(self, case: str = "") -> Facts:
        """Says what is known of it."""
        return self.contender.facts(case)

    def close(self) -> int | None:
        """Ends it; its peak memory is unknown."""
        return None

    def stop(self) -> None:
        """Does nothing."""


class ProcessWorker:
    """A contender in its own process."""

    def __init__(self, entrant: Entrant, device: str, threads: int | None) -> None:
        self.name = entrant.name
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, entrant, device, threads), daemon=True)
        self.process.start()
        theirs.close()

    def run(self, case: str) -> Timing:
        """Does the work of a case."""
        return self._ask("run", case)

    def facts(self, case: str = "") -> Facts:
        """Says what is known of it."""
        return self._ask("facts", case)

    def close(self) -> int | None:
        """Ends the process and returns its peak memory in bytes, or None if that is meaningless."""
        has_memory = self.facts().has_memory
        peak = self._ask("close")
        self.process.join()
        return peak if has_memory else None

    def stop(self) -> None:
        """Ends the process if it still runs, after an error for example."""
        self.connection.close()
        self.process.terminate()
        self.process.join()

    def _ask(self, *question: str) -> Any:
        try:
            self.connection.send(question)
            kind, answer = self.connection.recv()
        except (EOFError, OSError) as error:
            self.process.join()
            raise BenchmarkError(
                f"{self.name}: its process ended unexpectedly (exit code {self.process.exitcode}); is there too little "
                "memory? Use a smaller --config, fewer --tokens or fewer --peers"
            ) from error
        if kind == "error":
            raise BenchmarkError(f"{self.name} failed; leave it out of --peers, or fix this error:\n{answer}")
        return answer


Worker = LocalWorker | ProcessWorker


def start(entrants: Sequence[Entrant], device: str, threads: int | None, same_process: bool) -> list[Worker]:
    """Starts one worker per entrant, all at the same time."""
    kind = LocalWorker if same_process else ProcessWorker
    return [kind(entrant, device, threads) for entrant in entrants]


def take_turns(
    workers: Sequence[Worker],
    case: str,
    rounds: int,
    report: Callable[[str], None] = lambda _: None,
    warm_up: bool = True,
    pause: float = 0.0,
) -> dict[str, list[Timing]]:
    """Runs workers in turns, A B A B: once each to warm up, then once each per round.

    Args:
        workers: The workers.
        case: The name of the work.
        rounds: Timed turns of each worker.
        report: Is called with progress messages.
        warm_up: Whether a warm-up turn is needed.
        pause: Seconds before each turn, in which idle threads of the last turn fall asleep.

    Returns:
        Worker's name -> timings of its rounds.
    """
    for worker in workers if warm_up else ():
        report(f"{case}: warming up {worker.name}")
        worker.run(case)
    timings: dict[str, list[Timing]] = {worker.name: [] for worker in workers}
    for number in range(1, rounds + 1):
        for worker in workers:
            time.sleep(pause)
            report(f"{case}: round {number} of {rounds}, {worker.name}")
            timings[worker.name].append(worker.run(case))
    return timings


def set_threads(threads: int | None) -> None:
    """Sets the number of torch's threads; None: torch's default."""
    if threads is not None:
        torch.set_num_threads(threads)


def be_quiet() -> None:
    """Silences the libraries' messages."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=UserWarning)


def synchronize(device: str) -> None:
    """Waits until the device has computed everything."""
    if device == "cuda":
        torch.cuda.synchronize()


def _serve(connection: Connection, entrant: Entrant, device: str, threads: int | None) -> None:
    """Answers the questions of a ProcessWorker."""
    try:
        if entrant.keep_freed_memory:
            keep_freed_memory()
        set_threads(threads)
        be_quiet()
        os.environ.update(entrant.environment)
        _load_libraries(entrant.library)
        before = _peak_memory(device)
        contender = entrant.make()
    except Exception:
        connection.recv()
        connection.send(("error", traceback.format_exc()))
        return
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:  # the other end was closed
            return
        if name == "close":
            connection.send(("done", _peak_memory(device) - before))
            return
        try:
            connection.send(("done", getattr(contender, name)(*arguments)))
        except Exception:
            connection.send(("error", traceback.format_exc()))


def _load_libraries(library: str) -> None:
    """Imports a library and what torch imports at first use, so that neither counts as a contender's memory."""
    import_module(library)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([weight])
    (weight * weight).sum().backward()
    optimizer.step()


def _peak_memory(device: str) -> int:
    """Peak memory of this process so far, in bytes."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.is_file():  # on Linux, where `ru_maxrss` starts with the parent's
        peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        assert peak is not None
        return int(peak.group(1)) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
