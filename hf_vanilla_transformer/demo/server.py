"""Shows the page on one address of this machine, and nothing else. This file travels with a Space.

Gradio's server has routes for files, uploads and pages of its own, which this page needs none of: they are closed.
"""

import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

from .tables import CSS

QUEUE = 32  # requests that wait at most; one is computed at a time
SESSIONS = 1_000  # visitors whose last translations are remembered
FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Ubuntu", "Cantarell", "Noto Sans", "sans-serif"]
FONTS_MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"]

MOST_BYTES = 1_000_000  # of a request
# What a browser or a client of Gradio asks for: the page, its scripts and styles, and its functions.
OPEN = re.compile(
    r"/(config/?|theme\.css|favicon\.ico|robots\.txt|manifest\.json|(assets|static)/.*|gradio_api/("
    r"info/?|config/?|app_id/?|theme\.css|startup-events|reset/?|cancel|heartbeat/\w+|queue/(join|data)|"
    r"run/predict|call/translate(/\w+)?))?"
)

# Ctrl+Enter in the text box, or Cmd+Enter, is the button. Groups of buttons get their titles as names, which Gradio
# shows beside them only.
SCRIPT = """() => {
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || !event.target.closest("#source")) return;
    event.preventDefault();
    document.querySelector("#translate").click();
  });
  for (const group of document.querySelectorAll("fieldset")) {
    const title = group.querySelector("[data-testid='block-info']");
    if (title) group.setAttribute("aria-label", title.textContent);
  }
}"""


class OnlyThePage:
    """Refuses what the page doesn't need, whatever Gradio would answer: paths, and files or addresses as values."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Passes a request on, or answers it with an error."""
        if scope["type"] == "http" and not OPEN.fullmatch(scope["path"]):
            answer = PlainTextResponse("This page has nothing there.", status_code=404)
        elif scope["type"] == "http" and scope["method"] == "POST":
            body = await _body(receive)
            if is_plain(body):
                await self.app(scope, _replayed(body, receive), send)
                return
            answer = PlainTextResponse("This page takes text and numbers.", status_code=400)
        else:
            await self.app(scope, receive, send)
            return
        await answer(scope, receive, send)


async def _body(receive: Any) -> bytes:
    """A request's body; nothing of one that is too large or broken off."""
    body = b""
    while True:
        event = await receive()
        body += event.get("body", b"")
        if event["type"] != "http.request" or len(body) > MOST_BYTES:
            return b""
        if not event.get("more_body"):
            return body


def _replayed(body: bytes, receive: Any) -> Any:
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return waiting.pop() if waiting else await receive()

    return again


def is_plain(body: bytes) -> bool:
    """Whether a request's values are texts, numbers, or nothing; Gradio would fetch files and addresses in others."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        return False
    data = values.get("data") or [] if isinstance(values, dict) else None
    return isinstance(data, list) and all(one is None or isinstance(one, str | int | float) for one in data)


def check_address(host: str, port: int | None) -> None:
    """Checks, before a model is loaded, that the page can be shown there.

    Raises:
        OSError: The address isn't this machine's, or the port is taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def serve(
    page: gr.Blocks, host: str | None = None, port: int | None = None, started: Callable[[str], object] = print
) -> None:
    """Shows the page until the process is interrupted.

    Args:
        page: What `build_page` returned.
        host: The address to listen on; None: 127.0.0.1, or that of the variable GRADIO_SERVER_NAME, which a Space sets.
        port: The port; None: the first that is free from 7860 on.
        started: Called with the page's address when it can be opened.

    Raises:
        OSError: The address or the port can't be used.
    """
    started(start(page, host, port))
    page.block_thread()


def start(page: gr.Blocks, host: str | None = None, port: int | None = None) -> str:
    """Starts the server in a thread, and returns the page's address; arguments and errors as for `serve`."""
    # Gradio asks its own server whether it is there, which no proxy can answer.
    for variable in ("NO_PROXY", "no_proxy"):
        os.environ[variable] = ",".join(filter(None, ("127.0.0.1,localhost", os.environ.get(variable))))
    # No font from elsewhere; hints and the button dark enough to be read.
    theme = gr.themes.Default(primary_hue="blue", font=FONTS, font_mono=FONTS_MONO).set(
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_300",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_text_color="white",
    )
    page.queue(default_concurrency_limit=1, max_size=QUEUE, api_open=False)  # nobody jumps the queue
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=True,
        theme=theme,
        css=CSS,
        js=SCRIPT,
        # Each of these could also be set by a variable of the environment, or is on unless it is switched off.
        share=False,
        inline=False,
        inbrowser=False,
        quiet=True,
        show_error=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        run_history=False,
        enable_monitoring=False,
        footer_links=[],
        num_workers=0,
        state_session_capacity=SESSIONS,
        max_file_size=1,
        allowed_paths=None,
        blocked_paths=[Path.cwd().anchor],
        app_kwargs={"middleware": [Middleware(OnlyThePage)]},
    )
    return str(address)
