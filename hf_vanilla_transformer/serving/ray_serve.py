"""The HTTP service on a Ray cluster, by Ray Serve: replicas of the application in front of replicas of the models."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from ..documents.links import Linked
from ..errors import first_line
from ..translation.translator import Translator
from .app import AsyncTranslate, create_app
from .batcher import Batcher, QueueFullError
from .models import batcher_of
from .settings import ServiceSettings

NAME = "vanilla-transformer"
# Requests that a replica of a model works on at a time, on average, before there is another; half a batch of lines.
TARGET_REQUESTS = 16
SECONDS_TO_SCALE = 5  # of too many requests, before there is another replica
MAX_REQUESTS = 1_000  # of a replica of the application

Pair = tuple[str, str]


def _remote(models: DeploymentHandle, name: str) -> AsyncTranslate:
    """Returns what translates with a model on the cluster."""
    there = models.options(multiplexed_model_id=name).translate

    async def translate(texts: Sequence[str], n_best: int, **options: object) -> list[list[Linked]]:
        response = there.remote(texts, n_best, **options)
        try:
            rows: list[list[Linked]] = await response
        except RayTaskError as error:
            raise error.cause from None  # the model's own error
        except (BackPressureError, RayActorError) as error:
            raise QueueFullError(first_line(error)) from error
        except asyncio.CancelledError:
            response.cancel()
            raise
        return rows

    return translate


def _check_cluster(cpus: int) -> None:
    if max(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]) < cpus:
        raise ValueError(f"no node of the cluster has {cpus} CPUs; give fewer --threads")
    if serve.status().proxies:
        raise ValueError("Ray Serve runs on this cluster already, with an address of its own; stop it first")


@contextmanager
def running(
    models: Mapping[str, Sequence[Pair]],  # as for `Translator`, and what each translates
    settings: ServiceSettings,
    *,
    host: str,  # on every node with a replica
    port: int,
    replicas: int,  # at most; there are as many as the requests need
    models_per_replica: int,  # in memory; the one that wasn't used for the longest time leaves
    cpus: int = 1,  # of a replica
    opening: Mapping[str, Any] | None = None,  # for `Translator`
) -> Iterator[None]:
    """Runs the service on a cluster whose nodes see the models, until the block ends; Ray has to be initialized.

    Raises `ValueError` if no node has enough CPUs, or Ray Serve already runs there, and what opening a model raised.
    """

    class Models:
        def __init__(self) -> None:
            self._thread = ThreadPoolExecutor(1)

        @serve.multiplexed(max_num_models_per_replica=models_per_replica)
        async def _batcher(self, name: str) -> Batcher:
            def opened() -> Batcher:
                return batcher_of(Translator(name, **(opening or {})), models[name], thread=self._thread)

            return await asyncio.get_running_loop().run_in_executor(self._thread, opened)

        async def translate(self, texts: list[str], n_best: int, **options: Any) -> list[list[Linked]]:
            batcher = await self._batcher(serve.get_multiplexed_model_id())
            return await batcher.translate(texts, n_best, **options)

    class Http:
        def __init__(self, handle: DeploymentHandle) -> None:
            self._handle = handle

        def __serve_build_asgi_app__(self) -> FastAPI:
            there = {pair: _remote(self._handle, name) for name, pairs in models.items() for pair in pairs}
            return create_app(there, settings)

    scaling = {"min_replicas": 1, "max_replicas": replicas, "upscale_delay_s": SECONDS_TO_SCALE}
    behind = serve.deployment(
        name="models",
        max_ongoing_requests=2 * TARGET_REQUESTS,  # beyond it, a replica without the model opens it
        max_queued_requests=MAX_REQUESTS,
        autoscaling_config={**scaling, "target_ongoing_requests": TARGET_REQUESTS},
        ray_actor_options={"num_cpus": cpus},
    )(Models)
    front = serve.deployment(
        name="http",
        max_ongoing_requests=MAX_REQUESTS,
        autoscaling_config={**scaling, "target_ongoing_requests": MAX_REQUESTS // 4},
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress()(Http))

    _check_cluster(cpus)
    serve.start(
        http_options={"host": host, "port": port},
        proxy_location="EveryNode",
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    try:
        serve.run(front.bind(behind.bind()), name=NAME, route_prefix="/")
        handle = serve.get_deployment_handle("models", NAME)
        for name in models:  # a model that can't be opened is an error here
            handle.options(multiplexed_model_id=name).translate.remote([], 1).result()
        yield
    except RayTaskError as error:
        raise error.cause from None
    finally:
        serve.shutdown()
