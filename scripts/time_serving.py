"""Times `vanilla-transformer serve` on loopback: requests of one line by 1, 8 and 64 clients, beside one Translator.

    python -m scripts.time_serving MODEL FILE --languages en-de

The rows: a Translator that gets all lines as a list, or one after the other; the service; and a plain FastAPI function
that calls a Translator for each request. The clients share the machine with the service.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PLAIN = """
import sys, uvicorn
from fastapi import FastAPI
from hf_vanilla_transformer import Translator
app, translator = FastAPI(), Translator(sys.argv[1])
@app.post("/translate")
def translate(body: dict):
    return {"translatedText": translator(body["q"], progress_bar=False)}
@app.get("/health")
def health():
    return {}
uvicorn.run(app, port=int(sys.argv[2]), log_level="warning")
"""


async def _request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> bytes:
    writer.write(b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
    writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return await reader.readexactly(int(length.partition(b":")[2]))


async def clients(port: int, lines: Sequence[str], count: int, pair: Sequence[str]) -> tuple[float, list[float]]:
    """Sends each line in a request, from several clients; returns the seconds of all, and those of each request."""
    left = iter(lines)
    seconds: list[float] = []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for line in left:
            body = json.dumps({"q": line, "source": pair[0], "target": pair[1]}).encode()
            began = time.perf_counter()
            await _request(reader, writer, body)
            seconds.append(time.perf_counter() - began)
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(count)))
    return time.perf_counter() - began, seconds


async def _up(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.5)
        else:
            writer.close()
            return


def _show(name: str, count: int, total: float, seconds: Sequence[float]) -> None:
    p50, p95 = (statistics.quantiles(seconds, n=20)[place] * 1_000 for place in (9, 18))
    print(f"{name:34s} {count / total:8.1f} lines/s   p50 {p50:8.1f} ms   p95 {p95:8.1f} ms", flush=True)


def _memory(process: int) -> str:
    status = Path(f"/proc/{process}/status").read_text()
    kib = int(status.partition("VmHWM:")[2].split()[0])
    return f"{kib / 1024:,.0f} MiB at most"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("--languages", default="en-de")
    parser.add_argument("--lines", type=int, default=1_000)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--port", type=int, default=5055)
    parser.add_argument("--only", choices=["translator", "serve", "plain"], nargs="+")
    arguments, options = parser.parse_known_args()
    lines = arguments.file.read_text(encoding="utf-8").splitlines()[: arguments.lines]
    few = lines[: max(len(lines) // 5, 20)]
    only = arguments.only or ["translator", "serve", "plain"]
    if "translator" in only:
        _time_translator(arguments.model, lines, few)
    serve = [sys.executable, "-m", "hf_vanilla_transformer", "serve", "--model", arguments.model, "--languages"]
    commands = {
        "serve": [*serve, arguments.languages, "--port", str(arguments.port), *options],
        "plain": [sys.executable, "-c", PLAIN, arguments.model, str(arguments.port)],
    }
    for name, command in commands.items():
        if name not in only:
            continue
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            asyncio.run(_up(arguments.port))
            pair = arguments.languages.split("-")
            asyncio.run(clients(arguments.port, few[:20], 1, pair))  # warm
            for count in arguments.clients:
                sent = few if count == 1 else lines
                total, seconds = asyncio.run(clients(arguments.port, sent, count, pair))
                _show(f"{name}, {count} clients", len(sent), total, seconds)
            print(f"{name}: {_memory(server.pid)}")
        finally:
            server.terminate()
            server.wait()


def _time_translator(model: str, lines: Sequence[str], few: Sequence[str]) -> None:
    from hf_vanilla_transformer import Translator

    translator = Translator(model)
    translator(list(lines[:50]), progress_bar=False)
    began = time.perf_counter()
    translator(list(lines), progress_bar=False)
    total = time.perf_counter() - began
    _show("Translator, a list", len(lines), total, [total, total])
    seconds = []
    for line in few:
        began = time.perf_counter()
        translator(line, progress_bar=False)
        seconds.append(time.perf_counter() - began)
    _show("Translator, line by line", len(few), sum(seconds), seconds)


if __name__ == "__main__":
    main()
