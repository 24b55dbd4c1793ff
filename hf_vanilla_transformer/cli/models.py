"""What commands decode with: models, ensembles, and the options of decoding."""

import argparse
import atexit
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import first_line, is_out_of_memory
from .arguments import BACKEND, BATCHES, LANGUAGES, LOADING, SEARCH, TEXTS, given
from .output import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..translation.backend import Backend
    from ..translation.translator import Translator


def check_model_name(name: str) -> None:
    """Checks, before anything slow is imported, that a name is a model's folder, or is on the Hub or in its cache."""
    from ..checkpoints.kinds import Kind, check_kind

    if check_kind(name, Kind.CTRANSLATE2, Kind.ONNX) is Kind.NAME:
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
        if "triton" in sys.modules:  # it reports objects that are left when the program ends, on standard error
            atexit.register(gc.unfreeze)


def set_up_transformers() -> None:
    """Keeps standard error for what the user can fix."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def check_ensemble(names: Sequence[str], arguments: argparse.Namespace) -> None:
    """Checks the names of models, and that an ensemble has several."""
    for name in names:
        check_model_name(name)
    if arguments.ensemble and len(names) < 2:
        raise UsageError("--ensemble needs two models or more; give --model A B")


def load_translator(model: str | Sequence[str], arguments: argparse.Namespace) -> "Translator":
    """Loads a checkpoint or converts a Marian model, by its folder or name on the Hub; several are an ensemble."""
    from ..checkpoints.kinds import Kind, kind_of

    names = [model] if isinstance(model, str) else list(model)
    processors = os.cpu_count() or 1
    if not getattr(arguments, "ray", None) and (arguments.threads or 0) > processors:
        raise UsageError(f"--threads {arguments.threads} is more than this machine's {processors} processors")
    with decoding_errors(), loading():
        from ..translation.translator import Translator

        if not (is_exported := kind_of(names[0]) is Kind.CTRANSLATE2):
            from .. import engine

            set_up_transformers()
            engine.keep_freed_memory()
        translator = Translator(names if names[1:] else names[0], **opening(arguments))
        if is_exported and "transformers" in sys.modules:  # it needs that only for some tokenizers
            set_up_transformers()
        return translator


def load_model(arguments: argparse.Namespace) -> "tuple[PreTrainedTokenizerBase, PreTrainedModel]":
    """Loads the model of a command, by its folder or name on the Hub, on the CPU, with its tokenizer."""
    check_model_name(arguments.model)
    with loading():
        set_up_transformers()
        from ..translation.opening import load_to_translate
    return load_to_translate(arguments.model, "cpu", trust_remote_code=arguments.trust_remote_code)


def opening(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of `Translator` that a command has, and that are given."""
    return given(arguments, *LOADING, *BACKEND, "warm_up")


def on_every_node(model: str) -> str:
    """Returns a model's name in any working directory."""
    return str(Path(model).resolve()) if Path(model).exists() else model


# ---- Decoding ----
def call_options(arguments: argparse.Namespace, translator: "Translator") -> dict[str, Any]:
    """Returns the options for calls of the translator. The model's generation config has the values of all others."""
    options = given(arguments, *LANGUAGES, *TEXTS, *BATCHES, "split_sentences")
    return options | _search_options(arguments, translator.decodes_with)


def _search_options(arguments: argparse.Namespace, backend: "Backend") -> dict[str, Any]:
    from ..plan_vanilla_transformer import Plan

    options = given(arguments, "num_beams", *SEARCH)
    alone = Plan.of(given(arguments, "num_beams"), backend.generation_config).num_beams == 1
    for name in ("length_penalty", "coverage_penalty", "early_stopping"):
        option = "--" + name.replace("_", "-")
        if alone and name in options:
            raise UsageError(f"{option} only applies to beam search; leave it out, or give --num-beams 2 or more")
        if name in options and name != "early_stopping" and not backend.is_own:
            raise UsageError(f"{option} needs a model of this package; other models have no such option")
    if "early_stopping" in options:
        options["early_stopping"] = {"true": True, "false": False, "never": "never"}[options["early_stopping"]]
    if options.get("num_beams") == 1:
        options |= {"do_sample": False, "early_stopping": False}
    if "length_penalty" in options:
        options["gnmt_length_penalty"] = options["length_penalty"]
        options["length_penalty"] = 1.0  # transformers' own formula
    return options


@contextmanager
def decoding_errors() -> Iterator[None]:
    """Turns errors of `generate()` and of a model into a `UsageError`; a function may have it as a decorator."""
    try:
        yield
    except (ValueError, IndexError) as error:  # options that contradict each other ...
        raise UsageError(first_line(error)) from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        smaller = "a smaller --batch-tokens, --batch-size or --max-source-tokens, or another --device"
        raise UsageError(f"the device is out of memory; give {smaller}") from error
