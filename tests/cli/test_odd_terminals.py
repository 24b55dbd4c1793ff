"""Terminals, closed and full streams, exhausted memory, bugs: one line, the right exit code, `--debug`."""

import errno
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_vanilla_transformer import cli
from hf_vanilla_transformer.cli import output, translate
from hf_vanilla_transformer.translation.translator import Translator
from tests.terminal import Terminal

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "hf_vanilla_transformer"]
TRANSLATE = ["translate", "--max-new-tokens", "2", "--model"]
# Of the processes, whose output is to be buffered as usual.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
PATIENCE = 120  # seconds, for a process that imports torch on a busy machine
ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "121896960 bytes. Error code 12 (Cannot allocate memory)"
)


# Streams


def test_a_closed_standard_input(vanilla_transformer, tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    result = vanilla_transformer("translate", "--model", tiny_checkpoint)
    message = "standard input is closed; give sentences as arguments, or a file by --input FILE"
    assert result == (2, "", f"vanilla-transformer: error: {message}\n")


def test_a_closed_standard_output(vanilla_transformer, tiny_checkpoint, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", None)
    written = tmp_path / "written"
    assert cli.main([*TRANSLATE, str(tiny_checkpoint), "--output", str(written), "nine"]) == 0
    assert written.read_text().count("\n") == 1
    sys.stdout.close()


@pytest.mark.parametrize("sign", ["<&-", ">&-"])
def test_a_stream_that_the_shell_closes(sign):
    """Nothing heavy is imported."""
    command = ["sh", "-c", f'exec "$@" {sign}', "sh", *COMMAND, "--version"]
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_full_disk_is_one_line(tiny_checkpoint, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main([*TRANSLATE, str(tiny_checkpoint), "nine"]) == 1
    assert re.fullmatch("vanilla-transformer: error: .*No space left on device.*\n", capsys.readouterr().err)


def test_warnings_of_the_library_have_the_name_of_the_program(vanilla_transformer, tiny_checkpoint, tmp_path):
    pytest.importorskip("ctranslate2")
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**settings, "early_stopping": False}))
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        result = vanilla_transformer(*TRANSLATE, model, "--num-beams", 2, "--backend", "ctranslate2", "nine")
    finally:
        root.handlers = handlers
    assert result.code == 0
    assert result.err.startswith("vanilla-transformer: warning: early_stopping is False in the model's")


def test_help_that_is_not_read():
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, "translate", "--help"]
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


# Terminals


@pytest.mark.hard
def test_a_terminal_is_answered_line_by_line_until_ctrl_c(tiny_checkpoint):
    terminal = Terminal([*COMMAND, *TRANSLATE, str(tiny_checkpoint)], ENVIRONMENT)
    assert terminal.wait_for("Type one sentence per line; Ctrl-D ends the input.\r\n") == ""
    answers = []
    for _ in range(2):
        terminal.type(b"twenty-one\n")
        assert terminal.wait_for("twenty-one\r\n") == ""  # the terminal's echo
        answers.append(terminal.wait_for("\r\n"))  # before the next line is typed
    assert answers[0] == answers[1]
    terminal.type(b"\x03")
    assert terminal.end() == 130
    assert terminal.shown in (b"", b"^C")


# Memory, compilers, bugs


@pytest.fixture
def fail(monkeypatch):
    """Makes the translation, the loading or a whole command raise an error."""

    def fail(error, what="translation"):
        def failing(*arguments, **options):
            raise error

        target, name = {
            "translation": (Translator, "__call__"),
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
