"""The HTTP service: LibreTranslate's API over models of `Translator`.

`POST /translate`, `POST /detect`, `GET /languages`, `GET /health`, `GET /metrics`, a page at `/`, and the API's
description at `/docs`.
"""

import asyncio
import math
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qs

from ..errors import did_you_mean, first_line, install

try:
    from babel import Locale
    from fastapi import FastAPI, Request
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.middleware.trustedhost import TrustedHostMiddleware
    from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from pydantic import BaseModel, Field, ValidationError
    from starlette.exceptions import HTTPException
    from starlette.middleware.body_limit import RequestBodyLimitMiddleware
    from starlette.requests import ClientDisconnect
except ImportError as error:
    raise ImportError(f"the service needs {error.name}, which isn't installed: {install('serve')}") from error

from ..documents.document import open_document
from ..documents.links import Document, Linked
from .batcher import BATCH_TOKENS, QueueFullError
from .detection import Detector, Guess
from .settings import ServiceSettings

Answer = dict[str, str | list[str] | list[list[str]] | Guess | list[Guess]]
AUTO = '<option value="auto">any language (detected)</option>'
# The page, with its own script and nothing from elsewhere
POLICY = "default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
# Translates the texts of a request, as `Batcher.translate` does, here or on another machine.
AsyncTranslate = Callable[..., Awaitable[list[list[Linked]]]]
ByPair = Mapping[tuple[str, str], AsyncTranslate]  # source and target language -> what translates


class Metrics:
    """Counters for Prometheus, of one service."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter("translation_requests", "Requests by status", ["status"], registry=registry)
        self.seconds = Histogram("translation_request_seconds", "From request to answer", registry=registry)
        self.tokens = Counter("translation_source_tokens", "Source tokens that were translated", registry=registry)
        self.texts = Counter("translation_texts", "Texts that were translated", registry=registry)
        fills = (0.02, 0.05, 0.1, 0.2, 0.5, 1)
        self.fill = Histogram("translation_batch_fill", "Share of a full batch", buckets=fills, registry=registry)
        self.waiting = Gauge("translation_waiting_tokens", "Source tokens that wait for a batch", registry=registry)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request."""
        status = 500
        try:
            with self.seconds.time():
                yield
            status = 200
        except HTTPException as error:
            status = error.status_code
            raise
        finally:
            self.requests.labels(str(status)).inc()

    def add(self, texts: int, tokens: int) -> None:
        """Counts a batch."""
        self.texts.inc(texts)
        self.tokens.inc(tokens)
        self.fill.observe(tokens / BATCH_TOKENS)


class Texts(BaseModel):
    """What `POST /detect` takes, as JSON or as a form."""

    q: str | Annotated[list[str], Field(min_length=1, fail_fast=True)] = Field(description="One text or several")
    api_key: str = ""


class Fields(Texts):
    """What `POST /translate` takes: all that LibreTranslate's API has."""

    source: str = Field(min_length=1, examples=["en"])
    target: str = Field(min_length=1, examples=["de"])
    format: Literal["text", "html"] = "text"
    alternatives: int = Field(0, ge=0, le=10)


Asked = TypeVar("Asked", bound=Texts)
Work = Callable[[Asked, list[str]], Awaitable[object]]  # fields and texts of a request -> its answer


def create_app(models: ByPair, settings: ServiceSettings | None = None, metrics: Metrics | None = None) -> FastAPI:
    """Returns the service as an ASGI application; `models` are what translates by pair of languages, source and target.

    Without `metrics`, there is no `/metrics`.
    """
    settings, counters = settings or ServiceSettings(), metrics or Metrics()

    open_document("", ".html")  # a library that is missing is an error now
    app = FastAPI(title="vanilla-transformer serve")

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    app.add_exception_handler(Exception, lambda request, error: JSONResponse({"error": "internal error"}, 500))
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=settings.body)
    if origins := settings.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=settings.allowed_hosts)
    codes = dict.fromkeys([source for source, _ in models] + [target for _, target in models])
    detector = cache(partial(Detector, codes))  # which the first request that needs it opens
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    page = page.replace("{{key}}", "" if settings.api_key else "hidden")
    page = page.replace("{{detect}}", AUTO if find_spec("py3langid") else "")
    show = HTMLResponse(page, headers={"Content-Security-Policy": POLICY})
    app.add_route("/", lambda request: show, include_in_schema=False)

    @app.post("/translate", openapi_extra=_described(Fields), summary="Translate one text or several")
    async def translate(request: Request) -> Response:
        with counters.request():
            return await _answer(request, Fields, settings, partial(_translate, models=models, detector=detector))

    @app.post("/detect", openapi_extra=_described(Texts), summary="Detect the language of a text")
    async def detect(request: Request) -> Response:
        async def work(fields: Texts, texts: list[str]) -> list[Guess]:
            return detector().rank("\n".join(texts))

        return await _answer(request, Texts, settings, work)

    @app.get("/languages", summary="List the languages")
    async def languages() -> list[dict[str, str | list[str]]]:
        names = {code: Locale("en").languages.get(code.replace("-", "_"), code) for code in codes}
        targets = {code: [target for source, target in models if source == code] for code in codes}
        return [{"code": code, "name": names[code], "targets": targets[code]} for code in codes]

    @app.get("/health", summary="Say that the service is up")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    if metrics is not None:

        @app.get("/metrics", response_class=PlainTextResponse, summary="Metrics for Prometheus")
        async def show_metrics() -> Response:
            return Response(generate_latest(counters.registry), media_type=CONTENT_TYPE_LATEST)

    return app


async def _answer(request: Request, asked: type[Asked], settings: ServiceSettings, work: Work[Asked]) -> Response:
    _check_site(request, settings.cors_origins)
    try:
        async with asyncio.timeout(settings.seconds):
            fields = await _fields(request, asked)
            return JSONResponse(await _unless_gone(request, work(fields, _texts(fields, settings))))
    except ClientDisconnect as error:
        raise HTTPException(499, "the client has closed the connection") from error
    except TimeoutError as error:
        raise HTTPException(504, f"not translated within {settings.seconds:g} seconds") from error
    except QueueFullError as error:
        raise HTTPException(503, f"busy: {error}; try again", headers={"Retry-After": "2"}) from error
    except (ValueError, ImportError) as error:
        raise HTTPException(400, first_line(error)) from error


async def _fields(request: Request, asked: type[Asked]) -> Asked:
    """Returns the fields of the query and of the body (JSON or a form); the body has precedence."""
    query, kind = _form(request.scope["query_string"]), request.headers.get("content-type", "").lower()
    if "json" in kind:
        try:
            fields = await request.json()
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError among them
            raise HTTPException(400, f"Invalid request: the body isn't valid JSON ({first_line(error)})") from error
    elif "multipart" in kind:
        form = await request.form(max_fields=math.inf, max_part_size=sys.maxsize)  # of which the app limits the body
        fields = _without_lists_of_one({name: form.getlist(name) for name in form})
    elif (body := await request.body()).lstrip().startswith(b"{"):
        raise HTTPException(400, "Invalid request: the body is JSON; send the header Content-Type: application/json")
    else:
        fields = _form(body)
    if not isinstance(fields, dict):
        raise HTTPException(400, "Invalid request: the body has to be a JSON object")
    given = query | {name: value for name, value in fields.items() if value is not None}
    if unknown := sorted(given.keys() - asked.model_fields):
        name = unknown[0][:40]  # it may be as long as the body
        hint = did_you_mean(name, asked.model_fields)
        raise HTTPException(400, f"Invalid request: unknown parameter {name!r}{hint}")
    try:
        return asked.model_validate(given | {"format": given.get("format") or "text"})
    except ValidationError as error:
        problem = error.errors()[-1]  # of a union, the last says most
        name = problem["loc"][0]
        reason = f"missing {name} parameter" if problem["type"] == "missing" else f"{name}: {problem['msg']}"
        raise HTTPException(400, f"Invalid request: {reason}") from error


def _form(encoded: bytes) -> dict[str, Any]:
    """Parses a form or a query; Starlette would read bytes that aren't percent-encoded as Latin-1."""
    try:
        return _without_lists_of_one(parse_qs(encoded.decode(), keep_blank_values=True, errors="strict"))
    except UnicodeDecodeError as error:
        raise HTTPException(400, "Invalid request: the form isn't UTF-8") from error


def _without_lists_of_one(lists: Mapping[str, list[Any]]) -> dict[str, Any]:
    return {name: values[0] if len(values) == 1 else values for name, values in lists.items()}


async def _unless_gone(request: Request, work: Awaitable[object]) -> object:
    """Awaits an answer; cancels it and raises `ClientDisconnect` when the client closes the connection."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        answer.cancel()
        leaving.cancel()


async def _translate(fields: Fields, texts: list[str], models: ByPair, detector: Callable[[], Detector]) -> Answer:
    is_html = fields.format == "html"
    form, do = (".html", asyncio.to_thread) if is_html else ("", _at_once)  # pages take a while
    number = fields.alternatives + 1
    documents = await do(lambda: [open_document(text, form, fields.target) for text in texts])
    guesses, sources = list[Guess](), [fields.source] * len(texts)
    if fields.source == "auto":
        guesses = detector().each(["\n".join(document.texts) for document in documents])
        sources = [str(guess["language"]) for guess in guesses]
    stays = fields.target if guesses else None  # as with LibreTranslate
    found: dict[tuple[str, str], list[Linked]] = {}
    for source in dict.fromkeys(sources):
        if source == stays:
            continue
        if (translate := models.get((source, fields.target))) is None:
            pairs = ", ".join("-".join(pair) for pair in sorted(models)[:20])
            raise ValueError(f"{source} to {fields.target} is not supported; there is {pairs}")
        own = (document.texts for document, one in zip(documents, sources, strict=True) if one == source)
        wanted = list(dict.fromkeys(chain.from_iterable(own)))
        rows = await translate(wanted, number, source=source, target=fields.target, linked=is_html)
        found |= {(source, text): row for text, row in zip(wanted, rows, strict=True)}

    def translations(document: Document, source: str, text: str) -> list[str]:
        if source == stays:
            return [text]
        of = {text: found[source, text] for text in document.texts}  # some texts have fewer translations than others
        ranks = range(max(map(len, of.values()), default=number))
        return [document.translated({text: row[min(rank, len(row) - 1)] for text, row in of.items()}) for rank in ranks]

    answers = await do(lambda: list(map(translations, documents, sources, texts)))
    best, others = [row[0] for row in answers], [row[1:] for row in answers]
    is_list = isinstance(fields.q, list)
    answer: Answer = {"translatedText": best if is_list else best[0]}
    if fields.alternatives:
        answer["alternatives"] = others if is_list else others[0]
    if guesses:
        answer["detectedLanguage"] = guesses if is_list else guesses[0]
    return answer


async def _at_once(work: Callable[[], Any]) -> Any:
    return work()


def _check_site(request: Request, origins: Sequence[str]) -> None:
    """Refuses what browsers send for pages of other sites; a form needs no CORS."""
    site, origin = (request.headers.get(name) for name in ("sec-fetch-site", "origin"))
    if site in ("cross-site", "same-site") and not {"*", origin}.intersection(origins):
        raise HTTPException(403, f"pages of {origin} may not use this service; its --cors-origin lets them")


def _texts(fields: Texts, settings: ServiceSettings) -> list[str]:
    """Returns the texts of a request that may ask for that much."""
    given, right = fields.api_key.encode(errors="surrogatepass"), settings.api_key
    if right is not None and not secrets.compare_digest(given, right.encode()):
        raise HTTPException(403, "Invalid API key" if given else "api_key is missing; ask who runs this service")
    texts = [fields.q] if isinstance(fields.q, str) else fields.q
    if len(texts) > settings.texts:
        raise HTTPException(413, f"q has {len(texts):,} texts, and the limit is {settings.texts:,}")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise HTTPException(400, "Invalid request: q has half a surrogate pair, so it isn't Unicode") from error
    if (characters := sum(map(len, texts))) > settings.characters:
        raise HTTPException(413, f"q has {characters:,} characters, and the limit is {settings.characters:,}")
    return texts


def _described(asked: type[Texts]) -> dict[str, Any]:
    """Returns what /docs says of a request's body."""
    forms = ("application/json", "application/x-www-form-urlencoded", "multipart/form-data")
    content = {form: {"schema": asked.model_json_schema()} for form in forms}
    return {"requestBody": {"required": True, "content": content}}
