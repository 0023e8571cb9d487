"""Starts or joins Ray, and runs replicas on it for a server in this process."""

import logging
import os
import re
import socket
from collections.abc import Callable

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from bough.deploy.application import replicas, served, worker
from bough.deploy.metrics import ReplicaMetrics
from bough.deploy.settings import Settings
from bough.deploy.worker import ReplicaWorker
from bough.errors import BoughError, ResourceError, UsageError
from bough.server import run as server

NAME = "bough"  # of the application
OBJECT_STORE = 128 << 20  # bytes: events are small and are not kept
_ERROR = re.compile(r"bough\.errors\.(\w+): (.+)")


class Cluster:
    """One application on a Ray cluster, its own or one that runs already."""

    def __init__(self, settings: Settings, address: str | None):
        self._settings, self._address = settings, address
        self._name = NAME if address is None else f"{NAME}-{socket.gethostname()}-{settings.server.port}"

    def deploy(self) -> DeploymentHandle:
        quiet = {"logging_level": logging.ERROR, "configure_logging": False}
        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
        if self._address is not None:
            try:
                ray.init(address=self._address, **quiet)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UsageError(
                    f"`ray_address` is {self._address}: {str(error).splitlines()[0]}",
                    "`ray status` shows whether Ray runs there",
                ) from error
        else:
            needed = 0 if self._settings.gpu else self._settings.replicas.most * self._threads
            ray.init(
                address="local",
                num_cpus=max(needed, os.cpu_count() or 1),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE,
                **quiet,
            )
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        target = serve.RunTarget(target=replicas(self._settings), name=self._name, route_prefix=None)
        return serve.run_many([target], wait_for_applications_running=False)[0]

    def check(self) -> None:
        """Raise if the replicas cannot be started."""
        application = serve.status().applications[self._name]
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            messages = [application.message, *(each.message for each in application.deployments.values())]
            raise _failure("\n".join(messages))

    def close(self) -> None:
        """End the application; Ray ends with it if it was started here."""
        if ray.is_initialized():
            if self._address is not None:
                serve.delete(self._name)
            ray.shutdown()

    @property
    def _threads(self) -> int:
        return self._settings.engine.threads or 1


def _failure(text: str) -> BoughError:
    """Return the error of the replica that is quoted in what Serve says."""
    errors = _ERROR.findall(text)
    reason = errors[-1][1] if errors else text.strip().splitlines()[-1]
    return ResourceError(f"no replica could be started: {reason}", "Ray's log has more: /tmp/ray")


def run(
    settings: Settings,
    listening: socket.socket,
    *,
    address: str | None,
    ready: Callable[[ReplicaWorker], None],
) -> None:
    """Serve on the socket until a signal, with replicas on Ray. Raise what starting them raised."""
    cluster, metrics = Cluster(settings, address), ReplicaMetrics()
    options = {"check": cluster.check, "undeploy": cluster.close, "pid": os.getpid()}
    replicas = worker(cluster.deploy, settings, server.record(metrics), **options)
    server.serve(
        [served(settings, replicas)],
        settings.server,
        listening,
        metrics=metrics,
        make_worker=lambda _load, _ended: replicas,
        ready=lambda _reader: ready(replicas),
    )
