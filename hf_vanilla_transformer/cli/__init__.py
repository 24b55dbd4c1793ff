"""The command line: `vanilla-transformer COMMAND`.

Each command is a module, whose `add_arguments` declares the options and sets `run` to the function that does the work.
torch and transformers take seconds to import, so they are imported inside functions and `--help` is instant.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .. import __version__
from ..data.messages import did_you_mean
from . import average, evaluate, train, translate
from .common import RunError, UsageError

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
    except RunError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has stopped reading, `| head -1`
        _silence_standard_output()
        return EXIT_PIPE_CLOSED
    except OSError as error:  # a full disk, for instance
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        _silence_standard_output()
        return EXIT_FAILURE
    return 0


def _silence_standard_output() -> None:
    # Python flushes again when it exits, which would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors that suggest a similar option."""

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.split()) + self._suggestion(message)
        self.exit(EXIT_WRONG_USE, f"{PROGRAM}: error: {message} (see {self.prog} --help)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Otherwise the program's parser would report a command's unknown options, without knowing the command's own.
        arguments, unknown = self.parse_known_args(args, namespace)
        if hasattr(arguments, "takes_overrides"):
            arguments.overrides = unknown  # the command itself parses them
        elif unknown:
            getattr(arguments, "parser", self).error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments

    def _suggestion(self, message: str) -> str:
        options = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        unknown = re.search(r"unrecognized arguments: .*?(--[\w-]+)", message)
        return did_you_mean(unknown[1], options) if unknown else ""


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


# Command -> its `add_arguments`; the first line of that function's docstring is the command's summary.
COMMANDS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "train": train.add_arguments,
    "average": average.add_arguments,
    "evaluate": evaluate.add_arguments,
    "translate": translate.add_arguments,
}
