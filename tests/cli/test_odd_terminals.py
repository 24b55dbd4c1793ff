"""Terminals, closed and full streams, exhausted memory, bugs: one line, the right exit code, `--debug`."""

import errno
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from hf_vanilla_transformer.cli import output, translate
from hf_vanilla_transformer.translation import decoding

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "hf_vanilla_transformer"]
TRANSLATE = [*COMMAND, "translate", "--greedy", "--max-new-tokens", "2", "--model"]
# Of the processes, whose output is to be buffered as usual.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
PATIENCE = 120  # seconds, for a process that imports torch on a busy machine
ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "121896960 bytes. Error code 12 (Cannot allocate memory)"
)


# Streams


def test_a_closed_standard_input(tiny_checkpoint):
    command = ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, "translate", "--model", str(tiny_checkpoint)]
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)
    message = "standard input is closed; give sentences as arguments, or a file by --input FILE"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"vanilla-transformer: error: {message}\n")


def test_a_closed_standard_output(tiny_checkpoint, tmp_path):
    written = tmp_path / "written"
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *TRANSLATE, str(tiny_checkpoint), "--output", str(written), "nine"]
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)
    assert (result.returncode, result.stderr, written.read_text().count("\n")) == (0, "", 1)


def test_warnings_of_the_library_have_the_name_of_the_program(tiny_checkpoint, tmp_path):
    pytest.importorskip("ctranslate2")
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**settings, "early_stopping": False}))
    command = [*TRANSLATE, str(model), "--backend", "ctranslate2", "nine"]
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0
    assert result.stderr.startswith("vanilla-transformer: warning: early_stopping is False in the model's")


def test_help_that_is_not_read():
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, "translate", "--help"]
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


# Terminals


class _Terminal:
    """A program on a terminal of its own."""

    def __init__(self, command):
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.execve(command[0], command, ENVIRONMENT)
        self.shown = b""
        self.changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        while True:
            try:
                some = os.read(self.file, 10_000)
            except OSError:  # the program has ended
                some = b""
            with self.changed:
                self.shown += some
                self.changed.notify_all()
            if not some:
                return

    def type(self, text):
        os.write(self.file, text)

    def wait_for(self, number, pattern):
        """Waits until the terminal shows as many matches."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(re.findall(pattern, self.shown)) >= number, PATIENCE), self.shown

    def exit_code(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.hard
def test_a_terminal_is_answered_line_by_line(tiny_checkpoint):
    terminal = _Terminal([*TRANSLATE, str(tiny_checkpoint)])
    terminal.wait_for(1, rb"Type one sentence per line; Ctrl-D ends the input.\r\n")
    for number in (1, 2):
        terminal.type(b"twenty-one\n")
        terminal.wait_for(number, rb"twenty-one\r\n")  # the terminal's echo
        terminal.wait_for(number + number + 1, rb"\r\n")  # an answer before the next line is typed
    terminal.type(b"\x04")
    assert terminal.exit_code() == 0
    lines = terminal.shown.split(b"\r\n")
    assert len(lines) == 6
    assert lines[2] == lines[4]
    assert b"sentences/s" not in terminal.shown


# Memory, compilers, bugs


@pytest.fixture
def fail(monkeypatch):
    """Makes the translation, the loading or a whole command raise an error."""

    def fail(error, what="translation"):
        def failing(*arguments, **options):
            raise error

        target, name = {
            "translation": (decoding, "decode"),
            "loading": (translate, "load_translator"),
            "command": (translate, "check_model_name"),
        }[what]
        monkeypatch.setattr(target, name, failing)

    return fail


@pytest.mark.parametrize(
    "error", [RuntimeError(ALLOCATOR), MemoryError(), torch.OutOfMemoryError("Tried to allocate 20.00 MiB. GPU 0")]
)
def test_memory_that_translating_exhausts(vanilla_transformer, tiny_checkpoint, fail, error):
    fail(error)
    result = vanilla_transformer("translate", "--model", tiny_checkpoint, "nine")
    assert (result.code, result.out) == (2, "")
    assert "error: the device is out of memory" in result.error
    assert "; give a smaller --batch-tokens, --batch-size or --max-source-tokens, or another --device" in result.error


@pytest.mark.parametrize("error", [RuntimeError(ALLOCATOR), MemoryError(), OSError(errno.ENOMEM, "Cannot allocate")])
def test_memory_that_anything_else_exhausts(vanilla_transformer, tiny_checkpoint, fail, error):
    fail(error, "command")
    result = vanilla_transformer("translate", "--model", tiny_checkpoint, "nine")
    assert (result.code, result.out) == (1, "")
    assert "error: the memory is exhausted" in result.error
    assert "; close other programs, or give smaller batches" in result.error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyError("bias"), 1, "KeyError: 'bias' (unexpected; give --debug for the traceback)"),
        (RuntimeError("two\nlines"), 1, "RuntimeError: two (unexpected; give --debug for the traceback)"),
        (output.UsageError("wrong use"), 2, "wrong use"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "[Errno 28] No space left on device; free some space"),
        (PermissionError(errno.EACCES, "Permission denied", "file"), 1, "[Errno 13] Permission denied: 'file'"),
    ],
)
@pytest.mark.parametrize("place", ["without", "before", "after"])
def test_one_line_and_the_traceback_if_asked(vanilla_transformer, tiny_checkpoint, fail, error, code, line, place):
    fail(error, "loading")
    before, after = {"without": ([], []), "before": (["--debug"], []), "after": ([], ["--debug"])}[place]
    result = vanilla_transformer(*before, "translate", "--model", tiny_checkpoint, *after, "nine")
    assert (result.code, result.out) == (code, "")
    *traceback, last = result.err.splitlines()
    assert last.startswith(f"vanilla-transformer: error: {line}")
    assert bool(traceback) == (place != "without")
    if traceback:
        assert traceback[0] == "Traceback (most recent call last):"
        assert any("in failing" in row for row in traceback)


def test_ctrl_c_says_where_it_was_only_if_asked(vanilla_transformer, tiny_checkpoint, fail):
    fail(KeyboardInterrupt(), "loading")
    result = vanilla_transformer("translate", "--model", tiny_checkpoint, "nine")
    assert (result.code, result.out, result.err) == (130, "", "")
    result = vanilla_transformer("--debug", "translate", "--model", tiny_checkpoint, "nine")
    assert (result.code, result.out) == (130, "")
    assert result.err.endswith("KeyboardInterrupt\n")
