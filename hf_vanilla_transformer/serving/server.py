"""Runs the HTTP service until it is told to stop."""

import asyncio
import io
import os
import signal
import stat
import sys
from collections.abc import Callable
from socket import socket

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol


class _Connection(H11Protocol):
    """uvicorn's, but its timer begins at once, and only a complete head stops it; h11 takes heads of 16 KiB."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        self.conn.receive_data(data)
        self.handle_events()


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
    _let_log_be_lost()
    config = uvicorn.Config(app, host=host, port=port, http=_Connection, log_level="warning", access_log=False)
    config.timeout_graceful_shutdown = grace
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises it again at its end
        signal.signal(number, lambda *_: None)
    _Server(config, on_ready).run()


def _let_log_be_lost() -> None:
    """Keeps a service going whose log is a pipe that isn't read: what the pipe has no room for is lost."""
    if sys.platform != "win32" and stat.S_ISFIFO(os.fstat(2).st_mode):
        os.set_blocking(2, False)
        without_buffer = io.FileIO(2, "w", closefd=False)
        sys.stderr = io.TextIOWrapper(without_buffer, "utf-8", "backslashreplace", write_through=True)
