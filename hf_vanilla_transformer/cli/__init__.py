"""The command line: `vanilla-transformer COMMAND`.

Each command is a module: `add_arguments` declares its options and names, as `run`, the function that does the work.
torch and transformers take seconds to import, so the functions import them and `--help` doesn't wait.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .. import __version__
from . import average, evaluate, train, translate
from .common import UsageError

PROGRAM = "vanilla-transformer"
EXIT_FAILURE = 1
EXIT_WRONG_USE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
EXIT_PIPE_CLOSED = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        argv: The arguments after the program's name, those of this process by default.
    """
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except UsageError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return EXIT_WRONG_USE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has enough, `| head -1`
        _silence_standard_output()
        return EXIT_PIPE_CLOSED
    except OSError as error:  # a full disk, for instance
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        _silence_standard_output()
        return EXIT_FAILURE
    return 0


def _silence_standard_output() -> None:
    # Python flushes once more at its end, and what is left can't go where it should.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the option that was probably meant."""

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.split()) + self._suggestion(message)
        self.exit(EXIT_WRONG_USE, f"{PROGRAM}: error: {message} (see {self.prog} --help)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        # A command's unknown options would be reported by the program's parser, which can't know what they resemble.
        arguments, unknown = self.parse_known_args(args, namespace)
        if hasattr(arguments, "takes_overrides"):
            arguments.overrides = unknown  # for the command itself to understand
        elif unknown:
            getattr(arguments, "parser", self).error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments

    def _suggestion(self, message: str) -> str:
        options = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        for unknown in re.findall(r"unrecognized arguments: .*?(--[\w-]+)", message):
            for option in difflib.get_close_matches(unknown, options, n=1):
                return f"; did you mean {option}?"
        return ""


def _parser() -> _Parser:
    parser = _Parser(prog=PROGRAM, description='The Transformer of "Attention Is All You Need".', allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, add in COMMANDS.items():
        summary = (add.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.set_defaults(parser=command)
        add(command)
    return parser


# What `vanilla-transformer COMMAND` knows; the first line of a function's docstring is the command's summary.
COMMANDS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "train": train.add_arguments,
    "average": average.add_arguments,
    "evaluate": evaluate.add_arguments,
    "translate": translate.add_arguments,
}
