"""Runs the HTTP service until it is told to stop."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import uvicorn


class _Server(uvicorn.Server):
    """uvicorn, but the process ends with 0 after SIGTERM and SIGINT: what was begun is finished."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        handlers = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def run(app: Any, host: str, port: int, *, grace: int = 30) -> None:
    """Serves an application until SIGTERM or Ctrl+C; requests that have begun are answered first.

    Args:
        app: An ASGI application.
        host: Address to listen on.
        port: Port.
        grace: Seconds that requests have to end in.
    """
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=grace
    )
    _Server(config).run()
