"""Contenders, each in its own process, so that memory and the allocator's settings aren't shared; and their turns.

Nothing heavy is imported at the top: the benchmark of real text measures how long a contender's process takes to start.
"""

import os
import pickle
import resource
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

PAUSE = 0.25  # seconds; idle OpenMP threads keep a core busy for up to 0.2 seconds
T = TypeVar("T")


class BenchmarkError(Exception):
    """The requested benchmark isn't possible; the message says why and names the fix."""


class Timing(NamedTuple):
    """Seconds of one turn, and in decoding the translations, without the end of sentence."""

    seconds: float
    outputs: list[list[int]] | None = None


@dataclass(frozen=True)
class Entrant:
    """How to make a contender, by a function that can be pickled."""

    name: str
    make: Callable[[], Any]
    keep_freed_memory: bool = False  # whether its process gets the allocator's settings of our command line
    environment: dict[str, str] = field(default_factory=dict)  # variables that its process gets in addition


class Worker:
    """A contender in its own process, started at once; `restart` starts another one."""

    def __init__(self, entrant: Entrant, threads: int) -> None:
        self.name, self.entrant, self.threads = entrant.name, entrant, threads
        self._start()

    def _start(self) -> None:
        numbers = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from benchmarks.workers import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **paths, **numbers, **self.entrant.environment},
        )
        self._send(self.entrant)

    def restart(self, environment: dict[str, str] | None = None) -> None:
        """Ends the process and starts another one, with other variables if any are given."""
        self.stop()
        if environment is not None:
            self.entrant = replace(self.entrant, environment=environment)
        self._start()

    def ask(self, method: str, *arguments: Any, seconds: float | None = None) -> Any:
        """Calls a method of the contender.

        Raises:
            BenchmarkError: It fails, its process has ended, or it hasn't answered after `seconds` and is ended.
        """
        self._send((method, arguments))
        answers: Any = self.process.stdout
        if seconds is not None and not select.select([answers], [], [], seconds)[0]:
            self.stop()
            raise BenchmarkError(f"{self.name}: no answer within {seconds:g} seconds")
        try:
            kind, answer = pickle.load(answers)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise BenchmarkError(
                f"{self.name}: its process ended unexpectedly (exit code {self.process.wait()}); is there too little "
                "memory? Use a smaller --config, fewer --tokens or fewer --peers"
            ) from error
        if kind == "error":
            raise BenchmarkError(f"{self.name} failed; leave it out of --peers, or fix this error:\n{answer}")
        return answer

    def stop(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.communicate()

    def _send(self, what: Any) -> None:
        try:
            pickle.dump(what, self.process.stdin)  # type: ignore[arg-type]
            self.process.stdin.flush()  # type: ignore[union-attr]
        except OSError:  # it has ended; the next answer says so
            pass


@contextmanager
def start(entrants: Iterable[Entrant], threads: int) -> Iterator[list[Worker]]:
    """Starts a process for each entrant, and ends all of them afterwards."""
    with ExitStack() as stack:
        workers = []
        for entrant in entrants:
            workers.append(Worker(entrant, threads))
            stack.callback(workers[-1].stop)
        yield workers


def serve() -> None:
    """Makes the contender that a Worker sends, and answers its questions."""
    answers, error, contender = os.fdopen(os.dup(1), "wb"), "", None
    os.dup2(2, 1)  # whatever a library prints isn't an answer
    try:
        entrant = pickle.load(sys.stdin.buffer)
        if entrant.keep_freed_memory:
            import_module("hf_vanilla_transformer.engine.memory").keep_freed_memory()
        contender = entrant.make()
    except Exception:
        error = traceback.format_exc()
    while True:
        try:
            method, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:  # the other end was closed
            return
        try:
            answer = error or (peak_memory() if method == "peak" else getattr(contender, method)(*arguments))
            pickle.dump(("error" if error else "done", answer), answers)
        except Exception:
            pickle.dump(("error", traceback.format_exc()), answers)
        answers.flush()


def peak_memory() -> int:
    """Returns the peak memory of this process so far, in bytes: on the GPU if torch has used one."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    status = Path("/proc/self/status")
    if status.is_file():  # on Linux, where `ru_maxrss` starts with the parent's
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024  # it is in kB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def take_turns(
    players: Mapping[str, Callable[[], T]], rounds: int, say: Callable[[str], None] = lambda _: None
) -> dict[str, list[T]]:
    """Lets players take turns, A B A B: once each to warm up, then once each per round; returns what these return."""
    turns: dict[str, list[T]] = {name: [] for name in players}
    for number in range(rounds + 1):
        for name, play in players.items():
            say(f"round {number} of {rounds}, {name}" if number else f"warming up {name}")
            time.sleep(PAUSE)  # idle threads of the last turn fall asleep
            turns[name].append(play())
    return {name: own[1:] for name, own in turns.items()}
