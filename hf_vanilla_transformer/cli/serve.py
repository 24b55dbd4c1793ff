"""`vanilla-transformer serve`."""

import argparse
import importlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from ..errors import first_line
from .common import (
    PROGRAM,
    UsageError,
    add_backend,
    add_compute_type,
    add_loading_arguments,
    check_model_name,
    is_this_machine,
    load_translator,
    port_number,
    positive,
)

KEY = "VANILLA_TRANSFORMER_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Answer HTTP requests with LibreTranslate's API."""
    parser.epilog = (
        "POST /translate takes q, source, target, format and alternatives; GET /docs describes it. Example: "
        f"{PROGRAM} serve --model en-de=outputs/model fr-de=Helsinki-NLP/opus-mt-fr-de"
    )
    parser.add_argument(
        "--model",
        required=True,
        nargs="+",
        metavar="[PAIR=]DIR",
        help="saved models: folders, or names on the Hub, each with the languages that it translates, en-de=DIR; "
        "without them, those of --languages or of the model's card",
    )
    parser.add_argument(
        "--languages", nargs="+", default=[], metavar="PAIR", help="what a single model translates: en-de"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default: 127.0.0.1, this machine alone); 0.0.0.0: every computer that reaches this "
        "machine",
    )
    parser.add_argument("--port", type=port_number, default=5000, metavar="N", help="port (default: 5000)")
    parser.add_argument(
        "--api-key",
        default=os.environ.get(KEY),
        metavar="KEY",
        help=f"what requests have to give as api_key (default: ${KEY}, so that no list of processes shows it)",
    )
    parser.add_argument(
        "--cors-origin", nargs="+", default=[], metavar="ORIGIN", help="origins whose pages may use it in a browser"
    )
    parser.add_argument(
        "--max-characters", type=positive, default=50_000, metavar="N", help="characters of a request (default: 50,000)"
    )
    parser.add_argument(
        "--timeout", type=positive, default=60, metavar="S", help="seconds until a request fails (default: 60)"
    )
    add_loading_arguments(parser)
    add_backend(parser)
    add_compute_type(parser)
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> None:
    given = [_given(text) for text in arguments.model]
    for _, name in given:
        check_model_name(name)
    try:
        serving = importlib.import_module("..serving.app", __package__)  # an extra
        server = importlib.import_module("..serving.server", __package__)
    except ImportError as error:
        raise UsageError(first_line(error)) from error
    from ..serving.models import LanguagesError, batcher_of, languages_of, pair, routes

    metrics, thread = serving.Metrics(), ThreadPoolExecutor(1)
    known: dict[tuple[str, str], object] = {}
    try:
        asked = [pair(text) for text in arguments.languages]
        if asked and (len(given) > 1 or given[0][0]):
            raise UsageError("--languages is for one model without a pair; give each model its own: --model en-de=DIR")
        wanted = [([pair(text)] if text else asked or [languages_of(name)], name) for text, name in given]
        for pairs, name in wanted:
            translator = thread.submit(load_translator, name, arguments).result()
            found = routes(translator, pairs, batcher_of(translator, metrics.add, thread=thread))
            if twice := found.keys() & known.keys():
                raise UsageError(f"two models translate {'-'.join(*twice)}; give each pair once")
            known |= found
    except LanguagesError as error:
        raise UsageError(str(error)) from error
    app = serving.create_app(
        known,
        metrics,
        api_key=arguments.api_key,
        limits=serving.Limits(characters=arguments.max_characters, seconds=arguments.timeout),
        cors_origins=arguments.cors_origin,
    )
    if not is_this_machine(arguments.host) and not arguments.api_key:
        print(f"{PROGRAM}: warning: every computer that reaches this machine can use the service", file=sys.stderr)
    print(f"http://{arguments.host}:{arguments.port} translates {', '.join(map('-'.join, known))}", flush=True)
    server.run(app, arguments.host, arguments.port)


def _given(text: str) -> tuple[str, str]:
    """Returns a model's pair of languages, if it is given, and its name."""
    languages, equals, name = text.partition("=")
    return (languages, name) if equals and "/" not in languages else ("", text)
