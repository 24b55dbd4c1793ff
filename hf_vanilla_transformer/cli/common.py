"""Shared by the commands: errors, types of arguments, output, text files, decoding options, and loading a model."""

import argparse
import gc
import importlib
import ipaddress
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import first_line, is_out_of_memory, printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..translation.backend import Backend
    from ..translation.translator import Translator

PROGRAM = "vanilla-transformer"
LANGUAGES = ("src_lang", "tgt_lang", "source_prefix")


class UsageError(Exception):
    """A mistake that the user can fix; the message says how. The command prints it as one line and exits with 2."""


class RunError(Exception):
    """A failure of the work itself, such as a training that diverges. The command prints one line and exits with 1."""


# ---- Arguments ----
def natural(text: str, least: int = 0) -> int:
    """Parses an integer of at least 0, or of at least another number; a type for argparse."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
    return int(text)


def positive(text: str) -> int:
    """Parses an integer of at least 1; a type for argparse."""
    return natural(text, least=1)


def port_number(text: str) -> int:
    """Parses the number of a port; a type for argparse."""
    if not text.isdecimal() or not 1 <= int(text) <= 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give an integer from 1 to 65535")
    return int(text)


def host_name(text: str) -> str:
    """Parses a name or an address to listen on, IPv6 in brackets or not; a type for argparse."""
    return text.strip("[]")


def in_url(host: str) -> str:
    """Returns an address as URLs have it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def is_this_machine(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def not_negative(text: str) -> float:
    """Parses a number of at least 0; a type for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number


# ---- Output ----
def show(text: str) -> None:
    """Prints text that may come from a file, such as a checkpoint's; control characters in it take no effect."""
    print(printable(text), flush=True)


def say_written(*names: str | None) -> None:
    """Prints which files were written; devices, such as /dev/stdout, and None are left out."""
    for name in names:
        if name is not None and Path(name).is_file():
            show(f"wrote {name}")


def table(rows: Iterable[Sequence[str]], *, indent: str = "", align: str = "<") -> str:
    """Formats rows as lines of columns, two spaces apart; `align` ("<" or ">") is that of all columns but the first."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(f"{cell:{align if place else '<'}{widths[place]}}" for place, cell in enumerate(row)) for row in rows
    )
    return "\n".join(indent + line.rstrip() for line in lines)


def check_output(option: str, name: str, overwrite: bool, taken: Sequence[str | None] = ()) -> None:
    """Checks, before any work is done, that the file of an option can be written and is no other option's.

    Raises:
        UsageError: It is a folder or in no folder, another option's file, or it exists and `overwrite` is false.
    """
    path = Path(name)
    if any(file is not None and path.resolve() == Path(file).resolve() for file in taken):
        raise UsageError(f"{option} {name} is the file of another option; give another one")
    if path.is_dir() or not path.parent.is_dir():
        problem = "is a folder" if path.is_dir() else f"can't be written: there is no folder {path.parent}"
        raise UsageError(f"{option} {name} {problem}; give a file in a folder that exists")
    if path.is_file() and not overwrite:
        raise UsageError(f"{option} {name} exists; give another file, or --overwrite to replace it")


# ---- Text files ----
def read_parallel(source: str, reference: str) -> tuple[list[str], list[str]]:
    """Reads two UTF-8 text files with corresponding lines, compressed or not.

    Raises:
        CorpusError: One is missing, empty, damaged or not UTF-8, or has fewer lines.
    """
    from ..data import formats

    for name in (source, reference):
        formats.check_file(Path(name))
    pairs = list(formats.read_text(source, reference))
    if not pairs:  # empty files, compressed
        raise UsageError(f"{source} and {reference} are empty; give text files with one sentence per line")
    return [pair["source"] for pair in pairs], [pair["target"] for pair in pairs]


# ---- Options ----
def add_debug(parser: argparse.ArgumentParser) -> None:
    """Declares --debug, before and after a command's name."""
    # No default: a command's would override an option given before the command.
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error as well"
    )


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of decoding and of the device; `decoding_options` evaluates them."""
    beams = parser.add_mutually_exclusive_group()
    beams.add_argument(
        "--num-beams",
        "--beam",
        type=positive,
        metavar="N",
        help="beam size (default: the model's generation config)",
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
        "--max-source-tokens",
        type=positive,
        metavar="N",
        help="longest line that is translated as one (default: 1,024 tokens, or the model's positions if they are "
        "fewer); a longer one is translated in pieces of at most 256 tokens, and a warning names it",
    )
    parser.add_argument(
        "--unknown",
        choices=["error", "keep", "ignore"],
        help="symbols that the model doesn't know: keep (default): it reads its unknown token, and a warning names "
        "them; ignore: they are left out; error",
    )
    parser.add_argument(
        "--batch-tokens",
        type=positive,
        metavar="N",
        help="source tokens per batch, times the beam size (default: 4,096; ctranslate2: by the number of lines)",
    )
    add_model_arguments(parser)
    add_backend(parser)
    add_compute_type(parser)


def add_language_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the languages of a model that has several; `LANGUAGES` names them."""
    parser.add_argument(
        "--src-lang",
        metavar="LANG",
        help="what to translate from, by the model's name: eng_Latn (NLLB), en_XX (mBART)",
    )
    parser.add_argument(
        "--tgt-lang",
        "--target-lang",
        metavar="LANG",
        help="what to translate into: deu_Latn (NLLB), de_DE (mBART), deu for OPUS-MT's code >>deu<<",
    )
    parser.add_argument(
        "--source-prefix", metavar="TEXT", help='what each source begins with: "translate English to German: " (T5)'
    )


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Declares the library that decodes."""
    parser.add_argument(
        "--backend",
        choices=["engine", "ctranslate2"],
        help="this package's engine (default), or CTranslate2 (the extra export installs it); an exported folder has "
        "its own backend",
    )


def add_compute_type(parser: argparse.ArgumentParser) -> None:
    """Declares the type that the engine computes with."""
    parser.add_argument(
        "--compute-type",
        metavar="TYPE",
        default="default",
        help="int8: 8-bit weights on a CPU, nearly the same output and faster, except for single lines of small "
        "models; ctranslate2 has more types of its own (default: default, the type of the weights)",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the batches' size, of the device, and of loading a model."""
    parser.add_argument(
        "--batch-size",
        type=positive,
        metavar="N",
        help="maximum number of sentences per batch (default: no limit)",
    )
    add_loading_arguments(parser)


def add_loading_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the device, and of loading a model."""
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="threads of the computation on a CPU (default: PyTorch's, a thread per core)",
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps ... (default: cuda where available, else cpu)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="type of the weights (default: as they were saved)"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model; only if you trust it"
    )


def add_host(parser: argparse.ArgumentParser, what: str) -> None:
    """Declares --host, the address that a server listens on; `what` it serves, for the help."""
    parser.add_argument(
        "--host",
        type=host_name,
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default: 127.0.0.1, this machine alone); 0.0.0.0: every computer that reaches this "
        f"machine can use the {what}",
    )


def add_ray(parser: "argparse.ArgumentParser | argparse._ArgumentGroup", purpose: str) -> None:
    """Declares --ray, the address of a cluster."""
    parser.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help=f"{purpose} (without ADDRESS: one that is started on this machine)",
    )


def decoding_options(arguments: argparse.Namespace, backend: "Backend") -> dict[str, Any]:
    """Returns the keyword arguments for `generate()`. The model's generation config has the values of all others.

    Raises:
        UsageError: Options contradict each other, or the backend has no such option.
    """
    from ..plan_vanilla_transformer import Plan
    from ..translation.backend import check_generation

    ends = {"true": True, "false": False}.get(arguments.early_stopping, arguments.early_stopping)
    given = {"num_beams": arguments.num_beams, "max_new_tokens": arguments.max_new_tokens, "early_stopping": ends}
    penalties = {"gnmt_length_penalty": arguments.length_penalty, "coverage_penalty": arguments.coverage_penalty}
    options = {name: value for name, value in {**given, **penalties}.items() if value is not None}
    try:
        check_generation(options, backend.generation_config)
    except ValueError as error:
        raise UsageError(f"{error}; give --num-beams or --max-new-tokens, or correct generation_config.json") from error
    num_beams = arguments.num_beams or Plan.of({}, backend.generation_config).num_beams
    for name in ("length_penalty", "coverage_penalty", "early_stopping"):
        option = "--" + name.replace("_", "-")
        if getattr(arguments, name) is None:
            continue
        if num_beams == 1:
            raise UsageError(f"{option} only applies to beam search; leave it out, or give --num-beams 2 or more")
        if name != "early_stopping" and not backend.is_own:
            raise UsageError(f"{option} needs a model of this package; other models have no such option")
    if arguments.num_beams == 1:
        options |= {"do_sample": False, "early_stopping": False}
    if arguments.length_penalty is not None:
        options["length_penalty"] = 1.0  # transformers' own formula
    return options


@contextmanager
def decoding_errors() -> Iterator[None]:
    """Turns errors of `generate()`, of a model and of a missing library into a `UsageError`."""
    try:
        yield
    except (ValueError, IndexError, ImportError) as error:  # options that contradict each other ...
        raise UsageError(first_line(error)) from error
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise UsageError(
                "the device is out of memory; give a smaller --batch-tokens, --batch-size or "
                "--max-source-tokens, or another --device"
            ) from error
        raise


def warning_of_line(line: str, limit: int, consequence: str) -> str:
    """Returns the warning of a line ("line 3") with more tokens than the limit, and what happens to it."""
    return f"{PROGRAM}: warning: {line} has more than {limit:,} tokens (--max-source-tokens): {consequence}"


def check_model_name(name: str) -> None:
    """Checks, before anything slow is imported, that a name is a model's folder, or is on the Hub or in its cache.

    Raises:
        CheckpointError: A folder is no model of any kind.
        HubError: It is neither.
    """
    from ..checkpoints.kinds import Kind, check_kind

    check_kind(name, Kind.CTRANSLATE2, Kind.ONNX)
    if not Path(name).is_dir():
        from ..data.hub_names import check_model_on_hub  # it takes a fifth of a second

        check_model_on_hub(name)


@contextmanager
def loading() -> Iterator[None]:
    """Switches the garbage collector off while modules and models are loaded, and excludes these objects from it.

    They stay until the program ends, and scanning them again and again takes a third of a command's start-up time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def set_up_transformers() -> None:
    """Keeps standard error for what the user can fix."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_translator(name: str, arguments: argparse.Namespace) -> "Translator":
    """Loads a checkpoint or converts a Marian model, by its folder or name on the Hub, ready to decode.

    Raises:
        UsageError: The device, the backend or the checkpoint can't be used.
    """
    from ..checkpoints.kinds import Kind, kind_of

    processors = os.cpu_count() or 1
    if not getattr(arguments, "ray", None) and (arguments.threads or 0) > processors:
        raise UsageError(f"--threads {arguments.threads} is more than this machine's {processors} processors")
    with decoding_errors(), loading():
        from ..translation.translator import Translator

        if not (is_exported := kind_of(name) is Kind.CTRANSLATE2):
            from .. import engine

            set_up_transformers()
            engine.keep_freed_memory()
        translator = Translator(name, **opening(arguments))
        if is_exported and "transformers" in sys.modules:  # it needs that only for some tokenizers
            set_up_transformers()
        return translator


def import_extra(module: str) -> Any:
    """Imports a module that needs an extra; without it, the `UsageError` says how to install it."""
    try:
        return importlib.import_module(f"..{module}", __package__)
    except ImportError as error:
        raise UsageError(first_line(error)) from error


def opening(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of `Translator` that a command has, and that are given."""
    names = ("device", "compute_type", "threads", "backend", "dtype", "trust_remote_code", "warm_up")
    return {name: value for name in names if (value := getattr(arguments, name, None)) is not None}


def on_every_node(model: str) -> str:
    """Returns a model's name in any working directory."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def load_ensemble(names: Sequence[str], arguments: argparse.Namespace) -> tuple["PreTrainedTokenizerBase", "Backend"]:
    """Loads several checkpoints as one model that averages their probabilities, or a single one as it is.

    Returns:
        The first checkpoint's tokenizer, and what decodes.

    Raises:
        UsageError: As for `load_translator`, or the models can't be combined: they don't share a vocabulary, say.
    """
    loaded = [load_translator(name, arguments) for name in names]
    if len(loaded) == 1:
        return loaded[0].tokenizer, loaded[0].decodes_with
    if other := next((one for one in loaded if one.backend != "engine"), None):
        raise UsageError(f"several models can't be averaged by the backend {other.backend}; give the models themselves")
    from ..translation.ensembles import ensemble

    try:
        return loaded[0].tokenizer, ensemble([one.model for one in loaded], [one.tokenizer for one in loaded])
    except ValueError as error:
        raise UsageError(f"several models can't be averaged: {first_line(error)}") from error
