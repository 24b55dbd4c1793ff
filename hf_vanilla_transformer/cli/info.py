"""`vanilla-transformer info`."""

import argparse
import os
import platform
from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING

from .. import __version__

if TYPE_CHECKING:
    from ..engine.cpu import Processor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Show versions and what is known of this machine."""
    parser.add_argument(
        "--machine",
        action="store_true",
        help="also show what the engine derives from the processor, and its thresholds",
    )
    parser.set_defaults(run=_show)


def _show(arguments: argparse.Namespace) -> None:
    """Prints versions, the processor and the threads, and with --machine every field of `engine.cpu`."""
    import torch
    import transformers

    from ..engine.cpu import CPU, VARIABLE

    facts = [
        ("hf_vanilla_transformer", __version__),
        ("torch", torch.__version__),
        ("transformers", transformers.__version__),
        ("Python", platform.python_version()),
        ("system", f"{platform.system()} {platform.machine()}"),
        ("processor", torch.cpu.get_capabilities().get("cpu_name") or "unknown"),
        ("vector instructions", torch.backends.cpu.get_cpu_capability()),
        ("threads", str(torch.get_num_threads())),
        ("GPU", torch.cuda.get_device_name() if torch.cuda.is_available() else "none"),
    ]
    if arguments.machine:
        facts.append((VARIABLE, os.environ.get(VARIABLE) or "not set"))
    print(_table(facts))
    if arguments.machine:
        print(f"\n{_table(_fields(CPU))}")


def _fields(processor: "Processor") -> Iterable[tuple[str, str, str]]:
    """Describes a processor: each field, its value as the environment variable takes it, and what it decides."""
    for one in fields(processor):
        yield one.name, str(getattr(processor, one.name)).lower(), one.metadata["decides"]


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    """Aligns columns, two spaces apart."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
