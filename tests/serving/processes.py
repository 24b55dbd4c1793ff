"""Processes that serve, and questions to them."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib import error, request

PATIENCE = 900  # seconds
ROOT = Path(__file__).parents[2]


@contextmanager
def serving(*arguments: object, ready: str, errors: IO[bytes] | int | None = None) -> Iterator[Any]:
    """Runs Python with arguments, in which {port} is a free port; yields the port and the process when it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *(str(argument).format(port=port) for argument in arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == ready.format(port=port)
        yield port, process
    finally:
        process.kill()
        process.wait()


def ask(port: int, q: str | list[str], source: str = "en", target: str = "de") -> tuple[int, Any]:
    """Returns the status, and the translation or the error."""
    body = json.dumps({"q": q, "source": source, "target": target}).encode()
    sent = request.Request(f"http://127.0.0.1:{port}/translate", body, {"content-type": "application/json"})
    try:
        with request.urlopen(sent, timeout=PATIENCE) as answer:
            return answer.status, json.loads(answer.read())["translatedText"]
    except error.HTTPError as refused:
        return refused.code, json.loads(refused.read())["error"]
