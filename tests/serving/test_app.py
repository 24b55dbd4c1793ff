"""The service's API, by requests to the application: LibreTranslate's bodies, errors and status codes."""

import asyncio
import json
import threading
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from hf_vanilla_transformer.documents.links import Linked
from hf_vanilla_transformer.serving import app as service
from hf_vanilla_transformer.serving.batcher import Batcher
from hf_vanilla_transformer.translation.reading import Piece


def capitals(texts: list[str], n_best: int, source: str, target: str, linked: bool) -> list[list[Linked]]:
    """Translates each character into a capital; further translations end with their number."""
    return [[in_order(text.upper() + str(number or "")) for number in range(n_best)] for text in texts]


def in_order(text: str) -> Linked:
    size = len("".join(text.split()))
    ends = np.arange(1.0, size + 1)
    return Linked(text, ((ends, ends, np.eye(size)),))


def sentences(text: str, language: str) -> list[Piece]:
    return [Piece(part, len(part)) for part in text.split(" / ")]


def client(translate: Any = capitals, waiting: int = 1_000, **settings: Any) -> TestClient:
    metrics = service.Metrics()
    count = {"max_waiting_tokens": waiting, "on_batch": metrics.add}
    queue = Batcher(translate, sentences, **count)
    metrics.waiting.set_function(lambda: queue.waiting_tokens)
    models = {("en", "de"): queue.translate, ("en", "fr"): queue.translate}
    return TestClient(service.create_app(models, service.ServiceSettings(**settings), metrics))


def ask(q: Any = "two dogs", **fields: Any) -> dict[str, Any]:
    return {"q": q, "source": "en", "target": "de", **fields}


FORM, JSON = ({"content-type": f"application/{kind}"} for kind in ("x-www-form-urlencoded", "json"))
PARTS = [("q", "a")] * 1_000 + [("source", "en"), ("target", "de"), ("format", "text")]
LINES = ["\ufefftwo dogs\r\n\n run \n", ""]
PAGES = ["<p>two <b>dogs</b> / run", "x"]


@pytest.mark.parametrize(
    ("sent", "translations", "alternatives"),
    [
        ({"json": ask()}, "TWO DOGS", None),
        ({"data": ask()}, "TWO DOGS", None),
        ({"files": {name: (None, value) for name, value in ask().items()}}, "TWO DOGS", None),
        ({"json": ask(["a", "b"], alternatives=2)}, ["A", "B"], [["A1", "A2"], ["B1", "B2"]]),
        ({"files": [(name, (None, value)) for name, value in PARTS]}, ["A"] * 1_000, None),
        ({"data": ask(alternatives="1")}, "TWO DOGS", ["TWO DOGS1"]),
        # Lines are translated one by one.
        (
            {"json": ask(LINES, alternatives=1)},
            ["\ufeffTWO DOGS\r\n\n RUN \n", ""],
            [["\ufeffTWO DOGS1\r\n\n RUN1 \n"], [""]],
        ),
        (
            {"json": ask(PAGES, format="html", alternatives=1)},
            ["<p>TWO <b>DOGS</b> RUN", "X"],
            [["<p>TWO <b>DOGS1</b> RUN1"], ["X1"]],
        ),
        ({"content": "q=schönes+Haus&source=en&target=de".encode(), "headers": FORM}, "SCHÖNES HAUS", None),
    ],
)
def test_answers(sent: dict[str, Any], translations: Any, alternatives: Any) -> None:
    answer = client().post("/translate", **sent)
    more = {} if alternatives is None else {"alternatives": alternatives}
    assert (answer.status_code, answer.json()) == (200, {"translatedText": translations, **more})


def test_some_texts_have_one_translation_and_others_several() -> None:
    def translate(texts: list[str], *options: Any) -> list[list[Linked]]:
        return [row[:1] if len(row[0].text) > 9 else row for row in capitals(texts, *options)]

    texts = ["cat", "two long dogs", "a\ntwo long dogs", "a / two long dogs"]
    assert client(translate).post("/translate", json=ask(texts, alternatives=1)).json() == {
        "translatedText": ["CAT", "TWO LONG DOGS", "A\nTWO LONG DOGS", "A TWO LONG DOGS"],
        "alternatives": [["CAT1"], [], ["A1\nTWO LONG DOGS"], ["A1 TWO LONG DOGS"]],
    }


def test_a_page_has_as_many_elements_as_it_likes() -> None:
    page = "".join(f"<li>item {number}</li>" for number in range(9))
    answer = client(texts=4).post("/translate", json=ask(page, format="html"))
    assert answer.json() == {"translatedText": page.replace("item", "ITEM")}
    assert client().post("/translate", json=ask(f"&#{'1' * 5_000};", format="html")).status_code == 400


def test_fields_of_the_query() -> None:
    for body in ({"data": {"source": "en"}}, {"json": {"source": "en", "format": None}}, {}):
        source = "nn" if body else "en"
        answer = client().post(f"/translate?q=f%C3%BCr&source={source}&target=de&format=", **body)
        assert answer.json() == {"translatedText": "FÜR"}
    answer = client().post("/translate?fromat=html", data=ask())
    assert answer.json() == {"error": "Invalid request: unknown parameter 'fromat'; did you mean 'format'?"}
    assert client().post("/translate?q=f%FCr").json() == {"error": "Invalid request: the form isn't UTF-8"}


@pytest.mark.parametrize(
    ("status", "fields", "problem"),
    [
        (400, ask(None), "Invalid request: missing q parameter"),
        (400, ask([]), "Invalid request: q: List should have at least 1 item"),
        (400, ask([1]), "Invalid request: q: Input should be a valid string"),
        (400, {"q": "x", "target": "de"}, "Invalid request: missing source parameter"),
        (400, ask(alternatve=2), "Invalid request: unknown parameter 'alternatve'; did you mean 'alternatives'?"),
        (400, {"text": "x", "source": "en", "target": "de"}, "Invalid request: unknown parameter 'text'"),
        (400, ask(target="it"), "en to it is not supported; there is en-de, en-fr"),
        (400, ask(format="pdf"), "Invalid request: format: Input should be 'text' or 'html'"),
        (400, ask(alternatives="many"), "Invalid request: alternatives: Input should be"),
        (400, ask(alternatives=11), "Invalid request: alternatives: Input should be"),
        (413, ask("x" * 31), "q has 31 characters, and the limit is 30"),
        (413, ask(["x"] * 5), "q has 5 texts, and the limit is 4"),
    ],
)
def test_wrong_requests(status: int, fields: dict[str, Any], problem: str) -> None:
    answer = client(characters=30, texts=4).post("/translate", json=fields)
    assert answer.status_code == status
    assert answer.json()["error"].startswith(problem)


NOT_UTF8 = "Invalid request: the form isn't UTF-8"
HALF = b'{"q": "\\ud800", "source": "en", "target": "de"}'


@pytest.mark.parametrize(
    ("headers", "body", "problem"),
    [
        *((JSON, body, "") for body in (b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'"x"', b"null", HALF)),
        *((FORM, body + b"&source=en&target=de", NOT_UTF8) for body in (b"q=f\xfcr", b"q=f%FCr")),
        (JSON, rb'{"\ud800": "x"}', r"Invalid request: unknown parameter '\ud800'"),
        ({}, json.dumps(ask()).encode(), "send the header Content-Type: application/json"),
    ],
)
def test_malformed_bodies(headers: dict[str, str], body: bytes, problem: str) -> None:
    answer = client().post("/translate", content=body, headers=headers)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]
    assert answer.json()["error"].startswith("Invalid request")


@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("chunked", [True, False])
def test_long_bodies_are_not_read(kind: str, chunked: bool) -> None:
    body: Any = (b"x" * 1_000 for _ in range(10_000)) if chunked else b"x" * 10_000_000
    answer = client().post("/translate", content=body, headers={"content-type": kind})
    assert (answer.status_code, "Content Too Large" in answer.text) == (413, True)


def test_keys() -> None:
    guarded = client(api_key="secrét")
    assert guarded.post("/translate", json=ask()).status_code == 403
    assert guarded.post("/translate", json=ask(api_key="wrong")).json() == {"error": "Invalid API key"}
    assert guarded.post("/translate", json=ask(api_key="secrét")).status_code == 200
    body = b'{"q": "a", "source": "en", "target": "de", "api_key": "\\ud800"}'
    half = guarded.post("/translate", content=body, headers=JSON)
    assert (half.status_code, "error" in half.json()) == (403, True)
    assert guarded.get("/languages").status_code == guarded.get("/health").status_code == 200


def test_a_models_error_is_the_users() -> None:
    def refuse(texts: list[str], *options: Any) -> list[list[Linked]]:
        raise ValueError("too long for the positions\nmore")

    answer = client(refuse).post("/translate", json=ask())
    assert (answer.status_code, answer.json()) == (400, {"error": "too long for the positions"})


def test_a_full_queue_and_a_deadline() -> None:
    go_on = threading.Event()

    def slow(texts: list[str], *options: Any) -> list[list[Linked]]:
        assert go_on.wait(60)
        return capitals(texts, *options)

    async def run() -> list[int]:
        httpx = import_module("httpx2" if find_spec("httpx2") else "httpx")  # TestClient takes either
        application = client(slow, waiting=10, seconds=1).app
        async with httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://x") as http:
            first = asyncio.create_task(http.post("/translate", json=ask("x" * 9)))
            await asyncio.sleep(0.2)  # the model works on it
            second = asyncio.create_task(http.post("/translate", json=ask("x" * 9)))
            await asyncio.sleep(0.2)  # it waits
            other = asyncio.create_task(http.post("/translate", json=ask("y" * 9)))
            await asyncio.sleep(0.1)
            third = await http.post("/translate", json=ask("x" * 9))
            assert third.headers["retry-after"] == "2"
            answers = [await first, await second, await other, third]
            go_on.set()
        return [answer.status_code for answer in answers]

    assert asyncio.run(run()) == [504, 504, 504, 503]


def test_what_is_there() -> None:
    service_ = client()
    assert service_.get("/languages").json() == [
        {"code": "en", "name": "English", "targets": ["de", "fr"]},
        {"code": "de", "name": "German", "targets": []},
        {"code": "fr", "name": "French", "targets": []},
    ]
    pairs = dict.fromkeys([("zh-Hans", "pt_BR"), ("xx", "en")], capitals)
    names = TestClient(service.create_app(pairs)).get("/languages").json()
    assert [one["name"] for one in names] == ["Simplified Chinese", "xx", "Brazilian Portuguese", "English"]
    assert 'href="docs"' in service_.get("/").text
    assert service_.get("/health").json() == {"status": "ok"}
    assert service_.get("/nowhere").json() == {"error": "Not Found"}
    assert "q" in str(service_.get("/openapi.json").json()["paths"]["/translate"])
    assert "access-control-allow-origin" not in service_.get("/health", headers={"origin": "http://a"}).headers


def test_pages_of_other_sites_and_names_of_other_hosts() -> None:
    """A form needs no CORS, and a name that leads to this machine is a site of its own (DNS rebinding)."""
    careful = client(allowed_hosts=["localhost", "[::1]"], cors_origins=["http://friend"])
    form = {"data": ask(), "headers": {"host": "localhost:5000"}}
    assert careful.post("/translate", **form).status_code == 200
    for site, origin, status in (
        ("cross-site", "http://evil", 403), ("same-site", "http://localhost:1", 403), ("cross-site", "null", 403),
        ("cross-site", "http://friend", 200), ("same-origin", "http://localhost:5000", 200), ("none", "", 200),
    ):  # fmt: skip
        form["headers"] |= {"sec-fetch-site": site, "origin": origin}
        assert careful.post("/translate", **form).status_code == status
    for host, status in (("[::1]:5000", 200), ("evil.example:5000", 400), ("localhost.evil.example", 400)):
        assert careful.get("/health", headers={"host": host}).status_code == status


def test_metrics() -> None:
    counted = client()
    counted.post("/translate", json=ask(["one", "four"], alternatives=2))
    counted.post("/translate", json=ask(source="xx"))
    text = counted.get("/metrics").text
    assert 'translation_requests_total{status="200"} 1.0' in text
    assert 'translation_requests_total{status="400"} 1.0' in text
    assert "translation_source_tokens_total 7.0" in text
    assert "translation_waiting_tokens 0.0" in text
