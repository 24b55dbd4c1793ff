"""`vanilla-transformer export`."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import first_line, install
from ..interop import FORMATS
from ..interop.export import export, writer_of
from .arguments import add_trust
from .models import check_model_name, loading, set_up_transformers
from .output import UsageError, check_output_folder, show

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

# CTranslate2's.
QUANTIZATIONS = ("int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Export a model to another system's format."""
    formats = {name: what for name, what in FORMATS.items() if name != "transformers_js"}  # which --onnx asks for
    known = "; ".join(f"{name}: {what}" for name, what in formats.items())
    parser.epilog = f"Formats: {known}. ctranslate2, onnx and --onnx need more packages: {install('export')}."
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR",
        help="a saved model's folder, or its name on the Hub; of this package, or a Marian model",
    )
    parser.add_argument("--to", required=True, choices=list(formats), help="the format")
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="folder to write; it must not exist, or be empty"
    )
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="type of the weights, for ctranslate2 (default: as they were saved)",
    )
    parser.add_argument(
        "--onnx",
        action="store_true",
        help="with --to stock: also ONNX graphs, in float32 and in 8 bits, that transformers.js opens in a browser",
    )
    add_trust(parser)
    parser.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> None:
    """Exports and says where the result is."""
    if arguments.quantization is not None and arguments.to != "ctranslate2":
        raise UsageError(f"--quantization is for --to ctranslate2, not {arguments.to}; leave it out")
    if arguments.onnx and arguments.to != "stock":
        raise UsageError(f"--onnx is for --to stock, not {arguments.to}; leave it out")
    check_output_folder(arguments.output)
    check_model_name(arguments.model)
    with loading():
        set_up_transformers()
        to = "transformers_js" if arguments.onnx else arguments.to
        check_packages(to)
    tokenizer, model = _load(arguments.model, arguments.trust_remote_code)
    options = {} if arguments.quantization is None else {"quantization": arguments.quantization}
    with _progress(to) as progress:
        notes = export(
            model, arguments.output, to=to, tokenizer=tokenizer, source=arguments.model, **options, **progress
        )
    show(f"exported {arguments.model} into {arguments.output}")
    for note in notes:
        show(f"note: {note}")


@contextmanager
def _progress(to: str) -> Iterator[dict[str, Any]]:
    """Shows the step that an export is at, if it takes a while and standard error is a terminal; yields the option."""
    from tqdm import tqdm

    has_steps = to in ("onnx", "transformers_js")
    with tqdm(bar_format="{desc} [{elapsed}]", disable=None if has_steps else True, leave=False) as bar:
        yield {"progress": bar.set_description_str} if has_steps else {}


def check_packages(to: str) -> None:
    """Imports what writes a format; packages that it needs may be missing."""
    try:
        writer_of(to)
    except ImportError as error:
        option = "--onnx" if to == "transformers_js" else f"--to {to}"
        need = f"{option} needs more packages ({first_line(error)})"
        raise UsageError(f"{need}: {install('export')}") from error


def _load(
    name: str, trust_remote_code: bool
) -> tuple["PreTrainedTokenizerBase", "VanillaTransformerForConditionalGeneration"]:
    """Loads a model on the CPU; a Marian model is converted first."""
    from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
    from ..translation.opening import load_to_translate

    tokenizer, model = load_to_translate(name, "cpu", trust_remote_code=trust_remote_code)
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        raise UsageError(f"{name} has a {type(model).__name__}; only models of this package and Marian's are exported")
    return tokenizer, model.to(model.config.dtype)  # float16 is loaded as float32
