"""What the commands share: their errors, the numbers they take, and how a model is named and loaded."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class UsageError(Exception):
    """What the user can mend; the message says how. The command ends with it, one line and no traceback."""


def positive(text: str) -> int:
    """Reads a whole number from 1 up, as a type for argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


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


def load_model(name: str, device: str | None, dtype: str | None) -> tuple["PreTrainedTokenizerBase", "PreTrainedModel"]:
    """Loads a checkpoint's tokenizer and model, on `device` and ready to decode."""
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.utils import logging

    from .. import register

    register()
    logging.set_verbosity_error()  # standard error is for what the user can mend
    logging.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {device} can't be used here ({first_line(error)}); try --device cpu") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForSeq2SeqLM.from_pretrained(name, dtype=dtype or "auto")
    except Exception as error:  # a damaged checkpoint raises whatever its file's reader raises
        raise UsageError(
            f"can't load {name} ({first_line(error)}); --model needs the folder of a sequence-to-sequence model and "
            "its tokenizer, both saved with save_pretrained, or its name on the Hub"
        ) from error
    return tokenizer, model.to(device).eval()


def first_line(error: Exception) -> str:
    """What an error says first, to be set into a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
