"""`vanilla-transformer info`."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from .models import check_model_name, set_up_transformers
from .output import RunError, UsageError, show, table

if TYPE_CHECKING:
    from ..hub.description import Description


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe a checkpoint, or an exported model."""
    parser.epilog = (
        "A model is described from its configuration and the headers of its weights: architecture in the paper's "
        "symbols, parameters, tokenizer and decoding. Its code doesn't run. The exit code is 1 if the tokenizer isn't "
        "the model's."
    )
    parser.add_argument("model", metavar="DIR", help="a saved model's folder, or its name on the Hub")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    renew = "first replace version 0.3.0's code in DIR by this version's; edited files are refused"
    parser.add_argument("--renew-code", action="store_true", help=renew)
    parser.set_defaults(run=_info)


def _info(arguments: argparse.Namespace) -> None:
    check_model_name(arguments.model)
    if arguments.renew_code and not Path(arguments.model).is_dir():
        raise UsageError(f"--renew-code is for a folder, and {arguments.model} is none; give a download of it")
    from ..checkpoints.code import renew_code
    from ..interop.describe import describe

    set_up_transformers()
    if arguments.renew_code:
        renew_code(Path(arguments.model))
    found = describe(arguments.model)
    values = {"total": found.total, **asdict(found)}
    show(json.dumps(values, indent=1, ensure_ascii=False) if arguments.json else _text(found))
    if found.problems:
        raise RunError("; ".join(found.problems))


def _text(found: "Description") -> str:
    """Formats the description as tables, one per subject, without unknown values."""
    from ..hub.model_card import architecture_rows

    subjects = {
        "Architecture": [("kind", found.kind), *architecture_rows(found.config)],
        "Parameters": _parameters(found),
        "Tokenizer": _tokenizer(found),
        "Decoding, unless options say otherwise": [(name, str(value)) for name, value in found.decoding.items()],
        "Code": [("note", found.code)] if found.code else [],
        "Problems": [("problem", problem) for problem in found.problems],
    }
    parts = [f"{subject}\n{table(rows, indent='  ')}" for subject, rows in subjects.items() if rows]
    return "\n\n".join([found.name, *parts])


def _parameters(found: "Description") -> list[tuple[str, str]]:
    if found.total is None:  # of pickles and of graphs
        return []
    size = f"{found.saved_bytes / 1e6:,.1f} MB" if found.saved_bytes >= 1e6 else f"{found.saved_bytes:,} bytes"
    parts = [(part, f"{number:,}") for part, number in {"total": found.total, **found.parameters}.items()]
    return [*parts, ("saved as", f"{size} ({', '.join(found.types)})")]


def _tokenizer(found: "Description") -> list[tuple[str, str]]:
    tokenizer = found.tokenizer
    if tokenizer is None:
        return [("class", "none that can be used")]
    return [
        ("class", tokenizer.kind),
        ("tokens", f"{tokenizer.size:,}"),
        *((name, text) for name, text in tokenizer.special_tokens.items()),
        *([("fingerprint", tokenizer.fingerprint)] if tokenizer.fingerprint else []),
    ]
