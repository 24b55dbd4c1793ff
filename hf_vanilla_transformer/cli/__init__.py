"""The command line: `vanilla-transformer COMMAND`.

Each command is a module: its `add_arguments` declares the options and sets `run` to the function that does the work.
torch and transformers take seconds to import, so functions import them, and `--help` is instant.
"""

import argparse
import contextlib
import errno
import io
import itertools
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TextIO

from .. import __version__
from ..errors import did_you_mean, first_line, is_out_of_memory, printable
from . import average, card, convert, evaluate, explain, export, info, plot, push, score, serve, train, translate
from .arguments import add as add_options
from .output import PROGRAM, UsageError

EXIT_FAILURE = 1
EXIT_WRONG_USE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
EXIT_PIPE_CLOSED = 141  # 128 + SIGPIPE
OPTION = re.compile(r"^--\w[\w-]*(?==|$)")  # its name; a sentence may also begin with dashes


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, by default with this process's arguments, and returns its exit code."""
    debug = False
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is None:  # closed; a file that is opened next would have its number
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    logging.basicConfig(format=f"{PROGRAM}: warning: %(message)s")
    try:
        arguments = _parser().parse_args(argv)
        debug = arguments.debug
        arguments.run(arguments)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        code, message = _outcome(error)
        _complain(printable("".join(traceback.format_exception(error)) + message if debug else message))
        _flush(sys.stdout)
        return code
    return 0


def _outcome(error: BaseException) -> tuple[int, str]:
    """Returns the exit code, and what to print."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, ""
    if isinstance(error, BrokenPipeError):  # the reader has stopped reading, `| head -1`
        return EXIT_PIPE_CLOSED, ""
    is_own = type(error).__module__.startswith("hf_vanilla_transformer")  # its message names the fix
    is_missing = isinstance(error, ImportError) and error.name is None  # raised here, with what to install
    if isinstance(error, UsageError) or is_missing or (is_own and isinstance(error, ValueError)):
        return EXIT_WRONG_USE, f"{PROGRAM}: error: {first_line(error)}\n"
    if isinstance(error, ModuleNotFoundError):
        fix = "run pip install . in a checkout of hf_vanilla_transformer"
        return EXIT_WRONG_USE, f"{PROGRAM}: error: this needs {error.name}, which isn't installed: {fix}\n"
    if is_out_of_memory(error):
        problem = "the memory is exhausted; close other programs, or give smaller batches"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        problem = f"{error}; free some space, or write to another disk"
    elif is_own or isinstance(error, OSError):
        problem = str(error)
    else:
        problem = f"{type(error).__name__}: {first_line(error)} (unexpected; give --debug for the traceback)"
    return EXIT_FAILURE, f"{PROGRAM}: error: {problem}\n"


def _complain(message: str) -> None:
    with contextlib.suppress(OSError):  # a full disk, or a closed pipe
        sys.stderr.write(message)
    _flush(sys.stderr)


def _flush(stream: TextIO) -> None:
    """Flushes a stream, and empties one that can't be: Python would try again at its end and change the exit code."""
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError):  # a stream that is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors that suggest a similar option."""

    given: Sequence[str] = ()

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: object = None) -> Any:
        self.given = list(args or ())
        if (declare := self.get_default("declare")) and (unknown := self._unknown()):  # it takes long imports
            declare(self, unknown)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required") and (unknown := self._unknown()):
            message = f"unrecognized arguments: {' '.join(unknown)}"  # the missing option may be mistyped
        message = " ".join(message.split()) + self._suggestion(message)
        self.exit(EXIT_WRONG_USE, f"{PROGRAM}: error: {message} (see {self.prog} --help)\n")

    def _print_message(self, message: str, file: object = None) -> None:
        sys.stdout.write(message)  # argparse's own ignores a full disk and a closed pipe

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # now, when an error can still be told
        _complain(message or "")
        raise SystemExit(status)

    def parse_args(self, args: Iterable[str] | None = None, namespace: object = None) -> Any:
        # A command's own parser reports unknown options, because only it knows similar ones.
        arguments, unknown = self.parse_known_args(_with_dashes(sys.argv[1:] if args is None else [*args]), namespace)
        if unknown:
            getattr(arguments, "parser", self).error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments

    def _unknown(self) -> list[str]:
        """Returns the given options that don't exist."""
        options = itertools.takewhile(lambda argument: argument != "--", self.given)
        return [
            one for one in options if OPTION.match(one) and one.partition("=")[0] not in self._option_string_actions
        ]

    def _suggestion(self, message: str) -> str:
        if choice := re.search(r"(?:COMMAND|KIND): invalid choice: '([^']*)'", message):
            return did_you_mean(choice[1], (*COMMANDS, *plot.KINDS))
        refused = self.get_default("refused") or ()
        actions = [action for action in self._actions if action.dest not in refused]
        options = [option for action in actions for option in action.option_strings if option.startswith("--")]
        unknown = re.search(r"unrecognized arguments: .*?(--[\w-]+)", message)
        return did_you_mean(unknown[1], options) if unknown else ""


def _with_dashes(arguments: Sequence[str]) -> list[str]:
    """Writes the names of options with dashes: `--output_dir=a_b` is `--output-dir=a_b`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    dashed = [OPTION.sub(lambda name: name[0].replace("_", "-"), argument) for argument in arguments[:end]]
    return dashed + list(arguments[end:])


def _parser() -> _Parser:
    parser = _Parser(prog=PROGRAM, description='The Transformer of "Attention Is All You Need".', allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.set_defaults(debug=False)
    add_options(parser, "debug")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, add in COMMANDS.items():
        summary = (add.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.set_defaults(parser=command)
        add(command)
        add_options(command, "debug")
    return parser


# Command, named as its module -> `add_arguments`; the first line of that function's docstring is the command's summary.
MODULES = (train, average, evaluate, translate, score, plot, explain, serve, convert, export, card, push, info)
COMMANDS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    module.__name__.rpartition(".")[2]: module.add_arguments for module in MODULES
}
