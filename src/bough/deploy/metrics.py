"""Prometheus metrics over all replicas, and of each one under names of their own."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest

from bough.deploy.replica import ReplicaReport
from bough.deploy.worker import ReplicaWorker
from bough.server.metrics import PREFIX, Metrics
from bough.server.service import Service


class ReplicaMetrics(Metrics):
    """Counts what all replicas did, those that ended included, and adds each replica's own metrics."""

    def page(self, services: Sequence[Service]) -> bytes:
        registry = CollectorRegistry()
        workers = [each.worker for each in services if isinstance(each.worker, ReplicaWorker)]
        registry.register(_OfEach([report for worker in workers for report in worker.reports]))
        return super().page(services) + generate_latest(registry)


class _OfEach:
    """The metrics of each replica as `bough:replica_NAME{replica=...}`: sums must not count twice."""

    def __init__(self, reports: Sequence[ReplicaReport]):
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        metrics: dict[str, Metric] = {}
        for report in self._reports:
            for family in report.metrics:
                name = _renamed(family.name)
                metric = metrics.setdefault(name, Metric(name, family.documentation, family.type))
                for sample in family.samples:
                    labels = {**sample.labels, "replica": report.replica}
                    metric.add_sample(_renamed(sample.name), labels, sample.value, sample.timestamp)
        yield from metrics.values()


def _renamed(name: str) -> str:
    return f"{PREFIX}replica_{name.removeprefix(PREFIX)}"
