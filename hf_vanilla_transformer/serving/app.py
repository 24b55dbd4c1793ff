"""The HTTP service: LibreTranslate's API over models of `Translator`.

`POST /translate`, `GET /languages`, `GET /health`, `GET /metrics`, and the API's description at `/docs`.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import first_line, install

try:
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import JSONResponse, PlainTextResponse, Response
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from starlette.exceptions import HTTPException as StarletteHTTPException
except ImportError as error:
    raise ImportError(f"the service needs {error.name}, which isn't installed: {install('serve')}") from error

from .batcher import Batch, QueueFullError
from .markup import Document
from .models import Route

MAX_ALTERNATIVES = 10
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
NOT_DETECTED = "auto isn't available: no model here detects languages; give the source's code, see /languages"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    Attributes:
        characters: Characters of `q`, all texts together.
        texts: Texts of `q`.
        body: Bytes of a body.
        seconds: From the request to its answer.
    """

    characters: int = 50_000
    texts: int = 1_000
    body: int = 2_000_000
    seconds: float = 60.0


class Metrics:
    """Counters for Prometheus, of one service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        common: Any = {"registry": self.registry, "namespace": "translation"}
        self.requests = Counter("requests", "Requests of /translate by status", ["status"], **common)
        self.seconds = Histogram("request_seconds", "From request to answer", buckets=SECONDS, **common)
        self.tokens = Counter("source_tokens", "Source tokens that were translated", **common)
        self.texts = Counter("texts", "Texts that were translated", **common)
        self.fill = Histogram("batch_fill", "Tokens of a batch by those of a full one", buckets=SECONDS[3:8], **common)
        self.waiting = Gauge("waiting_tokens", "Source tokens that wait for a batch", **common)

    def add(self, batch: Batch) -> None:
        """Counts a batch."""
        self.tokens.inc(batch.tokens)
        self.texts.inc(batch.texts)
        self.fill.observe(batch.fill)


class Overlong:
    """ASGI middleware that ends a request whose body is too long with 413, before it is in memory."""

    def __init__(self, app: Any, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles a request."""
        size = 0

        async def counted() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.limit:
                raise HTTPException(413, f"the body has more than {self.limit:,} bytes")
            return message

        await self.app(scope, counted, send)


def create_app(
    routes: Mapping[tuple[str, str], Route],
    metrics: Metrics | None = None,
    *,
    names: Mapping[str, str] | None = None,
    api_key: str | None = None,
    limits: Limits | None = None,
    cors_origins: Sequence[str] = (),
) -> FastAPI:
    """Returns the service as an ASGI application.

    Args:
        routes: Source and target language -> what translates.
        metrics: Where the batchers count.
        names: Language -> its name in English, for `/languages`.
        api_key: What requests have to give as `api_key`; None: nothing.
        limits: What a request may ask for.
        cors_origins: Origins whose pages may call the service from a browser.
    """
    limits, metrics = limits or Limits(), metrics or Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        for batcher in {route.batcher for route in routes.values()}:
            await batcher.close()

    app = FastAPI(title="vanilla-transformer serve", lifespan=lifespan)
    app.add_exception_handler(StarletteHTTPException, _error)
    app.add_middleware(Overlong, limit=limits.body)
    if cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["*"], allow_headers=["*"])

    @app.post("/translate", openapi_extra=_DESCRIPTION, summary="Translate one text or several")
    async def translate(request: Request) -> Response:
        began, status = time.perf_counter(), 500
        try:
            work = _translate(await _fields(request), routes, api_key, limits)
            answer = await _unless_gone(request, asyncio.wait_for(work, limits.seconds))
            status = 200
            return JSONResponse(answer)
        except StarletteHTTPException as error:
            status = error.status_code
            raise
        except TimeoutError as error:
            status = 504
            raise HTTPException(504, f"not translated within {limits.seconds:g} seconds") from error
        finally:
            metrics.requests.labels(str(status)).inc()
            metrics.seconds.observe(time.perf_counter() - began)

    @app.get("/languages", summary="List the languages")
    async def languages() -> list[dict[str, Any]]:
        sources = dict.fromkeys(source for source, _ in routes)
        targets = dict.fromkeys(target for _, target in routes)
        return [
            {"code": code, "name": (names or {}).get(code, code), "targets": [to for one, to in routes if one == code]}
            for code in {**sources, **targets}
        ]

    @app.get("/health", summary="Say that the service is up")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse, summary="Metrics for Prometheus")
    async def show_metrics() -> Response:
        metrics.waiting.set(sum(one.waiting_tokens for one in {route.batcher for route in routes.values()}))
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


async def _error(request: Request, error: Any) -> JSONResponse:
    return JSONResponse({"error": str(error.detail)}, error.status_code, headers=getattr(error, "headers", None))


async def _fields(request: Request) -> Mapping[str, Any]:
    """Returns the fields of a body, JSON or a form."""
    if "json" not in request.headers.get("content-type", ""):
        form = await request.form()
        return {name: values[0] if len(values := form.getlist(name)) == 1 else values for name in form}
    try:
        fields = await request.json()
    except ValueError as error:  # UnicodeDecodeError among them
        raise HTTPException(400, f"Invalid request: the body is no JSON ({first_line(error)})") from error
    except RecursionError as error:
        raise HTTPException(400, "Invalid request: the body is nested too deeply") from error
    if not isinstance(fields, dict):
        raise HTTPException(400, "Invalid request: the body has to be a JSON object")
    return fields


async def _unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """Awaits an answer, and cancels it when the client closes the connection."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise HTTPException(499, "the client has closed the connection")
        return answer.result()
    finally:
        answer.cancel()
        leaving.cancel()


async def _translate(
    fields: Mapping[str, Any], routes: Mapping[tuple[str, str], Route], api_key: str | None, limits: Limits
) -> dict[str, Any]:
    _check_key(fields.get("api_key"), api_key)
    texts = _texts(fields.get("q"), limits)
    route = _route(fields, routes)
    alternatives = _alternatives(fields.get("alternatives", 0))
    if (form := fields.get("format") or "text") not in ("text", "html"):
        raise HTTPException(400, f"{form!r} format is not supported; give text or html")
    if form == "html" and alternatives:
        raise HTTPException(400, "alternatives are for the format text")
    translate = _html if form == "html" else _text
    rows = await translate(route, texts, alternatives + 1)
    best, others = [row[0] for row in rows], [row[1:] for row in rows]
    is_list = not isinstance(fields["q"], str)
    answer: dict[str, Any] = {"translatedText": best if is_list else best[0]}
    return answer | ({"alternatives": others if is_list else others[0]} if alternatives else {})


async def _text(route: Route, texts: list[str], n_best: int) -> list[list[str]]:
    try:
        return await route.batcher.translate(texts, n_best=n_best, target_lang=route.target_lang)
    except QueueFullError as error:
        raise HTTPException(503, f"busy: {error}; try again", headers={"Retry-After": "2"}) from error
    except ValueError as error:
        raise HTTPException(400, first_line(error)) from error


async def _html(route: Route, texts: list[str], n_best: int) -> list[list[str]]:
    documents = [Document(text) for text in texts]
    wanted = list(dict.fromkeys(text for document in documents for text in document.texts))
    rows = await _text(route, wanted, n_best)
    translations = {text: row[0] for text, row in zip(wanted, rows, strict=True)}
    return [[document.translated(translations)] for document in documents]


def _check_key(given: object, api_key: str | None) -> None:
    if api_key is None:
        return
    if not isinstance(given, str) or not secrets.compare_digest(given.encode(), api_key.encode()):
        raise HTTPException(403, "Invalid API key" if given else "api_key is missing; ask who runs this service")


def _texts(q: object, limits: Limits) -> list[str]:
    if q is None or q == []:
        raise HTTPException(400, "Invalid request: missing q parameter")
    texts = [q] if isinstance(q, str) else q
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise HTTPException(400, "Invalid request: q has to be a string or a list of strings")
    if len(texts) > limits.texts:
        raise HTTPException(413, f"q has {len(texts):,} texts, and the limit is {limits.texts:,}")
    if (characters := sum(map(len, texts))) > limits.characters:
        raise HTTPException(413, f"q has {characters:,} characters, and the limit is {limits.characters:,}")
    return texts


def _route(fields: Mapping[str, Any], routes: Mapping[tuple[str, str], Route]) -> Route:
    source, target = fields.get("source"), fields.get("target")
    for name, value in (("source", source), ("target", target)):
        if not isinstance(value, str) or not value:
            raise HTTPException(400, f"Invalid request: missing {name} parameter")
    if source == "auto":
        raise HTTPException(400, NOT_DETECTED)
    if (route := routes.get((str(source), str(target)))) is None:
        pairs = ", ".join("-".join(pair) for pair in sorted(routes)[:20])
        raise HTTPException(400, f"{source} to {target} is not supported; there is {pairs}")
    return route


def _alternatives(value: object) -> int:
    try:
        number = int(str(value or 0))
    except ValueError:
        number = -1
    if not 0 <= number <= MAX_ALTERNATIVES:
        raise HTTPException(400, f"alternatives has to be an integer from 0 to {MAX_ALTERNATIVES}")
    return number


_FIELDS: dict[str, Any] = {
    "q": {
        "description": "One text or several",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    },
    "source": {"type": "string", "example": "en"},
    "target": {"type": "string", "example": "de"},
    "format": {"type": "string", "enum": ["text", "html"], "default": "text"},
    "alternatives": {"type": "integer", "default": 0, "maximum": MAX_ALTERNATIVES},
    "api_key": {"type": "string", "default": ""},
}
_SCHEMA = {"schema": {"type": "object", "required": ["q", "source", "target"], "properties": _FIELDS}}
_FORMS = ("application/json", "application/x-www-form-urlencoded", "multipart/form-data")
_DESCRIPTION: dict[str, Any] = {"requestBody": {"required": True, "content": dict.fromkeys(_FORMS, _SCHEMA)}}
