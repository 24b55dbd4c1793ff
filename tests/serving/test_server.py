"""The HTTP server by itself, with an application that only says that it is there."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
ROOT = Path(__file__).parents[2]
SERVICE = """
import sys
from hf_vanilla_transformer.serving import server

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})

server.run(app, "127.0.0.1", int(sys.argv[1]), grace=1, on_ready=lambda: print("ready", flush=True))
"""


def answer(port: int, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(sent)
        return client.recv(100)


@pytest.mark.skipif(sys.platform == "win32", reason="pipes there always wait")
def test_a_log_that_nobody_reads_does_not_stop_the_service() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SERVICE, str(port)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        for _ in range(2_000):  # each is a line of the log; a pipe holds some 1,600
            assert b"400 Bad Request" in answer(port, b"\x16\x03\x01 no HTTP\r\n\r\n")
        assert b"204 No Content" in answer(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
