"""`vanilla-transformer translate --input DIR --output DIR`: many files, on one machine or on a Ray cluster."""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import BACKEND, LANGUAGES, SEARCH, TEXTS
from .models import call_options, decoding_errors, load_translator, on_every_node, opening
from .output import RunError, UsageError, check_output, progress_bar, warn

if TYPE_CHECKING:
    from ..documents.files import FileJob

# Options that change translations.
RECORDED = ("column", "format", "dtype", "num_beams", "split_sentences", *LANGUAGES, *SEARCH, *TEXTS, *BACKEND)


def is_meant(arguments: argparse.Namespace) -> bool:
    """Whether the arguments name several files, a folder, a table or a document."""
    from ..data.formats import form_of

    inputs = arguments.input or []
    folders = [name for name in (*inputs, arguments.output) if name is not None and Path(name).is_dir()]
    is_part = arguments.ray or arguments.shard
    is_document = bool(inputs and form_of(inputs[0]) and arguments.format is None)
    return len(inputs) > 1 or bool(inputs and (folders or is_part or is_document))


def translate(arguments: argparse.Namespace) -> None:
    """Translates the files that aren't complete yet, and says what became of them; fails at the end if some failed."""
    from ..data.formats import HTML, SUBTITLES
    from ..documents.document import open_document

    if arguments.choose_by or arguments.choose_by_measure:
        raise UsageError("--choose-by is for the lines of one text file; give one by --input, or leave it out")
    if arguments.output is None:
        raise UsageError("tables, documents and several files need a place for the translations; give --output")
    if arguments.json:
        raise UsageError("--json is for lines; leave it out (a table keeps its columns, and gets its translations)")
    if arguments.actors and not arguments.ray:
        raise UsageError("--actors is for --ray; leave it out")
    found = _jobs(arguments)
    complete = {job for job in found if job.output.exists() and not arguments.overwrite}
    if others := [problem for job in found if job in complete and (problem := job.problem())]:
        more = f" (and {len(others) - 1:,} more)" if others[1:] else ""
        raise UsageError(f"{others[0]}{more}; give --overwrite to translate all files again, or another --output")
    left = [job for job in found if job not in complete]
    for form in {job.form for job in left}.intersection((*HTML, *SUBTITLES)):
        open_document("", form)  # a library that is missing is an error before any work
    print(f"{len(complete)} of {len(found)} files are translated already", file=sys.stderr)
    problems, done = sum(_problem(job) for job in found if job in complete), 0  # of an earlier run
    total = sum(job.source.stat().st_size for job in left)
    with progress_bar(total, "B", unit_scale=True) as tell:
        for job, damage in _outcomes(arguments, left, tell) if left else ():
            problems += _problem(job, damage)
            done += not damage
    print(f"{done} files are translated now, {len(complete)} were before", file=sys.stderr)
    if problems:
        raise RunError(f"{problems} of {len(found)} files have problems, see above; the others are translated")


def _jobs(arguments: argparse.Namespace) -> "list[FileJob]":
    """Returns what is to be translated: a table or a document into one, or files into a folder."""
    from ..data.formats import form_of
    from ..documents.files import FileJob, file_jobs, version_of

    versions = [version_of(name) for name in arguments.model]
    how = {name: getattr(arguments, name) for name in RECORDED} | {"model": versions if versions[1:] else versions[0]}
    name, output = arguments.input[0], Path(arguments.output)
    if output.is_dir() or not (output.is_file() or form_of(output.name)):
        return file_jobs(arguments.input, output, arguments.shard or (1, 1), how)
    if arguments.input[1:] or not Path(name).is_file() or output.suffix.lower() != Path(name).suffix.lower():
        fix = "give a folder, or for a single table or document a file whose name ends as its own"
        raise UsageError(f"--output {output} is a file; {fix}")
    check_output("--output", arguments.output, True, [name])
    return [FileJob(Path(name), output, how)]


def _problem(job: "FileJob", problem: str = "") -> bool:
    """Prints what is wrong with a file, and returns whether something is."""
    if not problem and job.errors.exists():
        lines = len(job.errors.read_text(encoding="utf-8").splitlines())
        problem = f"{job.source}: {lines:,} lines aren't translated, see {job.errors}"
    if problem:
        warn(problem)
    return bool(problem)


def _outcomes(
    arguments: argparse.Namespace, jobs: "list[FileJob]", tell: Callable[[int], object]
) -> "Iterator[tuple[FileJob, str]]":
    """Yields each file when it is translated, or with the reason why it can't be read; `tell` gets numbers of bytes."""
    from ..documents.files import translate_files

    translator = load_translator(arguments.model, arguments)
    options = {**call_options(arguments, translator), "progress_bar": False}
    with decoding_errors():  # a wrong option is an error here, and not that of every row
        translator.check(**options)
    if not arguments.ray:
        yield from translate_files(jobs, translator, options, tell)
        return
    from ..serving import ray as ray_files  # its error says how Ray is installed

    names = [on_every_node(name) for name in arguments.model]
    how = {"options": options, "opening": {"threads": 1, **opening(arguments)}}
    with ray_files.connected(arguments.ray):
        for job, problem in ray_files.translate_files(
            jobs, names if names[1:] else names[0], actors=arguments.actors or 1, cpus=arguments.threads or 1, **how
        ):
            tell(job.source.stat().st_size)
            yield job, problem
