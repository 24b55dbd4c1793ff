"""Contenders take turns, each in a process of its own: its memory and its allocator's settings are its own then."""

import multiprocessing
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


class Timing(NamedTuple):
    """What one turn took, and how many tokens it was about."""

    seconds: float
    tokens: int


@dataclass(frozen=True)
class Facts:
    """What there is to know about a contender beside its speed.

    Attributes:
        parameters: Trained ones; None: there is no counting them.
        alone: Those of them that are of its own design: name -> number.
        note: How it is called.
        has_memory: Whether its peak memory means anything.
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
        """Does the work of a case, timed."""

    def facts(self, case: str = "") -> Facts:
        """Says what is known of it, and how it does the work of a case."""


@dataclass(frozen=True)
class Entrant:
    """A contender that is yet to be made.

    Attributes:
        name: In the tables.
        make: Makes it; can be pickled.
        keep_freed_memory: Whether its process gets the allocator's setting of our own command line.
        library: What it imports; by itself that isn't counted as its memory.
    """

    name: str
    make: Callable[[], Contender]
    keep_freed_memory: bool = False
    library: str = "torch"


class LocalWorker:
    """A contender in this process; its memory can't be told from others'."""

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
        """Ends it; there is no peak memory to tell."""
        return None

    def stop(self) -> None:
        """There is nothing to stop."""


class ProcessWorker:
    """A contender in a process of its own."""

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
        """Ends the process: the peak of its memory in bytes, or None where that says nothing."""
        has_memory = self.facts().has_memory
        peak = self._ask("close")
        self.process.join()
        return peak if has_memory else None

    def stop(self) -> None:
        """Ends the process if it is still there, as after an error."""
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
                f"{self.name}: its process ended by itself (exit code {self.process.exitcode}); is there too little "
                "memory? Take a smaller --config, fewer --tokens or fewer --peers"
            ) from error
        if kind == "error":
            raise BenchmarkError(f"{self.name} failed; leave it out of --peers, or mend what it says:\n{answer}")
        return answer


Worker = LocalWorker | ProcessWorker


def start(entrants: Sequence[Entrant], device: str, threads: int | None, same_process: bool) -> list[Worker]:
    """Makes a worker of each, at the same time."""
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
    """A B A B: each worker once without counting, then in every round each once.

    Args:
        workers: Who takes turns.
        case: The work.
        rounds: Turns of each that count.
        report: Is told what is going on.
        warm_up: Whether the turn without counting is needed.
        pause: Seconds before each turn, in which the last one's threads that wait for more work fall asleep.
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
    """Lets torch compute with so many threads; None: as many as it likes."""
    if threads is not None:
        torch.set_num_threads(threads)


def be_quiet() -> None:
    """Keeps what libraries say off the terminal."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=UserWarning)


def synchronize(device: str) -> None:
    """Waits until what was started has been computed."""
    if device == "cuda":
        torch.cuda.synchronize()


def _serve(connection: Connection, entrant: Entrant, device: str, threads: int | None) -> None:
    """Answers the questions of a ProcessWorker."""
    try:
        if entrant.keep_freed_memory:
            keep_freed_memory()
        set_threads(threads)
        be_quiet()
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
        except EOFError:  # nobody asks any more
            return
        if name == "close":
            connection.send(("done", _peak_memory(device) - before))
            return
        try:
            connection.send(("done", getattr(contender, name)(*arguments)))
        except Exception:
            connection.send(("error", traceback.format_exc()))


def _load_libraries(library: str) -> None:
    """Imports a library, and has torch import what it imports at first use, so that it isn't counted as memory."""
    import_module(library)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([weight])
    (weight * weight).sum().backward()
    optimizer.step()


def _peak_memory(device: str) -> int:
    """The most bytes that this process has had so far."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.is_file():  # `ru_maxrss` begins with the parent's there
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        assert found is not None
        return int(found.group(1)) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
