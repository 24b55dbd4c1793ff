"""The HTTP server by itself, with an application that only says that it is there."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest

from tests.serving.processes import PATIENCE, ROOT, serving

pytest.importorskip("uvicorn")
SERVICE = """
import functools, sys
from hf_vanilla_transformer.serving import server

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})

server.uvicorn.Config = functools.partial(server.uvicorn.Config, timeout_keep_alive=1)
server.run(app, "127.0.0.1", int(sys.argv[1]), grace=1, on_ready=lambda: print("ready", flush=True))
"""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    script = SERVICE.replace("{", "{{").replace("}", "}}")
    with serving("-c", script, "{port}", ready="ready\n", errors=subprocess.STDOUT) as server:
        yield server[0]
        server[1].send_signal(signal.SIGTERM)
        assert server[1].wait(PATIENCE) == 0


def answer(port: int, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(sent)
        return client.recv(100)


@pytest.mark.skipif(sys.platform == "win32", reason="pipes there always wait")
def test_a_log_that_nobody_reads_does_not_stop_the_service(port: int) -> None:
    for _ in range(2_000):  # each is a line of the log; a pipe holds some 1,600
        assert b"400 Bad Request" in answer(port, b"\x16\x03\x01 no HTTP\r\n\r\n")
    assert b"204 No Content" in answer(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


def test_a_port_that_is_taken(port: int) -> None:
    command: list[Any] = [sys.executable, "-c", SERVICE, str(port)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert "address already in use" in done.stderr
    assert "ready\n" not in done.stdout


def test_heads_that_are_too_long_or_never_end(port: int) -> None:
    ended = []

    def send(head: bytes) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=8) as client:
            client.sendall(head)
            try:
                while client.recv(1_000):
                    pass
            except ConnectionResetError:  # another way to be closed, where the head wasn't read to its end
                pass
        ended.append(head)

    heads = [b"", b"GET /", b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000]
    clients = [Thread(target=send, args=[head]) for head in heads]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert sorted(ended) == heads
