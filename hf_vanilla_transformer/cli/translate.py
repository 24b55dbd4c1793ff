"""`vanilla-transformer translate`."""

import argparse
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ..errors import printable
from . import lines, many_files
from .arguments import LANGUAGES, add, add_decoding, given, positive
from .models import call_options, check_ensemble, decoding_errors, load_translator
from .output import UsageError, check_output, progress_bar, say_written, warn_of_line

if TYPE_CHECKING:
    from ..translation.backend import Translation


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
    add(parser, "model", help=f"a saved model's folder, or its name on the Hub; {marian}")
    several = "decode with all models as one that averages their probabilities: --ensemble --model A B C --input FILE"
    add(parser, "ensemble", help=several)
    texts = "translate its lines: UTF-8, compressed or not; or a table (.tsv, .jsonl, .parquet), subtitles (.srt, "
    texts += ".vtt) or HTML; or several files and folders, into the folder --output"
    parser.add_argument("--input", nargs="+", metavar="FILE", help=texts)
    complete = "write the translations there; the file appears when it is complete. For several files, a folder: each "
    complete += "gets its input's name, and complete ones are skipped when the command is started again"
    parser.add_argument("--output", metavar="FILE", help=complete)
    choice = "of each line's --num-beams translations, write the one nearest to its line here (Kim and Rush 2016)"
    parser.add_argument("--choose-by", metavar="REFERENCES", help=choice)
    nearness = "of sentences, for --choose-by (default: bleu; chrf also where white space doesn't separate words)"
    parser.add_argument("--choose-by-measure", choices=["bleu", "chrf"], help=nearness)
    record = "write a JSON object for each line: source, translation, tokens and, of a beam search, score"
    parser.add_argument("--json", action="store_true", help=record)
    many = parser.add_argument_group("many files")
    many.add_argument("--column", metavar="NAME", help="the column of tables (default: text)")
    many.add_argument("--format", choices=["text"], help="text: each line of a file is a text, whatever its name says")
    part = "take every N-th file from the I-th on, for N processes or machines: 1/4, 2/4, 3/4 and 4/4"
    many.add_argument("--shard", type=_shard, metavar="I/N", help=part)
    add(many, "ray")
    many.add_argument("--actors", type=positive, metavar="N", help="models at a time, with --ray (default: 1)")
    add(parser, *LANGUAGES)
    rules = "split each line into sentences first, by the rules of its language (ISO 639-1): en, de; needs sentencex"
    parser.add_argument("--split-sentences", metavar="LANG", help=rules)
    add(parser, "overwrite")
    add_decoding(parser)
    parser.set_defaults(run=_translate)


def _shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 1 to N, such as 1/4")
    return int(index), int(count)


def _translate(arguments: argparse.Namespace) -> None:
    arguments.model = [arguments.model]
    if arguments.ensemble:  # what follows the first one are models as well
        arguments.model, arguments.sentences = [*arguments.model, *arguments.sentences], []
    check_ensemble(arguments.model, arguments)
    if arguments.input is not None and arguments.sentences:
        raise UsageError("sentences and --input FILE are two things to translate; give one of the two")
    if many_files.is_meant(arguments):
        many_files.translate(arguments)
        return
    only_files = ("column", "shard", "ray", "actors", *(("format",) if arguments.input is None else ()))
    if wrong := given(arguments, *only_files):
        fix = "give them by --input, or leave it out"
        raise UsageError(f"--{next(iter(wrong))} is for tables, or several files; {fix}")
    if arguments.input is not None:
        (arguments.input,) = arguments.input
    if arguments.output is not None:
        check_output("--output", arguments.output, arguments.overwrite, [arguments.input, arguments.choose_by])
        from ..data.formats import COMPRESSIONS

        if arguments.output.endswith(COMPRESSIONS):
            raise UsageError(f"--output {arguments.output} would be text that isn't compressed; give another name")
    source = _source(arguments)
    references = _references(arguments, source)
    with _output(arguments.output) as file:
        if source.total != 0:
            _translate_lines(arguments, source, references, file)
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


def _references(arguments: argparse.Namespace, source: lines.Lines) -> Iterator[str] | None:
    """Returns the references to choose by, a line for each of the source; None: nothing is chosen."""
    if arguments.choose_by is None:
        if arguments.choose_by_measure:
            raise UsageError("--choose-by-measure is for --choose-by; leave it out")
        return None
    if arguments.split_sentences:
        raise UsageError("--choose-by chooses of a line's translations, and a split line has one; leave one out")
    from ..data.formats import form_of

    if form_of(arguments.choose_by) and arguments.format is None:
        raise UsageError(f"--choose-by {arguments.choose_by} is no text by its name; give a file with a line for each")
    found, name = lines.of_file(arguments.choose_by), arguments.input or "the input"
    if source.total is None or found.total is None:
        raise UsageError("--choose-by counts all lines first; give files, no pipes: --input FILE --choose-by FILE")
    if source.total != found.total:
        counts = f"{name} has {source.total:,} {source.unit}s, and {arguments.choose_by} {found.total:,} lines"
        raise UsageError(f"{counts}; give a reference for each")
    return chain.from_iterable(found.windows)


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


@decoding_errors()
def _translate_lines(
    arguments: argparse.Namespace, source: lines.Lines, references: Iterator[str] | None, file: TextIO
) -> None:
    translator = load_translator(arguments.model, arguments)
    from tqdm import tqdm  # it is imported by now, as the next one

    from ..translation.decoding import translate

    options = call_options(arguments, translator)
    beams = translator.plan(**options).num_beams
    if references is not None and beams < 2:
        raise UsageError("--choose-by chooses of several translations; give --num-beams 2 or more")
    if beams > 1:
        options["n_best"] = beams if references is not None else 1 if arguments.json else None
    before = 0  # lines of earlier windows

    def warn(index: int, count: int) -> None:
        only = "" if references is None else ", so --choose-by has a single translation to choose from"
        warn_of_line(f"{source.unit} {index + 1}", call.limit, f"it is translated in {count} pieces{only}")

    is_typed = source.total is None and _someone_types()
    with progress_bar(source.total, f" {source.unit}s", hidden=is_typed) as tell:
        call = translator.call({**options, "progress": tell, "on_division": warn})
        for window in source.windows:
            rows = translate(call, window, before)
            before += len(window)
            best = [row[0] for row in rows]
            if references is not None:
                best = _nearest(rows, list(islice(references, len(window))), arguments.choose_by_measure or "bleu")
            pairs = zip(window, best, strict=True)
            text = "\n".join(_record(*pair) if arguments.json else pair[1].text for pair in pairs)
            tqdm.write(printable(text) if file.isatty() else text, file)
            file.flush()


def _nearest(rows: "list[list[Translation]]", references: list[str], measure: str) -> "list[Translation]":
    """Returns the translation of each row that is nearest to its reference."""
    from ..metrics import nearest

    texts = nearest([[one.text for one in row] for row in rows], references, measure)
    return [next(one for one in row if one.text == text) for row, text in zip(rows, texts, strict=True)]


def _record(source: str, best: "Translation") -> str:
    """Returns what is known of a translation as a line of JSON."""
    found = {"source": source, "translation": best.text, "tokens": best.num_tokens, "score": best.score}
    return json.dumps({name: one for name, one in found.items() if one is not None}, ensure_ascii=False)
