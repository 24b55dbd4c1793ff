"""The command line: `vanilla-transformer COMMAND`.

A command is a function that adds its arguments to the parser and names, as `run`, the function that does the work.
torch and transformers take seconds to import, so the functions import them and `--help` doesn't wait.
"""

import argparse
import difflib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from . import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROGRAM = "vanilla-transformer"
EXIT_FAILURE = 1
EXIT_WRONG_USE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
EXIT_PIPE_CLOSED = 141  # 128 + SIGPIPE

# Lines are sorted by length within this many batches, whose translations are then written.
BATCHES_A_WINDOW = 50
# Padded source tokens a batch at most, as the memory of attention grows with the square of a line's length.
MAX_TOKENS_A_BATCH = 16_384


class UsageError(Exception):
    """What the user can mend; the message says how. The command ends with it, one line and no traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        argv: The arguments after the program's name, those of this process by default.
    """
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except UsageError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return EXIT_WRONG_USE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has enough, `| head -1`
        _silence_standard_output()
        return EXIT_PIPE_CLOSED
    except OSError as error:  # a full disk, for instance
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        _silence_standard_output()
        return EXIT_FAILURE
    return 0


def _silence_standard_output() -> None:
    # Python flushes once more at its end, and what is left can't go where it should.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the option that was probably meant."""

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.split()) + self._suggestion(message)
        self.exit(EXIT_WRONG_USE, f"{PROGRAM}: error: {message} (see {self.prog} --help)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        # A command's unknown options would be reported by the program's parser, which can't know what they resemble.
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            getattr(arguments, "parser", self).error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments

    def _suggestion(self, message: str) -> str:
        options = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        for unknown in re.findall(r"unrecognized arguments: .*?(--[\w-]+)", message):
            for option in difflib.get_close_matches(unknown, options, n=1):
                return f"; did you mean {option}?"
        return ""


def _parser() -> _Parser:
    parser = _Parser(prog=PROGRAM, description='The Transformer of "Attention Is All You Need".', allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, add in COMMANDS.items():
        summary = (add.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.set_defaults(parser=command)
        add(command)
    return parser


def _add_translate(parser: argparse.ArgumentParser) -> None:
    """Translate sentences given as arguments, or the lines of standard input."""
    parser.epilog = 'A sentence that begins with a dash goes after "--": translate --model DIR -- "- 5 degrees"'
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help="to translate (default: standard input)")
    parser.add_argument("--model", required=True, metavar="DIR", help="a saved model's folder, or its name on the Hub")
    beams = parser.add_mutually_exclusive_group()
    beams.add_argument(
        "--num-beams", "--beam", type=_positive, metavar="N", help="beam size (default: the model's generation config)"
    )
    beams.add_argument("--greedy", dest="num_beams", action="store_const", const=1, help="the same as --num-beams 1")
    parser.add_argument(
        "--max-new-tokens", type=_positive, metavar="N", help="end a translation there (default: the model's own limit)"
    )
    parser.add_argument(
        "--batch-size", type=_positive, default=32, metavar="N", help="sentences at a time (default: %(default)s)"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps ... (default: cuda where available, else cpu)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights (default: as they were saved)"
    )
    parser.set_defaults(run=_translate)


# What `vanilla-transformer COMMAND` knows; each function adds a command's arguments.
COMMANDS: dict[str, Callable[[argparse.ArgumentParser], None]] = {"translate": _add_translate}


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _translate(arguments: argparse.Namespace) -> None:
    _check_model_name(arguments.model)
    sentences = arguments.sentences or list(_lines_of_standard_input())
    _check_unicode(arguments.sentences)
    if not sentences:
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # whatever the locale says, as the input

    import torch
    from tqdm import tqdm

    tokenizer, model = _load(arguments.model, arguments.device, arguments.dtype)
    options = {"num_beams": arguments.num_beams, "max_new_tokens": arguments.max_new_tokens}
    options = {name: value for name, value in options.items() if value is not None}
    if arguments.num_beams == 1:
        options |= {"do_sample": False, "early_stopping": False}
    window = BATCHES_A_WINDOW * arguments.batch_size
    try:
        # disable=None: a bar if standard error is a terminal, and only then.
        with tqdm(total=len(sentences), unit=" sentences", disable=None, leave=False) as progress:
            for start in range(0, len(sentences), window):
                lines = sentences[start : start + window]
                translations = _translations(tokenizer, model, lines, arguments.batch_size, options, progress)
                progress.write("\n".join(translations))
    except torch.OutOfMemoryError as error:
        raise UsageError("the device's memory is too small; give a smaller --batch-size or --device cpu") from error
    except ValueError as error:  # the model's own words, for instance on a line beyond its learned positions
        raise UsageError(_first_line(error)) from error


def _check_model_name(name: str) -> None:
    """Refuses, before anything slow is imported, what is neither a checkpoint's folder nor a name on the Hub."""
    mend = "--model needs a folder that save_pretrained wrote, or a name on the Hub"
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"{name} is no checkpoint: it has no config.json; {mend}")
    elif path.exists():
        raise UsageError(f"{name} is a file; {mend}")
    elif not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise UsageError(f"{name} does not exist; {mend}")


def _check_unicode(sentences: list[str]) -> None:
    for number, sentence in enumerate(sentences, start=1):
        try:
            sentence.encode()
        except UnicodeEncodeError as error:  # Python's stand-ins for bytes that weren't UTF-8
            raise UsageError(f"sentence {number} is not valid UTF-8; pass it in UTF-8") from error


def _lines_of_standard_input() -> Iterator[str]:
    if sys.stdin.isatty():
        print("Type sentences, one a line; Ctrl-D ends and translates.", file=sys.stderr)
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"line {number} of standard input is not UTF-8 (byte 0x{line[error.start]:02x} at {error.start + 1}); "
                "convert it first, for instance: iconv -f latin1 -t utf-8"
            ) from error
        yield text.rstrip("\r\n")


def _load(name: str, device: str | None, dtype: str | None) -> tuple["PreTrainedTokenizerBase", "PreTrainedModel"]:
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.utils import logging

    from . import register

    register()
    logging.set_verbosity_error()  # standard error is for what the user can mend
    logging.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {device} can't be used here ({_first_line(error)}); try --device cpu") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForSeq2SeqLM.from_pretrained(name, dtype=dtype or "auto")
    except Exception as error:  # a damaged checkpoint raises whatever its file's reader raises
        raise UsageError(
            f"can't load {name} ({_first_line(error)}); --model needs the folder of a sequence-to-sequence model and "
            "its tokenizer, both saved with save_pretrained, or its name on the Hub"
        ) from error
    return tokenizer, model.to(device).eval()


def _translations(
    tokenizer: "PreTrainedTokenizerBase",
    model: "PreTrainedModel",
    sentences: list[str],
    batch_size: int,
    options: dict[str, Any],
    progress: Any,
) -> list[str]:
    """The sentences' translations in their order; batches hold sentences of like length. An empty one stays empty."""
    import torch

    translations = [""] * len(sentences)
    filled = [index for index, sentence in enumerate(sentences) if sentence.strip()]
    progress.update(len(sentences) - len(filled))
    token_ids = tokenizer([sentences[index] for index in filled])["input_ids"] if filled else []
    for batch in _batches([len(ids) for ids in token_ids], batch_size):
        inputs = tokenizer.pad({"input_ids": [token_ids[place] for place in batch]}, return_tensors="pt")
        with torch.inference_mode():
            outputs = model.generate(
                input_ids=inputs["input_ids"].to(model.device),
                attention_mask=inputs["attention_mask"].to(model.device),
                **options,
            )
        for place, text in zip(batch, tokenizer.batch_decode(outputs, skip_special_tokens=True), strict=True):
            # One line each, whatever the model writes.
            translations[filled[place]] = text.replace("\r", " ").replace("\n", " ")
        progress.update(len(batch))
    return translations


def _batches(lengths: list[int], batch_size: int) -> Iterator[list[int]]:
    """Places of sentences of like length, the longest first, so that memory that doesn't suffice shows at once."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if batch and (len(batch) == batch_size or (len(batch) + 1) * lengths[batch[0]] > MAX_TOKENS_A_BATCH):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
