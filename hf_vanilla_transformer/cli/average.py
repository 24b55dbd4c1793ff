"""`vanilla-transformer average`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .common import UsageError, first_line, positive

if TYPE_CHECKING:
    from collections.abc import Sequence

LAST = 5  # the paper's base model; 20 for its big one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Average the last checkpoints of a run."""
    parser.epilog = "The result is a saved model like any other: translate --model RUN/averaged-5"
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("run_folder", nargs="?", type=Path, metavar="RUN", help="a run's folder, with checkpoint-N")
    source.add_argument(
        "--checkpoints", nargs="+", type=Path, metavar="DIR", help="the folders to average, in place of a run's last"
    )
    parser.add_argument(
        "--last", type=positive, metavar="N", help=f"average RUN's N newest whole checkpoints (default: {LAST})"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder to write (default: averaged-N beside the checkpoints)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a model that the output folder holds")
    parser.set_defaults(run=_average)


def _average(arguments: argparse.Namespace) -> None:
    if arguments.checkpoints and arguments.last:
        raise UsageError("--last counts RUN's checkpoints, but --checkpoints names them; give one of the two")
    if arguments.run_folder and not arguments.run_folder.is_dir():
        raise UsageError(f"{arguments.run_folder} is not a folder; RUN needs the output folder of a training")
    output = _output(arguments)

    from ..training.averaging import average_checkpoints
    from ..training.checkpoints import last_whole_checkpoints

    try:
        checkpoints = arguments.checkpoints or last_whole_checkpoints(
            arguments.run_folder, arguments.last or LAST, to_resume=False
        )
        average_checkpoints(checkpoints, output, overwrite=arguments.overwrite)
    except ValueError as error:
        raise UsageError(first_line(error)) from error
    print(f"averaged {_named(checkpoints)} into {output}")


def _output(arguments: argparse.Namespace) -> Path:
    if arguments.output:
        return Path(arguments.output)
    if arguments.run_folder:
        return Path(arguments.run_folder / f"averaged-{arguments.last or LAST}")
    parents = {checkpoint.parent for checkpoint in arguments.checkpoints}
    if len(parents) > 1:
        raise UsageError("the checkpoints lie in different folders; say with --output where the average shall go")
    return Path(parents.pop() / f"averaged-{len(arguments.checkpoints)}")


def _named(checkpoints: "Sequence[Path]") -> str:
    """What was averaged, by their steps where all of them are a Trainer's."""
    from ..training.checkpoints import step_of

    steps = [step_of(checkpoint) for checkpoint in checkpoints]
    count = f"{len(checkpoints)} checkpoint{'s' if len(checkpoints) > 1 else ''}"
    if None in steps:
        return f"{count} ({', '.join(str(checkpoint) for checkpoint in checkpoints)})"
    return f"{count} (step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))})"
