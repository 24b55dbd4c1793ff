"""`vanilla-transformer average`."""

import argparse
from pathlib import Path

from .arguments import add, positive
from .output import UsageError, show

LAST = 5  # the paper's base model; 20 for its big one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Average the last checkpoints of a run."""
    parser.epilog = "The result is a saved model: vanilla-transformer translate --model RUN/averaged-5"
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("run_folder", nargs="?", type=Path, metavar="RUN", help="a run's folder, with checkpoint-N")
    instead = "checkpoints to average, instead of a run's last ones"
    source.add_argument("--checkpoints", nargs="+", type=Path, metavar="DIR", help=instead)
    newest = f"average RUN's N newest complete checkpoints (default: {LAST})"
    parser.add_argument("--last", type=positive, metavar="N", help=newest)
    output = "folder to write (default: averaged-N next to the checkpoints)"
    add(parser, "output", required=False, type=Path, help=output)
    add(parser, "overwrite", help="replace an existing model in the output folder")
    add(parser, "trust_remote_code", help="run code that comes with the last checkpoint, to check it")
    parser.set_defaults(run=_average)


def _average(arguments: argparse.Namespace) -> None:
    if arguments.checkpoints and arguments.last:
        raise UsageError("--last is for RUN's checkpoints, and --checkpoints names others; give one of the two")
    if arguments.run_folder and not arguments.run_folder.is_dir():
        raise UsageError(f"{arguments.run_folder} is not a folder; RUN must be the output folder of a training")
    last, checkpoints = arguments.last or LAST, arguments.checkpoints
    parents = {one.parent for one in checkpoints} if checkpoints else {arguments.run_folder}
    if arguments.output is None and len(parents) > 1:
        raise UsageError("the checkpoints are in different folders; give the folder of the average with --output")

    from transformers.utils import logging

    from ..checkpoints.averaging import average_checkpoints
    from ..checkpoints.completeness import last_complete_checkpoints, step_of

    logging.disable_progress_bar()
    checkpoints = checkpoints or last_complete_checkpoints(arguments.run_folder, last, to_resume=False)
    logging.set_verbosity_error()  # warnings of skipped checkpoints have been shown; the rest is in the error
    output = arguments.output or parents.pop() / f"averaged-{len(checkpoints)}"
    average_checkpoints(
        checkpoints, output, overwrite=arguments.overwrite, trust_remote_code=arguments.trust_remote_code
    )
    end, steps = "s" if checkpoints[1:] else "", [step_of(one) for one in checkpoints]
    named = ", ".join(map(str, checkpoints)) if None in steps else f"step{end} {', '.join(map(str, steps))}"
    show(f"averaged {len(checkpoints)} checkpoint{end} ({named}) into {output}")
