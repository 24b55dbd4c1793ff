"""`vanilla-transformer serve`: what it says, and as a process, with clients that vanish, and its end."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib import request
from urllib.error import HTTPError

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from hf_vanilla_transformer.serving import server as http

PATIENCE = 300


@pytest.mark.parametrize(
    ("options", "url", "is_open"),
    [
        ((), "http://127.0.0.1:5000", False),
        (("--host", "::1", "--port", 1), "http://[::1]:1", False),
        (("--host", "[::1]"), "http://[::1]:5000", False),
        (("--host", "0.0.0.0"), "http://0.0.0.0:5000", True),
    ],
)
def test_where_it_is_and_who_reaches_it(
    vanilla_transformer, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, options: Any, url: str, is_open: bool
) -> None:
    found = []

    def run(app: FastAPI, host: str, port: int, *, grace: int, on_ready: Any) -> None:
        with TestClient(app) as client:
            found.append((host, client.get("/health", headers={"host": "evil.example"}).status_code))
        on_ready()

    monkeypatch.setattr(http, "run", run)
    result = vanilla_transformer("serve", "--model", f"en-de={tiny_checkpoint}", *options)
    assert (result.code, result.out) == (0, f"{url} translates en-de\n")
    assert found == [(url.removeprefix("http://").rpartition(":")[0].strip("[]"), 200 if is_open else 400)]
    assert ("warning: every computer that reaches this machine can use the service" in result.err) is is_open


def test_without_ray_the_extra_is_named(vanilla_transformer, tiny_checkpoint: Path, monkeypatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray" or ".serving.ray" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    result = vanilla_transformer("serve", "--model", f"en-de={tiny_checkpoint}", "--ray")
    assert result.code == 2
    assert "Ray isn't installed: run pip install '.[ray]'" in result.error


# ---- A process ----
@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve") / "log"


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path, log: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hf_vanilla_transformer", "serve", "--port", str(port)]
    options = ["--model", f"en-de={tiny_checkpoint}", f"de-en={tiny_checkpoint}", "--threads", "1"]
    with log.open("wb") as errors:
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=errors, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{url} translates en-de, de-en\n"
        yield url, process
    finally:
        process.kill()
        process.wait()


def post(url: str, q: Any) -> Any:
    body = json.dumps({"q": q, "source": "en", "target": "de"}).encode()
    sent = request.Request(f"{url}/translate", body, {"content-type": "application/json"})
    return json.loads(request.urlopen(sent, timeout=PATIENCE).read())["translatedText"]


@pytest.mark.slow
def test_libretranslates_client(server) -> None:
    libretranslatepy = pytest.importorskip("libretranslatepy")
    client = libretranslatepy.LibreTranslateAPI(server[0])
    assert [one["code"] for one in client.languages()] == ["en", "de"]
    assert client.translate("half past nine", "en", "de") == post(server[0], "half past nine")


@pytest.mark.slow
def test_each_answer_belongs_to_its_question(server) -> None:
    lines = [f"{number} past nine" for number in range(20)]
    alone = {line: post(server[0], line) for line in lines}
    with ThreadPoolExecutor(16) as clients:
        for _ in range(2):
            assert list(clients.map(lambda line: post(server[0], line), lines)) == [alone[line] for line in lines]


@pytest.mark.slow
def test_clients_that_vanish_leave_the_others_in_peace(server, log: Path) -> None:
    host, port = server[0].removeprefix("http://").split(":")
    body = json.dumps({"q": ["half past nine"] * 100, "source": "en", "target": "de"}).encode()
    for _ in range(30):
        with socket.create_connection((host, int(port))) as gone:
            head = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            gone.sendall(b"%sContent-Length: %d\r\n\r\n%s" % (head, len(body), body) * 3)  # pipelined
    idle = [socket.create_connection((host, int(port))) for _ in range(200)]
    assert isinstance(post(server[0], "half past nine"), str)
    for one in idle:
        one.close()
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_it_finishes_what_it_has_begun_and_ends_with_0(server) -> None:
    url, process = server
    with pytest.raises(HTTPError, match="400"):
        request.urlopen(request.Request(f"{url}/health", headers={"host": "evil.example"}))
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(post, url, ["half past nine"] * 300)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert len(answer.result(PATIENCE)) == 300
    assert process.wait(PATIENCE) == 0
