"""Commands of `vanilla-transformer` that are killed (SIGKILL) at chosen moments, for tests.

`Forks` starts this file as a program, which imports torch once and forks for each command. A moment is a kind, a colon
and a number, such as "weights:2":

    batch       before the 2nd batch that a training learns from
    weights     when half of a file of weights is written, the 2nd one of a checkpoint or an average; likewise
    optimizer, rng, state (trainer_state.json), copy (any file that is copied)
    removal     in the middle of the 2nd removal of an old checkpoint
    change      right before the 2nd change in the file system: a file is opened to be written, renamed, removed ...
    call        at the 2nd call of any function, Python's or C's
"""

import json
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import safetensors.torch
import torch
import transformers.modeling_utils
import transformers.trainer_callback

from hf_vanilla_transformer import cli
from hf_vanilla_transformer.training import trainer as training

ROOT = Path(__file__).parents[2]
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
KILLED = -signal.SIGKILL


class Forks:
    """A process that forks for each command.

    Args:
        log: The file that the commands' output is appended to.
        caches: A folder for what the libraries keep.
    """

    def __init__(self, log: Path, caches: Path) -> None:
        path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        environment = os.environ | {"HF_HOME": str(caches), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, __file__, str(log)], env=environment, **pipes)
        self.totals: dict[str, int] = {}  # the numbers of changes and calls

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def run(self, moment: str, *arguments: object) -> int:
        """Runs a command and returns its exit code.

        Args:
            moment: When to kill it; "" to let it end, and "count" to fill `totals`.
            arguments: The command.

        Returns:
            `KILLED` if it was killed.
        """
        self.process.stdin.write(json.dumps([moment, *map(str, arguments)]) + "\n")
        self.process.stdin.flush()
        code, self.totals = json.loads(self.process.stdout.readline())
        return code


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def countdown(number: int) -> Callable[[], None]:
    """Returns a function that dies at its given call."""
    left = iter(range(number - 1))
    return lambda: None if next(left, None) is not None else die()


def before(number: int, what: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that its given call dies."""
    count = countdown(number)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        count()
        return what(*args, **kwargs)

    return wrapped


def halfway(number: int, what: Callable[..., Any], file_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that writes a file: at the given call it leaves half of the file and dies.

    Args:
        number: Which call, of those that `file_of` returns a file for.
        what: The function.
        file_of: Takes the function's arguments and returns the file that is written.
    """
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        file = file_of(*args, **kwargs)
        calls += bool(file)
        result = what(*args, **kwargs)
        if file and calls == number:
            os.truncate(file, os.path.getsize(file) // 2)
            die()
        return result

    return wrapped


def of_checkpoint(file: Any, name: str = "") -> Any:
    """Returns a file of a checkpoint or of an unfinished average whose name contains `name`, and None for others."""
    folder = Path(file).parent.name
    return file if name in Path(file).name and (folder.startswith("checkpoint-") or ".partial" in folder) else None


def is_change(event: str, args: tuple[Any, ...]) -> bool:
    """Whether an audit event of Python is the beginning of a change in the file system."""
    if event == "open":
        return bool(args[2] and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return event in CHANGES


def on_change(do: Callable[[], None]) -> None:
    sys.addaudithook(lambda event, args: do() if is_change(event, args) else None)


def on_call(do: Callable[[], None]) -> None:
    sys.setprofile(lambda frame, event, argument: do() if event in ("call", "c_call") else None)


def arm(moment: str) -> None:
    """Sets the trap."""
    kind, number = moment.split(":")[0], int(moment.split(":")[1])
    trainer, state = training.VanillaTransformerTrainer, transformers.trainer_callback.TrainerState
    if kind == "batch":
        trainer.training_step = before(number, trainer.training_step)
    elif kind == "weights":
        saving = halfway(number, safetensors.torch.save_file, lambda tensors, file, **kwargs: of_checkpoint(file))
        safetensors.torch.save_file = transformers.modeling_utils.safe_save_file = saving
    elif kind in ("optimizer", "rng"):
        torch.save = halfway(number, torch.save, lambda state, file, **kwargs: of_checkpoint(file, kind))
    elif kind == "state":
        state.save_to_json = halfway(number, state.save_to_json, lambda self, file: of_checkpoint(file))
    elif kind == "copy":
        shutil.copyfile = halfway(number, shutil.copyfile, lambda source, target, **kwargs: target)
    elif kind == "removal":
        arm_removal(number)
    elif kind == "change":
        on_change(countdown(number))
    elif kind == "call":
        on_call(countdown(number))
    else:
        raise ValueError(moment)


def arm_removal(number: int) -> None:
    remove, count = shutil.rmtree, countdown(number)

    def removing(folder: Any, *args: Any, **kwargs: Any) -> None:
        state = Path(folder) / "trainer_state.json"
        if of_checkpoint(state) and state.exists():
            state.unlink()
            count()
        remove(folder, *args, **kwargs)

    shutil.rmtree = removing


class Totals:
    """Numbers of changes and calls, in memory that a process shares with its forks."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 16)

    def read(self) -> dict[str, int]:
        return dict(zip(("change", "call"), struct.unpack("qq", self.memory[:]), strict=True))

    def count(self) -> None:
        numbers = [0, 0]

        def add(place: int) -> None:
            numbers[place] += 1
            self.memory[:] = struct.pack("qq", *numbers)

        on_change(lambda: add(0))
        on_call(lambda: add(1))


def fork(moment: str, arguments: list[str], log: str, totals: Totals) -> int:
    """Runs a command in a fork and returns its exit code."""
    child = os.fork()
    if child == 0:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        sys.stdout.write(f"--- {moment}: {' '.join(arguments)}\n")
        sys.stdout.flush()
        code = 1
        try:
            if moment == "count":
                totals.count()
            elif moment:
                arm(moment)
            code = cli.main(arguments)
        finally:
            sys.setprofile(None)
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def serve(log: str) -> None:
    """Reads a moment and a command from each line of standard input, and answers with code and totals."""
    for line in sys.stdin:
        moment, *arguments = json.loads(line)
        totals = Totals()
        code = fork(moment, arguments, log, totals)
        sys.stdout.write(json.dumps([code, totals.read()]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "--rank":  # one of several processes: --rank RANK MOMENT ARGUMENT... kills the one of that rank
        if os.environ["RANK"] == sys.argv[2]:
            arm(sys.argv[3])
        sys.exit(cli.main(sys.argv[4:]))
    serve(sys.argv[1])
