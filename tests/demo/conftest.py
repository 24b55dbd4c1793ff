"""A page on a free port of this machine, in a process of its own that ends with the tests."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

PATIENCE = 240  # seconds until a page is there, on a machine that is busy
ROOT = Path(__file__).parents[2]
# Notes where the process and its children connect to.
WATCHER = """
import os, sys
def note(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        with open(os.environ["CONNECTIONS"], "a") as file:
            file.write(f"{event} {arguments[1] if event == 'socket.connect' else arguments[0]}\\n")
sys.addaudithook(note)
"""
HIDE = """
import sys
class Hidden:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] == "hf_vanilla_transformer":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
"""


@dataclass(frozen=True)
class Page:
    """A page that is being shown.

    Attributes:
        address: Its address, with "/" at the end.
        process: The server.
        connections: A file with a line for each address that the server has connected to.
        log: A file with what it has printed.
    """

    address: str
    process: subprocess.Popen
    connections: Path
    log: Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def shown(folder: Path, command: list[str], *, hidden: bool = False, **variables: str) -> Iterator[Page]:
    """Runs a command that shows a page, until the context ends."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(WATCHER + (HIDE if hidden else ""))
    path = str(folder) if hidden else os.pathsep.join([str(folder), str(ROOT)])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "CONNECTIONS": str(folder / "connections"),
        "PYTHONUNBUFFERED": "1",
    }
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=environment | variables, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        yield Page(_address(process, log), process, folder / "connections", log)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen, log: Path) -> str:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        for line in log.read_text().splitlines():
            if line.startswith("http://"):
                return line.split()[0]
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise AssertionError(f"no page: {log.read_text()}")


@pytest.fixture(scope="session")
def checkpoints(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two untrained models that write little: the tiny one, and one with other weights and three decoder layers."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    root = tmp_path_factory.mktemp("checkpoints")
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint)
    torch.manual_seed(1)
    config = type(model.config).from_dict({**model.config.to_dict(), "decoder_layers": 3})
    for folder, one in ((root / "first", model), (root / "second", type(model)(config))):
        one.generation_config.max_extra_length = 2
        one.save_pretrained(folder)
        AutoTokenizer.from_pretrained(tiny_checkpoint).save_pretrained(folder)
    return root / "first", root / "second"


@pytest.fixture(scope="session")
def page(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The command's page with both checkpoints and an example."""
    command = ["-m", "hf_vanilla_transformer", "demo", "--model", *map(str, checkpoints)]
    command += ["--port", str(free_port()), "--example", "half past nine", "--threads", "1"]
    with shown(tmp_path_factory.mktemp("page"), command) as running:
        yield running


@pytest.fixture(scope="session")
def show_page() -> Callable[..., object]:
    return shown
