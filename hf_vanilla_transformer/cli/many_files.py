"""`vanilla-transformer translate --input DIR --output DIR`: many files, on one machine or on a Ray cluster."""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import (
    PROGRAM,
    RunError,
    UsageError,
    decoding_errors,
    decoding_options,
    import_extra,
    load_translator,
    on_every_node,
    opening,
)

if TYPE_CHECKING:
    from ..data.formats import CorpusError
    from ..translation.files import Job
    from ..translation.translator import Translator

COLUMN = "text"
# Options that the translator takes as they are.
OPTIONS = ("batch_size", "batch_tokens", "max_source_tokens", "target_lang", "split_sentences")


def is_meant(arguments: argparse.Namespace) -> bool:
    """Whether the arguments name several files, a folder or a table."""
    from ..data.formats import is_table

    inputs = arguments.input or []
    folders = [name for name in (*inputs, arguments.output) if name is not None and Path(name).is_dir()]
    is_part = arguments.ray or arguments.shard
    return len(inputs) > 1 or bool(inputs and (folders or is_part or is_table(inputs[0])))


def translate(arguments: argparse.Namespace) -> None:
    """Translates the files that aren't complete yet, and says what became of them.

    Raises:
        UsageError: The options are wrong.
        CorpusError: An input doesn't exist, or two have one name.
        RunError: Some files couldn't be read, or some rows couldn't be translated; all others are.
    """
    from ..data.formats import is_table
    from ..translation.files import jobs

    if arguments.output is None:
        raise UsageError("tables and several files need a folder for the translations; give --output DIR")
    if Path(arguments.output).is_file() or is_table(arguments.output):
        raise UsageError(f"--output {arguments.output} is a file; tables and several files need a folder")
    if arguments.actors and not arguments.ray:
        raise UsageError("--actors is for --ray; leave it out")
    found = jobs(arguments.input, arguments.output, arguments.shard or (1, 1))
    complete = set() if arguments.overwrite else {job for job in found if job.output.exists()}
    left = [job for job in found if job not in complete]
    print(f"{len(complete)} of {len(found)} files are translated already", file=sys.stderr)
    problems = sum(_problem(job, None) for job in found if job in complete)  # of an earlier run
    for job, damage in (_with_ray if arguments.ray else _here)(arguments, left) if left else ():
        problems += _problem(job, damage)
    if problems:
        raise RunError(f"{problems} of {len(found)} files have problems, see above; the others are translated")


def _problem(job: "Job", damage: "CorpusError | None") -> bool:
    """Prints what is wrong with a file, and returns whether something is."""
    problem = None if damage is None else str(damage)
    if damage is None and job.errors.exists():
        rows = len(job.errors.read_text(encoding="utf-8").splitlines())
        problem = f"{job.source}: {rows:,} rows aren't translated, see {job.errors}"
    if problem is not None:
        print(f"{PROGRAM}: warning: {problem}", file=sys.stderr)
    return problem is not None


def call_options(arguments: argparse.Namespace, translator: "Translator") -> dict[str, Any]:
    """Returns the options for calls of the translator."""
    return {name: getattr(arguments, name) for name in OPTIONS} | decoding_options(arguments, translator.model)


def _opened(arguments: argparse.Namespace) -> "tuple[Translator, dict[str, Any]]":
    """Returns the translator and the options for its calls; a wrong one is an error here, and not that of every row."""
    translator = load_translator(arguments.model, arguments)
    options = {**call_options(arguments, translator), "progress_bar": False}
    with decoding_errors():
        translator([], **options)
    return translator, options


def _here(arguments: argparse.Namespace, left: "list[Job]") -> "Iterator[tuple[Job, CorpusError | None]]":
    from tqdm import tqdm

    from ..data.formats import CorpusError
    from ..translation.files import outcomes, write

    translator, options = _opened(arguments)
    call = partial(translator, **options)
    sizes = [job.source.stat().st_size for job in left]
    with tqdm(total=sum(sizes), unit="B", unit_scale=True, disable=None, leave=False) as progress:
        done = 0
        for job, size in zip(left, sizes, strict=True):
            try:
                for position in write(job, arguments.column or COLUMN, lambda rows: outcomes(call, rows)):
                    progress.update(done + position - progress.n)
            except CorpusError as error:
                yield job, error
            else:
                yield job, None
            done += size
            progress.update(done - progress.n)


def _with_ray(arguments: argparse.Namespace, left: "list[Job]") -> "Iterator[tuple[Job, CorpusError | None]]":
    ray_files = import_extra("serving.ray")
    _, options = _opened(arguments)  # a wrong option is an error before any actor starts
    with ray_files.connected(arguments.ray):
        yield from ray_files.translate_files(
            left,
            on_every_node(arguments.model),
            column=arguments.column or COLUMN,
            actors=(1, arguments.actors or 1),
            cpus=arguments.threads or 1,
            options=options,
            opening={"threads": 1, **opening(arguments)},
        )
