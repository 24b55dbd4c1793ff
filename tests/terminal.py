"""A program on a terminal of its own, for tests of prompts and of Ctrl-C."""

import fcntl
import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
PATIENCE = 120  # seconds, for a process that imports torch on a busy machine


class Terminal:
    """A process of the checkout; `shown` has what it has written and no test has waited for yet."""

    def __init__(self, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        self.main, end = pty.openpty()
        self.shown = b""
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=end, stdout=end, stderr=end, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
        )  # fmt: skip
        os.close(end)

    def wait_for(self, text: str) -> str:
        """Reads until the text has come; what came before it is returned and forgotten."""
        end = time.monotonic() + PATIENCE
        while text.encode() not in self.shown:
            assert time.monotonic() < end, f"no {text!r} in {self.shown.decode()!r}"
            if select.select([self.main], [], [], 0.1)[0]:
                self.shown += os.read(self.main, 4096)
        before, _, self.shown = self.shown.partition(text.encode())
        return before.decode(errors="replace")

    def type(self, keys: bytes) -> None:
        # Python loses an interrupt that comes between its prompt and its reading.
        while psutil.Process(self.process.pid).status() != psutil.STATUS_SLEEPING:
            time.sleep(0.01)
        os.write(self.main, keys)

    def end(self) -> int:
        """Waits for the end; returns the exit code."""
        code = self.process.wait(timeout=PATIENCE)
        while select.select([self.main], [], [], 0)[0]:
            try:
                self.shown += os.read(self.main, 4096)
            except OSError:  # nothing is left
                break
        os.close(self.main)
        return code
