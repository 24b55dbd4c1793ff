"""`vanilla-transformer demo`."""

import argparse
from contextlib import suppress
from pathlib import Path

from .arguments import (
    add_compute_type,
    add_host,
    add_loading_arguments,
    add_model,
    in_url,
    is_this_machine,
    port_number,
)
from .models import check_model_name, import_extra, load_translator
from .output import UsageError, warn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Show a page to try a model in the browser."""
    parser.epilog = "The page needs no network and stores nothing. Without --host, only this machine can reach it."
    add_model(parser)
    parser.add_argument(
        "--example", nargs="+", action="extend", default=[], metavar="TEXT", help="texts to choose from"
    )
    parser.add_argument(
        "--port", type=port_number, metavar="N", help="port of the page (default: the first that is free from 7860 on)"
    )
    add_host(parser, "page")
    add_loading_arguments(parser)
    add_compute_type(parser)
    parser.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> None:
    """Shows the page until it is interrupted."""
    name, host, port = arguments.model, arguments.host, arguments.port
    check_model_name(name)
    demo = import_extra("demo")
    from ..checkpoints.kinds import Kind, kind_of

    if kind_of(name) is Kind.CTRANSLATE2:
        raise UsageError(f"{name} was exported, and the page shows attention weights; give --model the model itself")
    if not is_this_machine(host):
        reach = "every computer that reaches this machine can use the page; without --host, only its own users can"
        warn(f"--host {host}: {reach}")
    page = demo.build_page(load_translator(name, arguments), arguments.example, _language(name))
    try:
        address = demo.start(page, in_url(host), port)
    except OSError as error:
        where = f"{host}, port {port}," if port else host
        raise UsageError(f"{where} isn't available; give another --port or --host, or leave them out") from error
    print(f"{address} shows the page; Ctrl+C ends it", flush=True)
    page.block_thread()


def _language(name: str) -> str | None:
    """Returns by which language's rules paragraphs are split; None: it isn't known, or sentencex isn't installed."""
    from ..hub.facts import said_by_author
    from ..translation.reading import check_splitting

    with suppress(ValueError, ImportError):
        check_splitting(language := said_by_author(Path(name)).get("source_language"))
        return language
    return None
