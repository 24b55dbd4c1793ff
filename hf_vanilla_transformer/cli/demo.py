"""`vanilla-transformer demo`."""

import argparse
import importlib
import ipaddress
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import first_line
from .common import (
    PROGRAM,
    UsageError,
    add_compute_type,
    add_loading_arguments,
    backend_options,
    check_model_name,
    decoding_errors,
    load_translator,
    loading,
    use_threads,
)

if TYPE_CHECKING:
    from ..demo.models import Model

HOST = "127.0.0.1"
# Options of the page that is shown here, which a Space doesn't have.
HERE = ("host", "port", "backend", "compute_type", "threads")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Show a page to try models in the browser, or write it as a Space."""
    parser.epilog = (
        "The page is for this machine alone, needs no network, reads no files and stores nothing. With --space it is "
        "written instead, with the model or its name on the Hub, into a folder that can be uploaded as a Space."
    )
    parser.add_argument(
        "--model",
        nargs="+",
        action="extend",
        required=True,
        metavar="DIR",
        help="a saved model's folder, or its name on the Hub; several are shown side by side",
    )
    parser.add_argument(
        "--example", nargs="+", action="extend", default=[], metavar="TEXT", help="texts to choose from"
    )
    parser.add_argument(
        "--port", type=_port, metavar="N", help="port of the page (default: the first that is free from 7860 on)"
    )
    parser.add_argument(
        "--host",
        metavar="ADDRESS",
        help=f"address to listen on (default: {HOST}, this machine alone); 0.0.0.0: whoever reaches this machine can "
        "use the page",
    )
    parser.add_argument(
        "--space", type=Path, metavar="DIR", help="write the page there as a Space, a folder that must not exist yet"
    )
    parser.add_argument(
        "--repo",
        nargs="+",
        type=_repository,
        metavar="REPO",
        help="with --space: the models' names on the Hub, user/name, from where the Space loads them (default: it has "
        "copies of models from folders)",
    )
    add_loading_arguments(parser)
    add_compute_type(parser)
    parser.set_defaults(run=_demo)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give an integer from 1 to 65535")
    return int(text)


def _repository(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a repository's name; give user/name")
    return text


def _demo(arguments: argparse.Namespace) -> None:
    """Checks everything that can be checked before a model is loaded, and shows or writes the page."""
    for name in arguments.model:
        check_model_name(name)
    if arguments.space is not None:
        _check_space(arguments)
    elif arguments.repo is not None:
        raise UsageError("--repo is for --space DIR, which writes a Space; the page here loads --model")
    try:
        importlib.import_module("..demo.page", __package__)  # it needs Gradio, which is an extra
    except ImportError as error:
        raise UsageError(first_line(error)) from error
    if arguments.space is None:
        _show(arguments)
    else:
        _write(arguments)


# ---- A page here ----
def _show(arguments: argparse.Namespace) -> None:
    from ..demo.page import build_page
    from ..demo.server import check_address, serve

    host = arguments.host or HOST
    try:
        check_address(host, arguments.port)
    except OSError as error:
        where = f"{host}, port {arguments.port}," if arguments.port else host
        fix = "leave out --host, or give another --port"
        raise UsageError(f"{where} can't be listened on ({error.strerror or error}); {fix}") from error
    if not _is_this_machine(host):
        warning = "whoever can reach this machine can use the page; without --host, only its own users can"
        print(f"{PROGRAM}: warning: --host {host}: {warning}", file=sys.stderr)
    with loading(), decoding_errors():
        use_threads(arguments.threads)
        models = [_translated(name, arguments) for name in arguments.model]
    page = build_page(models, arguments.example)
    serve(page, host, arguments.port, lambda address: print(f"{address} shows the page; Ctrl+C ends it", flush=True))


def _translated(name: str, arguments: argparse.Namespace) -> "Model":
    """Loads a model for the page; attention weights are always those of the model in PyTorch."""
    from ..demo.local import translated_by
    from ..translation.ctranslate2 import is_exported

    if is_exported(name):
        raise UsageError(f"{name} was exported, and the page shows attention weights; give --model the model itself")
    where = (arguments.device, arguments.dtype, arguments.trust_remote_code)
    translator = load_translator(name, *where, **backend_options(arguments))
    shown = translator if translator.backend == "engine" else load_translator(name, *where)
    return translated_by(name, translator, shown.model)


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


# ---- A Space ----
def _check_space(arguments: argparse.Namespace) -> None:
    folder: Path = arguments.space
    if given := [name for name in HERE if getattr(arguments, name) not in (None, "default")]:
        raise UsageError(f"--{given[0].replace('_', '-')} is for a page that is shown here; leave it out with --space")
    if arguments.repo is not None and len(arguments.repo) != len(arguments.model):
        numbers = f"--model names {len(arguments.model)} and --repo {len(arguments.repo)}"
        raise UsageError(f"{numbers}; give a repository for each model, or leave out --repo")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"--space {folder} exists; give another folder, or remove it first")
    if not folder.absolute().parent.is_dir():
        raise UsageError(f"--space {folder} can't be written: there is no folder {folder.parent}")


def _write(arguments: argparse.Namespace) -> None:
    from ..demo.space import source_of, write_space
    from ..hub.upload import PublishError

    with loading(), decoding_errors():
        for name in arguments.model:  # a Space with a model that can't be loaded would only fail later
            load_translator(name, arguments.device, arguments.dtype, arguments.trust_remote_code)
    repos: Sequence[str | None] = arguments.repo or [None] * len(arguments.model)
    try:
        sources = [source_of(name, repo) for name, repo in zip(arguments.model, repos, strict=True)]
        files = write_space(arguments.space, sources, arguments.example)
    except PublishError as error:
        raise UsageError(str(error)) from error
    print(f"{arguments.space} is a Space of {len(files)} files; try it with: python {arguments.space / 'app.py'}")
