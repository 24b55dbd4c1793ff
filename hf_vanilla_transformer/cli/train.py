"""`vanilla-transformer train`."""

import argparse
import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from .arguments import add
from .models import loading
from .output import show, warn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Train a model from a recipe."""
    parser.epilog = (
        "Every option of a recipe can also be given on the command line, to override the recipe: --max-steps 1000, "
        "--learning-rate 5e-4 ... (--list-options lists them). Several devices or machines: accelerate launch -m "
        "hf_vanilla_transformer train --config RECIPE"
    )
    recipes = "a YAML file of options, or the name of one of the package's recipes, such as multi30k_tiny; of several, "
    recipes += "later ones override earlier ones"
    parser.add_argument("--config", nargs="+", action="extend", default=[], metavar="RECIPE", help=recipes)
    resume = "resume from the last complete checkpoint of --output-dir"
    parser.add_argument("--resume", action="store_true", help=resume)
    dry = "check everything, train for a few updates in a temporary folder, and show sizes, a batch and the time"
    parser.add_argument("--dry-run", action="store_true", help=dry)
    add(parser, "trust_remote_code", help="run code that comes with model_name_or_path or tokenizer_name_or_path")
    parser.add_argument("--list-options", action="store_true", help="list all options of a recipe with their defaults")
    parser.add_argument("--list-recipes", action="store_true", help="list the package's recipes, and where they are")
    parser.set_defaults(run=_train, declare=_declare)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Tells a user who presses Ctrl+C how the run is resumed."""
    hook, sys.unraisablehook = sys.unraisablehook, _interrupt_again
    try:
        yield
    except KeyboardInterrupt as interruption:
        if os.environ.get("RANK", "0") == "0":  # the main process of several
            warn(f"interrupted: {str(interruption) or 'the run had not begun yet'}")
        raise
    finally:
        sys.unraisablehook = hook


def _interrupt_again(dropped: "sys.UnraisableHookArgs") -> None:
    """Repeats a KeyboardInterrupt that Python can't raise, as in the callback of a weak reference."""
    if dropped.exc_type is KeyboardInterrupt:
        threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
    else:
        sys.__unraisablehook__(dropped)


@_interruptible()
def _declare(parser: argparse.ArgumentParser, given: Sequence[str]) -> None:
    """Declares the options of recipes, or their names alone if one that is given doesn't exist, to say so at once."""
    from ..training.supported import has_transformers, option_names

    names, asked = option_names(), [one.partition("=")[0].removeprefix("--").replace("-", "_") for one in given]
    if any(name not in names and not has_transformers(name) for name in asked):
        for name in names:
            parser.add_argument(f"--{name.replace('_', '-')}", nargs="*", help=argparse.SUPPRESS)
        return
    with loading():
        from ..training.options import UNSUPPORTED
        from ..training.recipe import add_options

        add_options(parser)
        parser.set_defaults(refused=UNSUPPORTED)  # declared for a message of their own, and never suggested


@_interruptible()
def _train(arguments: argparse.Namespace) -> None:
    with loading():
        from ..training import train
        from ..training.recipe import FIELDS, describe_options, describe_recipes

    if arguments.list_options or arguments.list_recipes:
        print(describe_options() if arguments.list_options else describe_recipes())
        return
    overrides = {name: value for name, value in vars(arguments).items() if name in FIELDS}
    switches = {name: getattr(arguments, name) for name in ("resume", "dry_run", "trust_remote_code")}
    trainer = train(arguments.config, overrides, **switches, say=show)
    if trainer.args.world_size > 1:
        _end_process(trainer.is_world_process_zero())


def _end_process(is_main: bool) -> NoReturn:
    """Ends a process that has nothing left to do, one of several, without freeing anything.

    A thread of Gloo may still hold a tensor that Python knows. If the process group is freed then, the two wait for
    each other for ever; if the interpreter shuts down, the process aborts ("terminate called without an active
    exception"), and the launcher kills the main process. What trackers registered for the end is still done.
    """
    if is_main:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
