"""`vanilla-transformer translate`."""

import argparse
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ..errors import printable
from . import lines, many_files
from .arguments import LANGUAGE_OPTIONS, NUMBER, add, add_decoding
from .models import call_options, check_model_name, decoding_errors, load_translator
from .output import UsageError, check_output, say_written, warn_of_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Translate sentences given as arguments, the lines of a file, or those of standard input."""
    parser.epilog = (
        "Each line of the input gives one line, in the same order; empty lines stay empty. A file is checked for UTF-8 "
        "first. Lines from a terminal or a pipe are translated as soon as there is a pause, so that slow input is "
        'answered line by line. Put a sentence that begins with a dash after "--": translate --model DIR -- "- 5 '
        'degrees"'
    )
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help="to translate (default: standard input)")
    marian = "a Marian model (Helsinki-NLP/opus-mt-...) is converted when it is loaded"
    add(parser, "--model", help=f"a saved model's folder, or its name on the Hub; {marian}")
    parser.add_argument(
        "--input",
        nargs="+",
        metavar="FILE",
        help="translate its lines: UTF-8, compressed or not; or a table (.tsv, .jsonl, .parquet), subtitles (.srt, "
        ".vtt) or HTML; or several files and folders, into the folder --output",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="write the translations there; the file appears when it is complete. For several files, a folder: each "
        "gets its input's name, and complete ones are skipped when the command is started again with the same options",
    )
    many = parser.add_argument_group("many files")
    many.add_argument("--column", metavar="NAME", help="the column of tables (default: text)")
    many.add_argument("--format", choices=["text"], help="text: each line of a file is a text, whatever its name says")
    part = "take every N-th file from the I-th on, for N processes or machines: 1/4, 2/4, 3/4 and 4/4"
    many.add_argument("--shard", type=_shard, metavar="I/N", help=part)
    cluster = "translate on a Ray cluster, which reads and writes the same files"
    add(many, "--ray", help=f"{cluster} (without ADDRESS: one that is started on this machine)")
    many.add_argument("--actors", **NUMBER, help="models at a time, with --ray (default: 1)")
    add(parser, *LANGUAGE_OPTIONS)
    rules = "split each line into sentences first, by the rules of its language (ISO 639-1): en, de; needs sentencex"
    parser.add_argument("--split-sentences", metavar="LANG", help=rules)
    add(parser, "--overwrite")
    add_decoding(parser)
    parser.set_defaults(run=_translate)


def _shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 1 to N, such as 1/4")
    return int(index), int(count)


def _translate(arguments: argparse.Namespace) -> None:
    check_model_name(arguments.model)
    if arguments.input is not None and arguments.sentences:
        raise UsageError("sentences and --input FILE are two things to translate; give one of the two")
    if many_files.is_meant(arguments):
        many_files.translate(arguments)
        return
    only_files = ("column", "shard", "ray", "actors", *(("format",) if arguments.input is None else ()))
    if given := [name for name in only_files if getattr(arguments, name) is not None]:
        raise UsageError(f"--{given[0]} is for tables, or several files; give them by --input, or leave it out")
    if arguments.input is not None:
        (arguments.input,) = arguments.input
    if arguments.output is not None:
        check_output("--output", arguments.output, arguments.overwrite, [arguments.input])
        from ..data.formats import COMPRESSIONS

        if arguments.output.endswith(COMPRESSIONS):
            raise UsageError(f"--output {arguments.output} would be text that isn't compressed; give another name")
    source = _source(arguments)
    with _output(arguments.output) as file:
        if source.total != 0:
            _translate_lines(arguments, source, file)
    say_written(arguments.output)


def _source(arguments: argparse.Namespace) -> lines.Lines:
    if arguments.input is not None:
        return lines.of_file(arguments.input)
    if arguments.sentences:
        return lines.of_arguments(arguments.sentences)
    if _someone_types():
        end = "Ctrl-Z and Enter end" if sys.platform == "win32" else "Ctrl-D ends"
        print(f"Type one sentence per line; {end} the input.", file=sys.stderr)
    return lines.of_standard_input(sys.stdin)


def _someone_types() -> bool:
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


@contextmanager
def _output(name: str | None) -> Iterator[TextIO]:
    """Yields the file to write to. It replaces the one of that name at the end; None: standard output."""
    if name is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # as the input, independently of the locale
        yield sys.stdout
        return
    from ..checkpoints.files import replacing

    with replacing(name) as path, Path(path).open("w", encoding="utf-8", newline="\n") as file:
        yield file


def _translate_lines(arguments: argparse.Namespace, source: lines.Lines, file: TextIO) -> None:
    from tqdm import tqdm

    translator = load_translator(arguments.model, arguments)
    options = call_options(arguments, translator)
    limit = translator.source_limit(arguments.max_source_tokens)
    before = 0  # lines of earlier windows

    def warn(index: int, count: int) -> None:
        warn_of_line(f"{source.unit} {before + index + 1}", limit, f"it is translated in {count} pieces")

    # A bar only if standard error is a terminal (None), and the input isn't typed there.
    hidden = True if source.total is None and _someone_types() else None
    with tqdm(total=source.total, unit=f" {source.unit}s", disable=hidden, leave=False) as progress:
        for window in source.windows:
            with decoding_errors():
                translations = translator(
                    window, progress_bar=False, progress=progress.update, on_division=warn, **options
                )
            before += len(window)
            text = "\n".join(translations)
            progress.write(printable(text) if file.isatty() else text, file=file)
            file.flush()
