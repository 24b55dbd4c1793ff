"""A page on a free port of this machine, in a process of its own that ends with the tests."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

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


@dataclass(frozen=True)
class Page:
    """A page that is being shown: its address with "/" at the end, the model, and where the server has connected to."""

    address: str
    model: Path
    connections: Path


@pytest.fixture(scope="session")
def model(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model that writes little."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("demo") / "model"
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint)
    model.generation_config.max_extra_length = 2
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_checkpoint).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def page(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The command's page with an example."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "sitecustomize.py").write_text(WATCHER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "hf_vanilla_transformer", "demo", "--model", str(model), "--port", port]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "CONNECTIONS": str(folder / "connections"),
    }
    log = folder / "log"
    with log.open("w") as file:
        settings = {"cwd": folder, "env": environment, "stdout": file, "stderr": subprocess.STDOUT}
        process = subprocess.Popen([*command, "--example", "half past nine", "--threads", "1"], **settings)
    try:
        yield Page(_address(process, log), model, folder / "connections")
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen, log: Path) -> str:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("http://"):
                return line.split()[0]
        time.sleep(0.1)
    raise AssertionError(f"no page: {log.read_text()}")
