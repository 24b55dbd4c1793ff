"""`vanilla-transformer translate --input DIR --output DIR`: many files, on one machine or on a Ray cluster."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import LANGUAGES
from .models import decoding_errors, decoding_options, import_extra, load_translator, on_every_node, opening
from .output import RunError, UsageError, check_output, warn

if TYPE_CHECKING:
    from tqdm import tqdm

    from ..data.formats import CorpusError
    from ..documents.files import FileJob
    from ..translation.translator import Translator

    Outcomes = Iterator[tuple[FileJob, CorpusError | None]]

# Options that change translations, and the others that the translator takes as they are.
OF_CALLS = ("max_source_tokens", "split_sentences", "unknown", "unknown_target", *LANGUAGES)
OPTIONS = ("batch_size", "batch_tokens", *OF_CALLS)
RECORDED = (
    *("column", "format", "backend", "compute_type", "dtype", *OF_CALLS),
    *("num_beams", "length_penalty", "early_stopping", "coverage_penalty", "max_new_tokens"),
)


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
    from tqdm import tqdm

    from ..data.formats import HTML, SUBTITLES
    from ..documents.document import open_document

    if arguments.output is None:
        raise UsageError("tables, documents and several files need a place for the translations; give --output")
    if arguments.actors and not arguments.ray:
        raise UsageError("--actors is for --ray; leave it out")
    found = _jobs(arguments)
    complete = set() if arguments.overwrite else {job for job in found if job.output.exists()}
    if others := [problem for job in found if job in complete and (problem := job.problem())]:
        more = f" (and {len(others) - 1:,} more)" if others[1:] else ""
        raise UsageError(f"{others[0]}{more}; give --overwrite to translate all files again, or another --output")
    left = [job for job in found if job not in complete]
    with decoding_errors():  # a library that is missing is an error before any work
        for form in {job.form for job in left}.intersection((*HTML, *SUBTITLES)):
            open_document("", form)
    print(f"{len(complete)} of {len(found)} files are translated already", file=sys.stderr)
    problems, done = sum(_problem(job, None) for job in found if job in complete), 0  # of an earlier run
    total = sum(job.source.stat().st_size for job in left)
    with tqdm(total=total, unit="B", unit_scale=True, disable=None, leave=False) as progress:
        for job, damage in (_with_ray if arguments.ray else _here)(arguments, left, progress.update) if left else ():
            problems += _problem(job, damage)
            done += damage is None
    print(f"{done} files are translated now, {len(complete)} were before", file=sys.stderr)
    if problems:
        raise RunError(f"{problems} of {len(found)} files have problems, see above; the others are translated")


def _jobs(arguments: argparse.Namespace) -> "list[FileJob]":
    """Returns what is to be translated: a table or a document into one, or files into a folder."""
    from ..data.formats import form_of
    from ..documents.files import FileJob, file_jobs, version_of

    how = {name: getattr(arguments, name) for name in RECORDED} | {"model": version_of(arguments.model)}
    name, output = arguments.input[0], Path(arguments.output)
    if output.is_dir() or not (output.is_file() or form_of(output.name)):
        return file_jobs(arguments.input, output, arguments.shard or (1, 1), how)
    if arguments.input[1:] or not Path(name).is_file() or output.suffix.lower() != Path(name).suffix.lower():
        fix = "give a folder, or for a single table or document a file whose name ends as its own"
        raise UsageError(f"--output {output} is a file; {fix}")
    check_output("--output", arguments.output, True, [name])
    return [FileJob(Path(name), output, how)]


def _problem(job: "FileJob", damage: "CorpusError | None") -> bool:
    """Prints what is wrong with a file, and returns whether something is."""
    problem = None if damage is None else str(damage)
    if damage is None and job.errors.exists():
        lines = len(job.errors.read_text(encoding="utf-8").splitlines())
        problem = f"{job.source}: {lines:,} lines aren't translated, see {job.errors}"
    if problem is not None:
        warn(problem)
    return problem is not None


def call_options(arguments: argparse.Namespace, translator: "Translator") -> dict[str, Any]:
    """Returns the options for calls of the translator."""
    return {name: getattr(arguments, name) for name in OPTIONS} | decoding_options(arguments, translator.decodes_with)


def _opened(arguments: argparse.Namespace) -> "tuple[Translator, dict[str, Any]]":
    """Returns the translator and the options for its calls; a wrong one is an error here, and not that of every row."""
    translator = load_translator(arguments.model, arguments)
    options = {**call_options(arguments, translator), "progress_bar": False}
    with decoding_errors():
        translator.check(**options)
    return translator, options


def _here(arguments: argparse.Namespace, left: "list[FileJob]", tell: "tqdm.update") -> "Outcomes":
    from ..data.formats import CorpusError
    from ..documents.document import for_many
    from ..documents.files import parts_of, write

    translator, options = _opened(arguments)
    do, target = for_many(translator, options)
    for job in left:
        damage = None
        try:
            write(job, parts_of(job, do, tell, target))
        except CorpusError as error:
            damage = error
        yield job, damage


def _with_ray(arguments: argparse.Namespace, left: "list[FileJob]", tell: "tqdm.update") -> "Outcomes":
    ray_files = import_extra("serving.ray")
    _, options = _opened(arguments)  # a wrong option is an error before any actor starts
    with ray_files.connected(arguments.ray):
        for job, damage in ray_files.translate_files(
            left,
            on_every_node(arguments.model),
            actors=(1, arguments.actors or 1),
            cpus=arguments.threads or 1,
            options=options,
            opening={"threads": 1, **opening(arguments)},
        ):
            tell(job.source.stat().st_size)
            yield job, damage
