"""What the commands share: errors, numbers, text files, options of decoding, and how a model is named and loaded."""

import argparse
import gc
import gzip
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH_TOKENS = 4_096  # of `translation`, which would take seconds to import; a test holds the two together


class UsageError(Exception):
    """What the user can mend; the message says how. The command ends with it, one line and no traceback."""


def positive(text: str) -> int:
    """Reads a whole number from 1 up, as a type for argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def not_negative(text: str) -> float:
    """Reads a number from 0 up, as a type for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return number


def read_lines(name: str) -> list[str]:
    """Reads the lines of a UTF-8 text file, without their ends; one whose name ends in .gz is unpacked.

    Raises:
        UsageError: The file is missing, empty, damaged or not UTF-8; the message names file and line.
    """
    path = Path(name)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise UsageError(f"{name} {problem}; give a text file of one sentence a line, or one packed with gzip")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            lines = list(decode_lines(file, name))
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(
            f"can't read {name} ({first_line(error)}); give a text file, packed with gzip only as .gz"
        ) from error
    if not lines:
        raise UsageError(f"{name} is empty; give a text file of one sentence a line")
    return lines


def read_parallel(source: str, reference: str) -> tuple[list[str], list[str]]:
    """Reads two files whose lines correspond.

    Raises:
        UsageError: As `read_lines`, or they aren't equally long.
    """
    sources, references = read_lines(source), read_lines(reference)
    if len(sources) != len(references):
        raise UsageError(
            f"{source} has {len(sources)} lines and {reference} {len(references)}; line n of the one has to be the "
            "translation of line n of the other"
        )
    return sources, references


def decode_lines(lines: Iterable[bytes], name: str) -> Iterator[str]:
    """Decodes lines from UTF-8, without their ends, those of Windows too, and a byte-order mark; `name` is for errors.

    Raises:
        UsageError: A line is not UTF-8.
    """
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"line {number} of {name} is not UTF-8 (byte 0x{line[error.start]:02x} at {error.start + 1}); "
                "convert it first, for instance: iconv -f latin1 -t utf-8"
            ) from error
        yield text.rstrip("\r\n")


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares how and where to decode; `decoding_options` reads it."""
    beams = parser.add_mutually_exclusive_group()
    beams.add_argument(
        "--num-beams", "--beam", type=positive, metavar="N", help="beam size (default: the model's generation config)"
    )
    beams.add_argument("--greedy", dest="num_beams", action="store_const", const=1, help="the same as --num-beams 1")
    parser.add_argument(
        "--length-penalty",
        type=not_negative,
        metavar="ALPHA",
        help="divide log-probabilities by ((5 + length) / 6) ** ALPHA (default: the model's; the paper: 0.6)",
    )
    parser.add_argument(
        "--early-stopping",
        choices=["true", "false", "never"],
        help="when a search ends: with as many translations as beams; when no beam would be better if it ended now; or "
        "when none can become better (default: the model's; the paper: true)",
    )
    parser.add_argument(
        "--coverage-penalty",
        type=not_negative,
        metavar="BETA",
        help="prefer hypotheses that attend to the whole source (Wu et al. 2016; default: the model's, usually none)",
    )
    parser.add_argument(
        "--max-new-tokens", type=positive, metavar="N", help="end a translation there (default: the model's own limit)"
    )
    parser.add_argument(
        "--batch-tokens",
        type=positive,
        default=BATCH_TOKENS,
        metavar="N",
        help="source tokens at a time, times the beam size (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size", type=positive, metavar="N", help="sentences at a time at most (default: no such limit)"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps ... (default: cuda where available, else cpu)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights (default: as they were saved)"
    )
    parser.add_argument(
        "--compute-type",
        choices=["default", "int8", "compiled"],
        help="on a CPU: int8: weights of 8 bits, several times as fast with nearly the same output; compiled: machine "
        "code for this model, faster with the same output, once a C++ compiler has worked for a minute",
    )


def decoding_options(arguments: argparse.Namespace, model: "PreTrainedModel") -> dict[str, Any]:
    """Says in keywords of `generate()` what the command line does; the model's generation config has the rest."""
    from ..generation_vanilla_transformer import DecodingMixin

    given = {"num_beams": arguments.num_beams, "max_new_tokens": arguments.max_new_tokens}
    own = {
        "gnmt_length_penalty": arguments.length_penalty,
        "coverage_penalty": arguments.coverage_penalty,
        "compute_type": arguments.compute_type,
    }
    options = {name: value for name, value in {**given, **own}.items() if value is not None}
    num_beams = arguments.num_beams or getattr(model.generation_config, "num_beams", None) or 1
    if (ends := arguments.early_stopping) is not None:
        if num_beams == 1:
            raise UsageError("--early-stopping is about beam search; leave it out, or give --num-beams 2 or more")
        options["early_stopping"] = {"true": True, "false": False}.get(ends, ends)
    flags = {name: "--" + name.removeprefix("gnmt_").replace("_", "-") for name in own}
    for name in [name for name in own if name in options]:
        if num_beams == 1 and name != "compute_type":
            raise UsageError(
                f"{flags[name]} ranks the hypotheses of a beam search; leave it out, or give --num-beams 2 or more"
            )
        if not isinstance(model, DecodingMixin):
            raise UsageError(f"{flags[name]} needs a model of this package; other models don't know it")
    if arguments.num_beams == 1:
        options |= {"do_sample": False, "early_stopping": False}
    if arguments.length_penalty is not None:
        options["length_penalty"] = 1.0  # transformers' own formula
    return options


@contextmanager
def decoding_errors() -> Iterator[None]:
    """Turns what `generate()` and a model complain of into a line for the user."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UsageError(
            "the device's memory is too small; give a smaller --batch-tokens or --batch-size, or --device cpu"
        ) from error
    except (ValueError, IndexError) as error:  # a line beyond learned positions, a tokenizer of another model ...
        raise UsageError(first_line(error)) from error


def check_model_name(name: str) -> None:
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


@contextmanager
def loading() -> Iterator[None]:
    """Spares the garbage collector what is imported and loaded meanwhile.

    All of it stays, and looking it through again and again takes a third of the time until a command can begin.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def load_model(name: str, device: str | None, dtype: str | None) -> tuple["PreTrainedTokenizerBase", "PreTrainedModel"]:
    """Loads a checkpoint's tokenizer and model, on `device` and ready to decode."""
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.utils import logging

    from .. import register
    from ..engine.memory import keep_freed_memory

    register()
    logging.set_verbosity_error()  # standard error is for what the user can mend
    logging.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {device} can't be used here ({first_line(error)}); try --device cpu") from error
    if torch.device(device).type == "cpu":
        keep_freed_memory()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForSeq2SeqLM.from_pretrained(name, dtype=dtype or "auto")
    except Exception as error:  # a damaged checkpoint raises whatever its file's reader raises
        raise UsageError(
            f"can't load {name} ({first_line(error)}); --model needs the folder of a sequence-to-sequence model and "
            "its tokenizer, both saved with save_pretrained, or its name on the Hub"
        ) from error
    return tokenizer, model.to(device).eval()


def load_ensemble(
    names: Sequence[str], device: str | None, dtype: str | None
) -> tuple["PreTrainedTokenizerBase", "PreTrainedModel"]:
    """Loads checkpoints as one model of averaged probabilities, or a single one as itself, and their tokenizer."""
    from ..evaluation.translation import ensemble

    loaded = [load_model(name, device, dtype) for name in names]
    tokenizer, model = loaded[0]
    if len(loaded) > 1:
        try:
            model = ensemble([model for _, model in loaded], [tokenizer for tokenizer, _ in loaded])
        except ValueError as error:
            raise UsageError(f"--ensemble: {first_line(error)}") from error
    return tokenizer, model


def first_line(error: Exception) -> str:
    """What an error says first, to be set into a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
