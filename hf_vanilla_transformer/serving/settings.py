"""Settings of the HTTP service; this module imports nothing that takes time, so that commands can show the defaults."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ServiceSettings:
    """Who may use the service, and what one request may ask for.

    Attributes:
        api_key: What requests have to give as `api_key`; None: nothing.
        cors_origins: Origins whose pages may call the service from a browser.
        allowed_hosts: What the header Host of requests may name; "*": anything.
        characters: Characters of `q`, all texts together.
        texts: Texts of `q`, a list.
        body: Bytes of a body.
        seconds: From the request to its answer.
    """

    api_key: str | None = None
    cors_origins: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ("*",)
    characters: int = 50_000
    texts: int = 1_000
    body: int = 2_000_000
    seconds: int = 60
