"""The Serve applications: replicas alone, for `bough serve`, and replicas behind an ingress."""

import logging
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from bough.deploy.loopback import keep_ports_local
from bough.deploy.metrics import ReplicaMetrics
from bough.deploy.replica import Replica, ReplicaFacts
from bough.deploy.router import PrefixRouter
from bough.deploy.settings import CONTROL, QUEUE, Settings, settings_of
from bough.deploy.worker import ReplicaWorker
from bough.server.app import create_app
from bough.server.listen import check
from bough.server.models import Models, ServedModel
from bough.server.run import record
from bough.session.loading import load_reader
from bough.session.reader import RequestReader
from bough.session.session import Session
from bough.session.worker import Ended

CONNECTIONS = 10_000  # requests that an ingress has open; its own queue says what is too many
HEALTH_S = 2.0  # between two health checks of a replica
STARTS = 3  # of a replica that fails to start


def app(arguments: dict[str, Any]) -> Application:
    """Return the whole application, for `serve run bough.deploy:app` and Serve's configuration files."""
    settings = settings_of(arguments)
    check(settings.server)
    ingress = serve.deployment(
        name="ingress",
        max_ongoing_requests=CONNECTIONS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings.server.drain_s,
    )(serve.ingress()(Ingress))
    return ingress.bind(replicas(settings), settings)


def replicas(settings: Settings) -> Application:
    least, most = settings.replicas.least, settings.replicas.most
    number: dict[str, Any] = {"num_replicas": most}
    if least < most:
        number = {
            "autoscaling_config": {
                "min_replicas": least,
                "max_replicas": most,
                "target_ongoing_requests": settings.slots,
            }
        }
    resources = {"num_gpus": 1} if settings.gpu else {"num_cpus": settings.engine.threads, "num_gpus": 0}
    return serve.deployment(
        name="replica",
        max_ongoing_requests=settings.slots + QUEUE + CONTROL,
        ray_actor_options=resources,
        health_check_period_s=HEALTH_S,
        graceful_shutdown_timeout_s=settings.server.drain_s,
        max_constructor_retry_count=STARTS,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"slots": settings.slots, "queue": QUEUE},
            max_backoff_s=0.1,
        ),
        **number,
    )(Replica).bind(settings)


class Ingress:
    """Speaks every protocol and sends requests to replicas."""

    def __init__(self, handle: DeploymentHandle, settings: Settings):
        keep_ports_local()
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        self._settings = settings
        self._metrics = ReplicaMetrics()
        replicas = worker(lambda: handle, settings, record(self._metrics))
        self._models = Models([served(settings, replicas)], settings.server, lambda _load: replicas)
        self._models.start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._models, self._settings.server, metrics=self._metrics)


def served(settings: Settings, replicas: ReplicaWorker) -> ServedModel:
    """Return the model for the server; replicas load it."""

    def load(_progress: object) -> Session:
        raise AssertionError("replicas load the model")

    path = settings.path
    aliases = frozenset((path.name, path.stem))
    size = path.stat().st_size
    return ServedModel(settings.model_name, load, lambda _reader: replicas.facts(), aliases, size, path)


def worker(
    deploy: Callable[[], DeploymentHandle], settings: Settings, ended: Ended, **options: Any
) -> ReplicaWorker:
    """Return a worker for the replicas that `deploy` starts."""
    return ReplicaWorker(
        deploy,
        lambda about: _reader(about, settings),
        max_queue=settings.server.max_queue,
        ended=ended,
        **options,
    )


def _reader(about: ReplicaFacts, settings: Settings) -> RequestReader:
    reader = load_reader(settings.path, settings.engine, about.limits)
    reader.isolate_grammars()
    return reader
