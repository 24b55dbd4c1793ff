"""`vanilla-transformer convert`."""

import argparse
from pathlib import Path

from ..interop import ON_HUB, SYSTEMS
from .arguments import add
from .models import loading, set_up_transformers
from .output import UsageError, check_output_folder, show


class _ListMappings(argparse.Action):
    """Prints the shipped mappings and ends, as --help does."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        from ..interop.mappings import shipped_mappings

        print("\n".join(f"{name}: {what}" for name, what in shipped_mappings().items()))
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Convert a model of another system into one of this package."""
    known = "; ".join(f"{name}: {what}" for name, (_, what) in SYSTEMS.items())
    parser.epilog = (
        f"Systems: {known}. The result computes the same logits; notes say where translations may differ. Then: "
        "vanilla-transformer translate --model DIR"
    )
    source = "the model's file or folder, or the name on the Hub of a model of Marian or in CTranslate2's format"
    parser.add_argument("source", metavar="SOURCE", help=source)
    add(parser, "output")
    system = "the system that SOURCE comes from (default: recognised)"
    parser.add_argument("--from", dest="system", choices=list(SYSTEMS), help=system)
    layout = "layout of a state dict: your file, or the name of one of the package's"
    parser.add_argument("--mapping", metavar="YAML", help=layout)
    parser.add_argument("--list-mappings", action=_ListMappings, nargs=0, help="list the package's mappings")
    logits = "ids and the original's logits (docs/interop.md): nothing is written if others"
    parser.add_argument("--check", metavar="FILE", help=logits)
    vocabulary = "of Marian's .npz: the vocabulary (.spm, .yml, .json, .txt), or the source's and the target's"
    parser.add_argument("--vocab", nargs="+", default=(), metavar="FILE", help=vocabulary)
    parser.add_argument("--no-tokenizer", action="store_true", help="convert the model alone")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit on the Hub (default: main)")
    parser.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> None:
    from ..data.hub_names import check_model_on_hub

    check_output_folder(arguments.output)
    is_local = Path(arguments.source).exists()
    if not is_local and (arguments.system not in (None, *ON_HUB) or arguments.mapping):
        raise UsageError(f"there is no file or folder {arguments.source}")
    is_local = is_local or not check_model_on_hub(arguments.source)
    with loading():
        from ..interop.convert import convert

        set_up_transformers()
    notes = convert(
        arguments.source,
        arguments.output,
        system=arguments.system,
        mapping=arguments.mapping,
        with_tokenizer=not arguments.no_tokenizer,
        revision=arguments.revision,
        vocab=tuple(arguments.vocab),
        check=arguments.check,
        local_files_only=is_local,
    )
    show(f"converted {arguments.source} into {arguments.output}", notes)
