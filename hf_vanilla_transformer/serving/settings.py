"""Settings of the HTTP service; this module imports nothing that takes time, so that commands can show the defaults."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ServiceSettings:
    """Who may use the service, and what one request may ask for."""

    api_key: str | None = None  # what requests have to give as `api_key`; None: nothing
    cors_origins: Sequence[str] = ()  # origins whose pages may call the service from a browser
    allowed_hosts: Sequence[str] = ("*",)  # what the header Host of requests may name; "*": anything
    characters: int = 50_000  # of `q`, all texts together
    texts: int = 1_000  # of `q`, a list
    body: int = 2_000_000  # bytes
    seconds: int = 60  # from the request to its answer
