"""`vanilla-transformer export`."""

import argparse

from ..errors import install
from ..interop import FORMATS, QUANTIZATIONS
from .arguments import add, given
from .models import load_model, loading
from .output import UsageError, check_output_folder, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Export a model to another system's format."""
    formats = [name for name in FORMATS if name != "transformers_js"]  # which --onnx asks for
    known = "; ".join(f"{name}: {FORMATS[name]}" for name in formats)
    parser.epilog = f"Formats: {known}. ctranslate2, onnx and --onnx need more packages: {install('export')}."
    add(parser, "model", help="a saved model's folder, or its name on the Hub; of this package, or a Marian model")
    parser.add_argument("--to", required=True, choices=formats, help="the format")
    add(parser, "output")
    weights = "type of the weights, for ctranslate2 (default: as they were saved)"
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help=weights)
    graphs = "with --to stock: also ONNX graphs, in float32 and in 8 bits, that transformers.js opens in a browser"
    parser.add_argument("--onnx", action="store_true", help=graphs)
    add(parser, "trust_remote_code")
    parser.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> None:
    if arguments.quantization is not None and arguments.to != "ctranslate2":
        raise UsageError(f"--quantization is for --to ctranslate2, not {arguments.to}; leave it out")
    if arguments.onnx and arguments.to != "stock":
        raise UsageError(f"--onnx is for --to stock, not {arguments.to}; leave it out")
    check_output_folder(arguments.output)
    name, to = arguments.model, "transformers_js" if arguments.onnx else arguments.to
    with loading():
        from ..interop.export import export, writer_of

        writer_of(to)  # packages that are missing are an error first
        from tqdm import tqdm

        from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
    tokenizer, model = load_model(arguments)
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        raise UsageError(f"{name} has a {type(model).__name__}; only models of this package and Marian's are exported")
    model.to(model.config.dtype)  # float16 is loaded as float32
    has_steps = to in ("onnx", "transformers_js")  # which take a while
    with tqdm(bar_format="{desc} [{elapsed}]", disable=None if has_steps else True, leave=False) as bar:
        options = given(arguments, "quantization") | ({"progress": bar.set_description_str} if has_steps else {})
        notes = export(model, arguments.output, to=to, tokenizer=tokenizer, source=name, **options)
    show(f"exported {name} into {arguments.output}", notes)
