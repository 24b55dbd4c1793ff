"""The HTTP server by itself, with an application that only says that it is there."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

pytest.importorskip("uvicorn")
SERVICE = """
import sys
from hf_vanilla_transformer.serving import server

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})

server.run(app, "127.0.0.1", int(sys.argv[1]), grace=1, on_ready=lambda: print("ready", flush=True))
"""
PATIENCE = 60


def start(port: int) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SERVICE, str(port)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.fixture
def server() -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = start(port)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield port, process
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()


def answer(port: int, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(sent)
        return client.recv(100)


@pytest.mark.skipif(sys.platform == "win32", reason="pipes there always wait")
def test_a_log_that_nobody_reads_does_not_stop_the_service(server) -> None:
    for _ in range(2_000):  # each is a line of the log; a pipe holds some 1,600
        assert b"400 Bad Request" in answer(server[0], b"\x16\x03\x01 no HTTP\r\n\r\n")
    assert b"204 No Content" in answer(server[0], b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


def test_a_port_that_is_taken(server) -> None:
    out, _ = start(server[0]).communicate(timeout=PATIENCE)
    assert b"address already in use" in out
    assert b"ready\n" not in out


def test_heads_that_are_too_long_or_never_end(server) -> None:
    ended = []

    def send(head: bytes, seconds: int) -> None:
        with socket.create_connection(("127.0.0.1", server[0]), timeout=seconds) as client:
            client.sendall(head)
            try:
                while client.recv(1_000):
                    pass
            except ConnectionResetError:  # another way to be closed, where the head wasn't read to its end
                pass
        ended.append(head)

    heads = {b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000: 2, b"GET /": 8, b"": 8}
    clients = [Thread(target=send, args=one) for one in heads.items()]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert sorted(ended) == sorted(heads)
