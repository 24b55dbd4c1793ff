"""Runs the HTTP service until it is told to stop."""

import signal
from collections.abc import Callable
from socket import socket

import uvicorn
from starlette.types import ASGIApp


class _Server(uvicorn.Server):
    """uvicorn, but it says when it is ready."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)  # which ends the process if the port is taken
        self._on_ready()


def run(app: ASGIApp, host: str, port: int, *, grace: int, on_ready: Callable[[], object]) -> None:
    """Serves an application until SIGTERM or Ctrl+C; requests that have begun then have `grace` seconds."""
    # h11 takes heads of 16 KiB.
    config = uvicorn.Config(app, host=host, port=port, http="h11", log_level="warning", access_log=False)
    config.timeout_graceful_shutdown = grace
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises it again at its end
        signal.signal(number, lambda *_: None)
    _Server(config, on_ready).run()
