"""What the commands share: errors, types of arguments, text files, decoding options, and loading a model."""

import argparse
import gc
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.messages import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH_TOKENS = 4_096  # as in `evaluation.translation`, which takes seconds to import; a test compares the two


class UsageError(Exception):
    """What the user can fix; the message says how. The command prints it as one line and exits with 2."""


class RunError(Exception):
    """What failed while the command worked, such as a training that diverges. It prints one line and exits with 1."""


def positive(text: str) -> int:
    """Parses an integer of at least 1; a type for argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def not_negative(text: str) -> float:
    """Parses a number of at least 0; a type for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number


def read_lines(name: str) -> list[str]:
    """Reads the lines of a UTF-8 text file, without their ends; one whose name ends in .gz is decompressed.

    Raises:
        UsageError: The file is missing, empty, damaged or not UTF-8; the message names file and line.
    """
    from ..data import formats

    try:
        formats.check_file(Path(name))
        lines = list(formats.read_lines(name))
    except formats.CorpusError as error:
        raise UsageError(str(error)) from error
    if not lines:  # an empty file, compressed
        raise UsageError(f"{name}: the file is empty; give a text file with one sentence per line")
    return lines


def read_parallel(source: str, reference: str) -> tuple[list[str], list[str]]:
    """Reads two files whose lines correspond.

    Raises:
        UsageError: As for `read_lines`, or the files have different numbers of lines.
    """
    sources, references = read_lines(source), read_lines(reference)
    if len(sources) != len(references):
        raise UsageError(
            f"{source} has {len(sources)} lines and {reference} {len(references)}; line n of one must be the "
            "translation of line n of the other"
        )
    return sources, references


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of decoding and of the device; `decoding_options` evaluates them."""
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
        help="when a search ends. true: as soon as there are as many translations as beams; false: when no open beam "
        "would score better if it ended now; never: when none can score better any more (default: the model's; the "
        "paper: true)",
    )
    parser.add_argument(
        "--coverage-penalty",
        type=not_negative,
        metavar="BETA",
        help="prefer hypotheses that attend to all of the source (Wu et al. 2016; default: the model's, usually none)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        metavar="N",
        help="longest translation, in tokens (default: the model's own limit)",
    )
    parser.add_argument(
        "--batch-tokens",
        type=positive,
        default=BATCH_TOKENS,
        metavar="N",
        help="source tokens per batch, times the beam size (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size", type=positive, metavar="N", help="maximum number of sentences per batch (default: no limit)"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps ... (default: cuda where available, else cpu)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="type of the weights (default: as they were saved)"
    )
    parser.add_argument(
        "--compute-type",
        choices=["default", "int8", "compiled"],
        help="on a CPU only. int8: 8-bit weights, several times as fast with nearly the same output; compiled: machine "
        "code for this model, faster with the same output; the first call compiles for about a minute and needs a C++ "
        "compiler",
    )


def decoding_options(arguments: argparse.Namespace, model: "PreTrainedModel") -> dict[str, Any]:
    """Returns the keyword arguments for `generate()`; what they leave out is up to the model's generation config.

    Args:
        arguments: Parsed by a parser that `add_decoding_arguments` has extended.
        model: The model that will decode.

    Raises:
        UsageError: Options contradict each other, or the model has no such option.
    """
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
            raise UsageError(
                "--early-stopping only applies to beam search; leave it out, or give --num-beams 2 or more"
            )
        options["early_stopping"] = {"true": True, "false": False}.get(ends, ends)
    flags = {name: "--" + name.removeprefix("gnmt_").replace("_", "-") for name in own}
    for name in [name for name in own if name in options]:
        if num_beams == 1 and name != "compute_type":
            raise UsageError(
                f"{flags[name]} ranks the hypotheses of a beam search; leave it out, or give --num-beams 2 or more"
            )
        if not isinstance(model, DecodingMixin):
            raise UsageError(f"{flags[name]} needs a model of this package; other models have no such option")
    if arguments.num_beams == 1:
        options |= {"do_sample": False, "early_stopping": False}
    if arguments.length_penalty is not None:
        options["length_penalty"] = 1.0  # transformers' own formula
    return options


@contextmanager
def decoding_errors() -> Iterator[None]:
    """Turns errors of `generate()` and of a model into a `UsageError`."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UsageError(
            "the device is out of memory; give a smaller --batch-tokens or --batch-size, or --device cpu"
        ) from error
    except (ValueError, IndexError) as error:  # a line beyond learned positions, a tokenizer of another model ...
        raise UsageError(first_line(error)) from error


def check_model_name(name: str) -> None:
    """Checks, before anything slow is imported, that a name is a checkpoint's folder or may be a name on the Hub.

    Raises:
        UsageError: It is neither.
    """
    fix = "--model needs a folder that save_pretrained wrote, or a name on the Hub"
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"{name} is not a checkpoint: it has no config.json; {fix}")
    elif path.exists():
        raise UsageError(f"{name} is a file; {fix}")
    elif not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise UsageError(f"{name} does not exist; {fix}")


@contextmanager
def loading() -> Iterator[None]:
    """Keeps the garbage collector away from what is imported and loaded inside the context.

    All of it stays until the program ends, and scanning it again and again takes a third of a command's start-up time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def load_model(name: str, device: str | None, dtype: str | None) -> tuple["PreTrainedTokenizerBase", "PreTrainedModel"]:
    """Loads a checkpoint's tokenizer and model, ready to decode.

    Args:
        name: The checkpoint's folder, or its name on the Hub.
        device: Where the model goes; None: CUDA where it is available, the CPU otherwise.
        dtype: Type of the weights, such as "bfloat16"; None: as they were saved.

    Raises:
        UsageError: The device or the checkpoint can't be used.
    """
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.utils import logging

    from .. import VanillaTransformerForConditionalGeneration, engine, register

    register()
    logging.set_verbosity_error()  # standard error is for what the user can fix
    logging.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {device} can't be used here ({first_line(error)}); try --device cpu") from error
    if torch.device(device).type == "cpu":
        engine.keep_freed_memory()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForSeq2SeqLM.from_pretrained(name, dtype=dtype or "auto")
    except Exception as error:  # a damaged checkpoint raises whatever its file's reader raises
        raise UsageError(
            f"can't load {name} ({first_line(error)}); --model needs the folder of a sequence-to-sequence model and "
            "its tokenizer, both saved with save_pretrained, or its name on the Hub"
        ) from error
    model = model.to(device).eval()
    if isinstance(model, VanillaTransformerForConditionalGeneration):
        engine.freeze(model)  # nobody changes its weights here, so `generate()` needn't compare them at each call
    return tokenizer, model


def load_ensemble(
    names: Sequence[str], device: str | None, dtype: str | None
) -> tuple["PreTrainedTokenizerBase", "PreTrainedModel"]:
    """Loads several checkpoints as one model that averages their probabilities, or a single one as it is.

    Args:
        names: Folders of checkpoints, or names on the Hub; they must have one vocabulary.
        device: As for `load_model`.
        dtype: As for `load_model`.

    Returns:
        The first checkpoint's tokenizer, and the model.

    Raises:
        UsageError: As for `load_model`, or the models can't be combined.
    """
    from ..evaluation.translation import ensemble

    loaded = [load_model(name, device, dtype) for name in names]
    tokenizer, model = loaded[0]
    if len(loaded) > 1:
        try:
            model = ensemble([model for _, model in loaded], [tokenizer for tokenizer, _ in loaded])
        except ValueError as error:
            raise UsageError(f"--ensemble: {first_line(error)}") from error
    return tokenizer, model
