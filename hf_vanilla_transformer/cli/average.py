"""`vanilla-transformer average`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from .arguments import positive
from .output import UsageError, show

LAST = 5  # the paper's base model; 20 for its big one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Average the last checkpoints of a run."""
    parser.epilog = "The result is a saved model: vanilla-transformer translate --model RUN/averaged-5"
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("run_folder", nargs="?", type=Path, metavar="RUN", help="a run's folder, with checkpoint-N")
    source.add_argument(
        "--checkpoints",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="checkpoints to average, instead of a run's last ones",
    )
    parser.add_argument(
        "--last", type=positive, metavar="N", help=f"average RUN's N newest complete checkpoints (default: {LAST})"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder to write (default: averaged-N next to the checkpoints)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing model in the output folder")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the last checkpoint, to check it"
    )
    parser.set_defaults(run=_average)


def _average(arguments: argparse.Namespace) -> None:
    """Averages the checkpoints that the command line selects and prints which they were."""
    if arguments.checkpoints and arguments.last:
        raise UsageError("--last is for RUN's checkpoints, and --checkpoints names others; give one of the two")
    if arguments.run_folder and not arguments.run_folder.is_dir():
        raise UsageError(f"{arguments.run_folder} is not a folder; RUN must be the output folder of a training")
    output = _output(arguments)

    from transformers.utils import logging

    from ..checkpoints.averaging import average_checkpoints
    from ..checkpoints.completeness import last_complete_checkpoints

    logging.disable_progress_bar()
    checkpoints = arguments.checkpoints or last_complete_checkpoints(
        arguments.run_folder, arguments.last or LAST, to_resume=False
    )
    logging.set_verbosity_error()  # warnings of skipped checkpoints have been shown; the rest is in the error
    average_checkpoints(
        checkpoints, output, overwrite=arguments.overwrite, trust_remote_code=arguments.trust_remote_code
    )
    show(f"averaged {_named(checkpoints)} into {output}")


def _output(arguments: argparse.Namespace) -> Path:
    if arguments.output:
        return Path(arguments.output)
    if arguments.run_folder:
        return Path(arguments.run_folder / f"averaged-{arguments.last or LAST}")
    parents = {checkpoint.parent for checkpoint in arguments.checkpoints}
    if len(parents) > 1:
        raise UsageError("the checkpoints are in different folders; give the folder of the average with --output")
    return Path(parents.pop() / f"averaged-{len(arguments.checkpoints)}")


def _named(checkpoints: Sequence[Path]) -> str:
    """Describes what was averaged: by steps if all are a Trainer's checkpoints, by folders otherwise."""
    from ..checkpoints.completeness import step_of

    steps = [step_of(checkpoint) for checkpoint in checkpoints]
    count = f"{len(checkpoints)} checkpoint{'s' if len(checkpoints) > 1 else ''}"
    if None in steps:
        return f"{count} ({', '.join(str(checkpoint) for checkpoint in checkpoints)})"
    return f"{count} (step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))})"
