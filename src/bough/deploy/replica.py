"""A replica: an engine in a process of its own, which runs the requests that the router sends it."""

import logging
import os
import pickle
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Metric
from ray import serve

from bough.deploy.loopback import keep_ports_local
from bough.deploy.routes import Hint
from bough.deploy.settings import CONTROL, QUEUE, Settings
from bough.engine.events import Failed
from bough.engine.sequence import Limits
from bough.errors import BoughError
from bough.server.facts import model_facts
from bough.server.metrics import Metrics
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from bough.session.session import Session
from bough.session.worker import EngineWorker, IndexedEvent, State

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Order:
    """The requests of one job, and what decides where they go."""

    requests: tuple[TextRequest, ...]
    label: str
    hint: Hint


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What is the same for all replicas."""

    limits: Limits
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    replica: str
    pid: int
    parallel: int
    running: int
    waiting: int
    prefix_cache: Mapping[str, int]
    metrics: list[Metric]


class Replica:
    """The class of the deployment; Serve calls its methods."""

    def __init__(self, settings: Settings, name: str = ""):
        self._settings, self._name = settings, name or _registered()
        self._metrics = Metrics()
        self._worker = EngineWorker(
            lambda progress: load_session(settings.path, settings.engine, progress=progress),
            max_queue=settings.slots + QUEUE + CONTROL,  # the router is what limits
            ended=self._metrics.count,
        )
        self._worker.start()
        self._worker.ready.wait()
        self.check_health()

    def check_health(self) -> None:
        """Raise if the engine can run no more requests: Serve then starts another replica."""
        if self._worker.state is State.failed:
            assert self._worker.failure is not None
            raise self._worker.failure

    def about(self) -> ReplicaFacts:
        return ReplicaFacts(self._session.limits, self._facts)

    def report(self) -> ReplicaReport:
        prefix_cache = self._facts["prefix_cache"]
        self._metrics.observe([self._worker], prefix_cache)
        return ReplicaReport(
            replica=self._name,
            pid=os.getpid(),
            parallel=self._session.parallel,
            running=self._worker.running,
            waiting=self._worker.waiting,
            prefix_cache=prefix_cache,
            metrics=self._metrics.families(),
        )

    async def generate(self, order: Order) -> AsyncIterator[list[IndexedEvent] | Failed]:
        """Yield the events of the requests; an error of theirs is the last thing that is yielded."""
        try:
            job = self._worker.submit(*order.requests, label=order.label)
            try:
                async for batch in job.batches():
                    yield batch
            finally:
                job.cancel()
        except Exception as error:
            yield Failed(_portable(error))

    def __del__(self) -> None:
        self._worker.close()

    @property
    def _session(self) -> Session:
        session = self._worker.session
        assert isinstance(session, Session)
        return session

    @property
    def _facts(self) -> Mapping[str, Any]:
        return model_facts(self._session, self._settings.path, self._settings.engine)


def _registered() -> str:
    """Return the name that Serve has given to this process."""
    keep_ports_local()
    return serve.get_replica_context().replica_id.unique_id


def _portable(error: Exception) -> Exception:
    """Return the error, or one of its name if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return BoughError(f"the engine failed with {type(error).__name__}", "its log says where")
    return error
