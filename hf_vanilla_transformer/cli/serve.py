"""`vanilla-transformer serve`."""

import argparse
import ipaddress
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ..errors import first_line, install
from ..serving.settings import ServiceSettings
from .arguments import BACKEND, LOADING, add, positive
from .models import check_model_name, load_translator, on_every_node, opening
from .output import PROGRAM, UsageError, warn

Models = dict[str, list[tuple[str, str]]]  # name -> the languages, source and target, that it translates
Ready = Callable[[], None]
KEY = "VANILLA_TRANSFORMER_API_KEY"
# How many kernels, one per shape of a product, oneDNN and torch's layer over it keep; by default 1,024, some 600 MB.
KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Answer HTTP requests with LibreTranslate's API."""
    parser.epilog = (
        "POST /translate takes q, source, target, format and alternatives; GET /docs describes it. Example: "
        f"{PROGRAM} serve --model en-de=outputs/model fr-de=Helsinki-NLP/opus-mt-fr-de"
    )
    models = "saved models: folders, or names on the Hub, each with the languages that it translates, en-de=DIR; "
    models += "without them, those of --languages, of an Argos package, or of `card --source-lang en --target-lang de`"
    add(parser, "model", nargs="+", metavar="[PAIR=]DIR", help=models)
    single = "what a single model translates: en-de"
    parser.add_argument("--languages", nargs="+", default=[], metavar="PAIR", help=single)
    address = "address to listen on (default: 127.0.0.1, this machine alone); 0.0.0.0: every computer that reaches "
    address += "this machine can use the service"
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=address)
    parser.add_argument("--port", type=_port, default=5000, metavar="N", help="port (default: 5000)")
    key = f"what requests have to give as api_key (default: ${KEY}, which the list of processes doesn't show)"
    parser.add_argument("--api-key", default=os.environ.get(KEY), metavar="KEY", help=key)
    origins = "origins whose pages may use it in a browser"
    parser.add_argument("--cors-origin", nargs="+", default=[], metavar="ORIGIN", help=origins)
    names = "names in the header Host, a proxy's; *: any"
    parser.add_argument("--allowed-host", type=_host, nargs="+", metavar="NAME", help=names)
    most = "characters of a request (default: %(default)s)"
    parser.add_argument("--max-characters", type=positive, default=ServiceSettings.characters, metavar="N", help=most)
    add(parser, "ray")
    replicas = "with --ray, replicas at most (default: 1)"
    parser.add_argument("--replicas", type=positive, metavar="N", help=replicas)
    in_memory = "with --ray, models in memory of a replica (default: 4)"
    parser.add_argument("--models-per-replica", type=positive, metavar="N", help=in_memory)
    until = "seconds until a request fails (default: %(default)s)"
    parser.add_argument("--timeout", type=positive, default=ServiceSettings.seconds, metavar="S", help=until)
    add(parser, *LOADING, *BACKEND)
    parser.set_defaults(run=_serve, warm_up=True)


def _serve(arguments: argparse.Namespace) -> None:
    os.environ.update(KERNELS | dict(os.environ))  # before the first product
    from ..serving import app  # noqa: F401  (a package that is missing is an error first)

    if arguments.api_key == "":
        raise UsageError(f"--api-key or ${KEY} is empty; give a key, or none at all")
    if not arguments.ray and (arguments.replicas or arguments.models_per_replica):
        raise UsageError("--replicas and --models-per-replica are for --ray; leave them out")
    models, arguments.host = _models(arguments), arguments.host.strip("[]")  # of IPv6
    is_open = not _is_this_machine(arguments.host)
    if is_open and not arguments.api_key:
        warn("every computer that reaches this machine can use the service")
    hosts = arguments.allowed_host or (["*"] if is_open else [])
    name = f"[{arguments.host}]" if ":" in arguments.host else arguments.host  # as URLs have IPv6
    settings = ServiceSettings(
        api_key=arguments.api_key,
        cors_origins=arguments.cors_origin,
        allowed_hosts=["localhost", "127.0.0.1", "[::1]", name, *hosts],
        characters=arguments.max_characters,
        body=max(ServiceSettings.body, 12 * arguments.max_characters),  # of each, two escapes such as \ud83d at most
        seconds=arguments.timeout,
    )
    pairs = ", ".join("-".join(pair) for pairs in models.values() for pair in pairs)
    ready = partial(print, f"http://{name}:{arguments.port} translates {pairs}", flush=True)
    (_on_a_cluster if arguments.ray else _here)(arguments, models, settings, ready)


def _models(arguments: argparse.Namespace) -> Models:
    from ..serving.models import languages_of, pair
    from ..translation.division import UNDETERMINED, sentence_rules

    if sentence_rules("en") == UNDETERMINED:
        warn(f"sentences are divided by rules for all languages; for those of each, {install('sentences')}")
    named = [_named(text) for text in arguments.model]
    asked = [pair(text) for text in arguments.languages]
    if asked and (len(named) > 1 or named[0][0]):
        raise UsageError("--languages is for one model without a pair; give each model its own: --model en-de=DIR")
    models: Models = {}
    for text, name in named:
        check_model_name(name)
        models.setdefault(name, []).extend([pair(text)] if text else asked or [languages_of(name)])
    counts = Counter(pair for pairs in models.values() for pair in pairs)
    if twice := [pair for pair, count in counts.items() if count > 1]:
        raise UsageError(f"two models translate {'-'.join(min(twice))}; give each pair once")
    return models


def _here(arguments: argparse.Namespace, models: Models, settings: ServiceSettings, ready: Ready) -> None:
    from ..serving import app, server
    from ..serving.models import batcher_of

    metrics, thread = app.Metrics(), ThreadPoolExecutor(1)
    batchers = {}
    for name, pairs in models.items():
        translator = thread.submit(load_translator, name, arguments).result()
        batchers[name] = batcher_of(translator, pairs, metrics.add, thread=thread)
    metrics.waiting.set_function(lambda: sum(batcher.waiting_tokens for batcher in batchers.values()))
    translate = {pair: batchers[name].translate for name, pairs in models.items() for pair in pairs}
    service = app.create_app(translate, settings, metrics)
    server.run(service, arguments.host, arguments.port, grace=arguments.timeout, on_ready=ready)


def _on_a_cluster(arguments: argparse.Namespace, models: Models, settings: ServiceSettings, ready: Ready) -> None:
    from ..serving.ray import connected  # isort: skip  (its error says how Ray is installed)
    from ..serving import ray_serve

    stop = threading.Event()
    service = ray_serve.running(
        {on_every_node(name): pairs for name, pairs in models.items()},
        settings,
        host=arguments.host,
        port=arguments.port,
        replicas=arguments.replicas or 1,
        models_per_replica=arguments.models_per_replica or 4,
        cpus=arguments.threads or 1,
        opening={"threads": 1, **opening(arguments)},
    )
    try:
        with connected(arguments.ray), service:
            for number in (signal.SIGINT, signal.SIGTERM):  # now, as Ray has set handlers of its own
                signal.signal(number, lambda *_: stop.set())
            ready()
            stop.wait()
    except (ValueError, OSError) as error:
        raise UsageError(first_line(error)) from error


def _named(text: str) -> tuple[str, str]:
    """Returns a model's pair of languages, if it is given, and its name."""
    languages, equals, name = text.partition("=")
    return (languages, name) if equals and "/" not in languages else ("", text)


def _is_this_machine(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _port(text: str) -> int:
    """Parses the number of a port; a type for argparse."""
    if not text.isdecimal() or not 1 <= int(text) <= 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give an integer from 1 to 65535")
    return int(text)


def _host(text: str) -> str:
    """Parses what `TrustedHostMiddleware` takes; a type for argparse."""
    if not re.fullmatch(r"\*|(\*\.)?[\w.-]+|\[[\da-fA-F:.]+\]", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no host; give a name without port, *.example.org, or *")
    return text
