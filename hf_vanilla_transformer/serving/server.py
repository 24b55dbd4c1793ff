"""Runs the HTTP service until it is told to stop."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from socket import socket

import uvicorn
from starlette.types import ASGIApp


class _Server(uvicorn.Server):
    """uvicorn, but it says when it is ready, and doesn't end by the signal itself: the process ends with 0."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)  # which ends the process if the port is taken
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        yield


def run(app: ASGIApp, host: str, port: int, *, grace: int, on_ready: Callable[[], object]) -> None:
    """Serves an application until SIGTERM or Ctrl+C.

    Args:
        app: The application.
        host: Address to listen on.
        port: Port.
        grace: Seconds in which requests that have begun are answered at the end.
        on_ready: Called when it listens.
    """
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=grace
    )
    _Server(config, on_ready).run()
