"""`vanilla-transformer translate`."""

import argparse
import io
import sys

from .common import (
    UsageError,
    add_decoding_arguments,
    check_model_name,
    decoding_errors,
    decoding_options,
    load_model,
    loading,
)

# Lines that are sorted by length and translated in batches, before their translations are written.
LINES_PER_WINDOW = 5_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Translate sentences given as arguments, or the lines of standard input."""
    parser.epilog = 'Put a sentence that begins with a dash after "--": translate --model DIR -- "- 5 degrees"'
    parser.add_argument(
        "sentences",
        nargs="*",
        metavar="SENTENCE",
        help="to translate (default: standard input)",
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="a saved model's folder, or its name on the Hub")
    add_decoding_arguments(parser)
    parser.set_defaults(run=_translate)


def _translate(arguments: argparse.Namespace) -> None:
    """Translates the arguments or standard input, and prints the translations window by window."""
    check_model_name(arguments.model)
    sentences = arguments.sentences or _standard_input()
    _check_unicode(arguments.sentences)
    if not sentences:
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # as the input, independently of the locale

    with loading():
        from tqdm import tqdm

        from ..evaluation import translation

        tokenizer, model = load_model(arguments.model, arguments.device, arguments.dtype)
    limits = {"batch_size": arguments.batch_size, "batch_tokens": arguments.batch_tokens}
    options = {**limits, **decoding_options(arguments, model)}
    # disable=None: a bar only if standard error is a terminal.
    with decoding_errors(), tqdm(total=len(sentences), unit=" sentences", disable=None, leave=False) as progress:
        for start in range(0, len(sentences), LINES_PER_WINDOW):
            lines = sentences[start : start + LINES_PER_WINDOW]
            translations = translation.translate(model, tokenizer, lines, progress=progress.update, **options)
            progress.write("\n".join(translations))


def _check_unicode(sentences: list[str]) -> None:
    for number, sentence in enumerate(sentences, start=1):
        try:
            sentence.encode()
        except UnicodeEncodeError as error:  # surrogates, by which Python represents bytes that aren't UTF-8
            raise UsageError(f"sentence {number} is not valid UTF-8; encode it in UTF-8") from error


def _standard_input() -> list[str]:
    if sys.stdin.isatty():
        print("Type one sentence per line; Ctrl-D ends the input and translates it.", file=sys.stderr)
    from ..data.formats import CorpusError, decode_lines

    try:
        return list(decode_lines(sys.stdin.buffer, "standard input"))
    except CorpusError as error:
        raise UsageError(str(error)) from error
