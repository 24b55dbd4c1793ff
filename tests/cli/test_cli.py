"""The command line: instant help, closed and full streams, errors in one line with the right exit code, `--debug`."""

import argparse
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
from small_corpus import NEEDED_BY_NONE

from hf_vanilla_transformer import cli
from hf_vanilla_transformer.cli import output, translate
from hf_vanilla_transformer.translation import decoding
from tests.terminal import Terminal

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "hf_vanilla_transformer"]
TRANSLATE = ["translate", "--max-new-tokens", "2", "--model"]
# Of the processes, whose output is to be buffered as usual.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}

# ---- Help ----
SLOW = {"torch", "transformers", "tokenizers", "huggingface_hub", "numpy", "yaml"}
HELPS = ["--help", "--version", *(f"{name} --help" for name in cli.COMMANDS)]
MISTAKES = ["", "tranlsate", "translate --model DIR --num-baems 4", "average RUN --last 0", "train --config"]
# Runs the command once for each line of standard input; the last line of the output has what is imported at the end.
CONSOLE_SCRIPT = """
import sys
from hf_vanilla_transformer.cli import main
for line in sys.stdin:
    try:
        print(main(line.split()))
    except SystemExit as end:
        print(end.code)
print(*sys.modules)
"""


def test_help_and_wrong_use_import_nothing_heavy():
    lines = "\n".join(HELPS + MISTAKES)
    command = [sys.executable, "-c", CONSOLE_SCRIPT]
    result = subprocess.run(command, cwd=ROOT, input=f"{lines}\n", capture_output=True, text=True)
    *out, modules = result.stdout.splitlines()
    assert [line for line in out if line in ("0", "1", "2")] == [*("0" for _ in HELPS), *("2" for _ in MISTAKES)]
    assert result.stdout.count("usage:") == len(HELPS) - 1
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["vanilla-transformer"] * len(MISTAKES)
    assert "hf_vanilla_transformer.cli" in modules.split()
    assert sorted((NEEDED_BY_NONE | SLOW).intersection(modules.split())) == []


def test_every_option_has_a_help():
    def without_help(parser):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for one in action.choices.values():
                    yield from without_help(one)
            elif not action.help:
                yield parser.prog, action.dest

    assert list(without_help(cli._parser())) == []


# ---- Streams ----
def test_a_closed_standard_input(vanilla_transformer, tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    result = vanilla_transformer("translate", "--model", tiny_checkpoint)
    message = "standard input is closed; give sentences as arguments, or a file by --input FILE"
    assert result == (2, "", f"vanilla-transformer: error: {message}\n")


def test_a_closed_standard_output(tiny_checkpoint, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", None)
    written = tmp_path / "written"
    assert cli.main([*TRANSLATE, str(tiny_checkpoint), "--output", str(written), "nine"]) == 0
    assert written.read_text().count("\n") == 1
    sys.stdout.close()


@pytest.mark.parametrize("sign", ["<&-", ">&-"])
def test_a_stream_that_the_shell_closes(sign):
    """Nothing heavy is imported."""
    command = ["sh", "-c", f'exec "$@" {sign}', "sh", *COMMAND, "--version"]
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_help_that_is_not_read():
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, "translate", "--help"]
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_full_disk_is_one_line(tiny_checkpoint, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main([*TRANSLATE, str(tiny_checkpoint), "nine"]) == 1
    assert re.fullmatch("vanilla-transformer: error: .*No space left on device.*\n", capsys.readouterr().err)


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


def test_warnings_of_the_library_have_the_name_of_the_program(vanilla_transformer, tiny_checkpoint, tmp_path):
    pytest.importorskip("ctranslate2")
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**settings, "suppress_tokens": [9]}))
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        result = vanilla_transformer(*TRANSLATE, model, "--num-beams", 2, "--backend", "ctranslate2", "nine")
    finally:
        root.handlers = handlers
    assert result.code == 0
    assert result.err.startswith("vanilla-transformer: warning: suppress_tokens or bad_words_ids of the model's")


# ---- Memory, bugs, interrupts ----
ALLOCATOR = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "121896960 bytes. Error code 12 (Cannot allocate memory)"
)
ON_DEVICE = "the device is out of memory"
SMALLER = "; give a smaller --batch-tokens, --batch-size or --max-source-tokens, or another --device"
IN_MEMORY, FEWER = "the memory is exhausted", "; close other programs, or give smaller batches"
CALL, LOAD, CHECK = (decoding, "translate"), (translate, "load_translator"), (translate, "check_ensemble")
GPU = torch.OutOfMemoryError("Tried to allocate 20.00 MiB. GPU 0")


@pytest.mark.parametrize(
    ("failing", "error", "code", "parts"),
    [
        *((CALL, error, 2, (ON_DEVICE, SMALLER)) for error in (ALLOCATOR, MemoryError(), GPU)),
        *((CHECK, error, 1, (IN_MEMORY, FEWER)) for error in (ALLOCATOR, MemoryError(), OSError(errno.ENOMEM, "no"))),
        (LOAD, KeyError("bias"), 1, ("KeyError: 'bias' (unexpected; give --debug for the traceback)",)),
        (LOAD, RuntimeError("two\nlines"), 1, ("RuntimeError: two (unexpected; give --debug for the traceback)",)),
        (LOAD, output.UsageError("wrong use"), 2, ("wrong use",)),
        (LOAD, OSError(errno.ENOSPC, "No space left"), 1, ("[Errno 28] No space left; free some space",)),
        (LOAD, PermissionError(errno.EACCES, "Denied", "file"), 1, ("[Errno 13] Denied: 'file'",)),
    ],
)
@pytest.mark.parametrize("debug", ["", "before", "after"])
def test_one_line_and_the_traceback_if_asked(
    vanilla_transformer, tiny_checkpoint, monkeypatch, failing, error, code, parts, debug
):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(*failing, fail)
    before, after = (["--debug"] if debug == place else [] for place in ("before", "after"))
    result = vanilla_transformer(*before, "translate", "--model", tiny_checkpoint, *after, "nine")
    *traceback, last = result.err.splitlines()
    assert (result.code, result.out, bool(traceback)) == (code, "", bool(debug))
    assert last.startswith(f"vanilla-transformer: error: {parts[0]}")
    assert parts[-1] in last
    if debug:
        assert traceback[0] == "Traceback (most recent call last):"
        assert any("in fail" in row for row in traceback)


def test_ctrl_c_says_where_it_was_only_if_asked(vanilla_transformer, tiny_checkpoint, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(*LOAD, fail)
    assert vanilla_transformer("translate", "--model", tiny_checkpoint, "nine") == (130, "", "")
    result = vanilla_transformer("--debug", "translate", "--model", tiny_checkpoint, "nine")
    assert (result.code, result.out) == (130, "")
    assert result.err.endswith("KeyboardInterrupt\n")
