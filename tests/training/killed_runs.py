"""Runs `vanilla-transformer train` again and again, each time killed (SIGKILL) at another moment, until it ends.

    python tests/training/killed_runs.py MOMENTS ARGUMENT...

MOMENTS is a comma-separated list; the first run is killed at the first one, the second, which resumes, at the second,
and one more goes on to the end. "update:7" is the 7th update of that process, "weights:2" the middle of its second
writing of weights, "optimizer:1", "rng:1" and "state:1" likewise, "removal:1" its first removal of an old checkpoint.
Each run is a fork of this process, so that torch is imported once.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers.modeling_utils
import transformers.trainer_callback
import transformers.trainer_utils

from hf_vanilla_transformer import cli
from hf_vanilla_transformer.training import trainer as training


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(number: int, what: Callable[..., Any], applies: Callable[..., bool]) -> Callable[..., Any]:
    """Wraps a function that writes a file: at the given call it leaves half of the file and dies."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        file = applies(*args, **kwargs)
        calls += bool(file)
        result = what(*args, **kwargs)
        if file and calls == number:
            os.truncate(file, os.path.getsize(file) // 2)
            die()
        return result

    return wrapped


def arm(moment: str) -> None:
    """Sets the trap."""
    kind, number = moment.split(":")[0], int(moment.split(":")[1])
    if kind == "update":
        step = training.VanillaTransformerTrainer.training_step
        left = iter(range(number - 1))
        training.VanillaTransformerTrainer.training_step = lambda self, *args, **kwargs: (
            step(self, *args, **kwargs) if next(left, None) is not None else die()
        )
    elif kind == "weights":
        saving = at_call(number, safetensors.torch.save_file, lambda tensors, file, **kwargs: file)
        safetensors.torch.save_file = transformers.modeling_utils.safe_save_file = saving
    elif kind in ("optimizer", "rng"):
        torch.save = at_call(number, torch.save, lambda state, file, **kwargs: kind in Path(file).name and file)
    elif kind == "state":
        state = transformers.trainer_callback.TrainerState
        state.save_to_json = at_call(number, state.save_to_json, lambda self, file: file)
    elif kind == "removal":

        def remove(folder: str, **kwargs: Any) -> None:
            (Path(folder) / "trainer_state.json").unlink()
            die()

        shutil.rmtree = transformers.trainer_utils.shutil.rmtree = remove
    else:
        raise ValueError(moment)


def run(moment: str | None, arguments: list[str]) -> int:
    """Forks, trains in the child and returns its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        if moment:
            arm(moment)
        code = 1
        try:
            code = cli.main(["train", *arguments])
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    resuming: list[str] = []
    for moment in [moment for moment in sys.argv[1].split(",") if moment]:
        sys.stdout.write(f"--- to be killed at {moment}\n")
        sys.stdout.flush()
        if (code := run(moment, sys.argv[2:] + resuming)) != -signal.SIGKILL:
            sys.exit(f"{moment}: ended with {code}, not killed")
        resuming = ["--resume"]
    sys.exit(run(None, sys.argv[2:] + resuming))
