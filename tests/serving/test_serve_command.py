"""`vanilla-transformer serve` as a process: a client from the registry, clients that vanish, and its end."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib import request
from urllib.error import HTTPError

import pytest

from hf_vanilla_transformer import cli

pytestmark = pytest.mark.slow
PATIENCE = 300


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


def test_libretranslates_client(server) -> None:
    libretranslatepy = pytest.importorskip("libretranslatepy")
    client = libretranslatepy.LibreTranslateAPI(server[0])
    assert [one["code"] for one in client.languages()] == ["en", "de"]
    assert client.translate("half past nine", "en", "de") == post(server[0], "half past nine")


def test_a_port_that_is_taken(server, tiny_checkpoint: Path) -> None:
    command = [sys.executable, "-m", "hf_vanilla_transformer", "serve", "--port", server[0].rpartition(":")[2]]
    options = {"capture_output": True, "text": True, "timeout": PATIENCE}
    second = subprocess.run([*command, "--model", f"en-de={tiny_checkpoint}"], check=False, **options)
    assert second.returncode
    assert "address already in use" in second.stderr
    assert not second.stdout


def test_without_ray_the_extra_is_named(tiny_checkpoint: Path, monkeypatch, capsys) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray" or ".serving.ray" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["serve", "--model", f"en-de={tiny_checkpoint}", "--ray"]) == 2
    assert "Ray isn't installed: run pip install '.[ray]'" in capsys.readouterr().err


def test_each_answer_belongs_to_its_question(server) -> None:
    lines = [f"{number} past nine" for number in range(40)]
    alone = {line: post(server[0], line) for line in lines}
    with ThreadPoolExecutor(16) as clients:
        for _ in range(3):
            assert list(clients.map(lambda line: post(server[0], line), lines)) == [alone[line] for line in lines]


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


@pytest.mark.parametrize(("head", "seconds"), [(b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000, 2), (b"GET /", 8), (b"", 8)])
def test_heads_that_are_too_long_or_never_end(server, head: bytes, seconds: int) -> None:
    host, port = server[0].removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as client:
        client.sendall(head)
        with suppress(ConnectionResetError):  # another way to be closed, where the head wasn't read to its end
            while client.recv(1_000):
                pass


def test_the_host_is_checked_on_an_address_of_this_machine(server) -> None:
    with pytest.raises(HTTPError, match="400"):
        request.urlopen(request.Request(f"{server[0]}/health", headers={"host": "evil.example"}))


def test_it_finishes_what_it_has_begun_and_ends_with_0(server) -> None:
    url, process = server
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(post, url, ["half past nine"] * 300)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert len(answer.result(PATIENCE)) == 300
    assert process.wait(PATIENCE) == 0
