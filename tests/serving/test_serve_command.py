"""`vanilla-transformer serve`: what it says, and as a process, with clients that vanish, and its end."""

import json
import shutil
import signal
import socket
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
from tests.serving.processes import PATIENCE, ask, serving


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


def test_a_model_that_translates_the_other_way_is_refused(
    vanilla_transformer, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    (model / "model_card.json").write_text('{"source_language": "en", "target_language": "de"}')
    code, _, error = vanilla_transformer("serve", "--model", f"deu-eng={model}")
    assert (code, "deu-eng: the model says that it translates en-de" in error) == (2, True)


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit):
        http.run(FastAPI(), *taken.getsockname(), grace=1, on_ready=lambda: pytest.fail("it says that it is ready"))


# ---- A process ----
@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve") / "log"


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path, log: Path) -> Iterator[Any]:
    command = ["-m", "hf_vanilla_transformer", "serve", "--port", "{port}", "--threads", "1"]
    models = ["--model", f"en-de={tiny_checkpoint}", f"de-en={tiny_checkpoint}"]
    ready = "http://127.0.0.1:{port} translates en-de, de-en\n"
    with log.open("wb") as errors, serving(*command, *models, ready=ready, errors=errors) as server:
        yield server


@pytest.mark.slow
def test_each_answer_belongs_to_its_question(server) -> None:
    port, _ = server
    lines = [f"{number} past nine" for number in range(8)]
    alone = {line: ask(port, line) for line in lines}
    with ThreadPoolExecutor(16) as clients:
        assert list(clients.map(lambda line: ask(port, line), 2 * lines)) == 2 * [alone[line] for line in lines]
    libretranslatepy = pytest.importorskip("libretranslatepy")
    client = libretranslatepy.LibreTranslateAPI(f"http://127.0.0.1:{port}")
    assert [one["code"] for one in client.languages()] == ["en", "de"]
    assert (200, client.translate(lines[0], "en", "de")) == alone[lines[0]]


@pytest.mark.slow
def test_clients_that_vanish_leave_the_others_in_peace(server, log: Path) -> None:
    port, _ = server
    body = json.dumps({"q": ["half past nine"] * 100, "source": "en", "target": "de"}).encode()
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", port)) as gone:
            head = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            gone.sendall(b"%sContent-Length: %d\r\n\r\n%s" % (head, len(body), body) * 3)  # pipelined
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    assert ask(port, "half past nine")[0] == 200
    for one in idle:
        one.close()
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_it_finishes_what_it_has_begun_and_ends_with_0(server) -> None:
    port, process = server
    with pytest.raises(HTTPError, match="400"):
        request.urlopen(request.Request(f"http://127.0.0.1:{port}/health", headers={"host": "evil.example"}))
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(ask, port, ["half past nine"] * 200)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert len(answer.result(PATIENCE)[1]) == 200
    assert process.wait(PATIENCE) == 0
