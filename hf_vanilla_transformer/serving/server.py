"""Runs the HTTP service until it is told to stop."""

import contextlib
import signal
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp


class _Server(uvicorn.Server):
    """uvicorn, but without its end by the signal itself: the process ends with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        yield


def run(app: ASGIApp, host: str, port: int, *, grace: int) -> None:
    """Serves an application until SIGTERM or Ctrl+C; requests that have begun are answered within `grace` seconds."""
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=grace
    )
    _Server(config).run()
