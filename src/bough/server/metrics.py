"""Prometheus counters; acceptance has the metric names that other servers use."""

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

from bough.server.service import Service
from bough.session.worker import Job, RequestResult, State, Worker

PREFIX = "bough:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_RATES = (1, 2, 5, 10, 20, 40, 60, 80, 100, 150, 200, 300, 500, 1000)


class Metrics:
    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=registry)

        self.requests = counter(
            "request_success", "Requests finished, by finish reason", ("finished_reason",)
        )
        self.failures = counter("request_failure", "Requests that the engine refused or failed", ("error",))
        self.prompt = counter("prompt_tokens", "Prompt tokens")
        self.cached = counter("prompt_tokens_cached", "Prompt tokens restored from the prefix cache")
        self.generated = counter("generation_tokens", "Generated tokens")
        self.drafts = counter("spec_decode_num_drafts", "Steps that verified a draft")
        self.drafted = counter("spec_decode_num_draft_tokens", "Draft tokens")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted")
        self.accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Steps that accepted a draft token at this depth",
            ("position",),
        )
        self.images = counter("images", "Images in prompts: encoded, or cached", ("what",))
        self.after_images = counter(
            "spec_decode_after_images", "Steps and draft tokens of requests with images", ("what",)
        )
        self.first_token = histogram("time_to_first_token_seconds", "From the start of the prefill")
        self.waited = histogram("request_queue_time_seconds", "Time in the queue")
        self.took = histogram("e2e_request_latency_seconds", "From leaving the queue to the last token")
        self.rate = histogram("generation_tokens_per_second", "Decode throughput of one request", _RATES)
        self._waiting = Gauge(f"{PREFIX}num_requests_waiting", "Requests in the queue", registry=registry)
        self._prefix_cache = Gauge(
            f"{PREFIX}prefix_cache", "Contents of the prefix cache", ("what",), registry=registry
        )
        self._experts = Gauge(
            f"{PREFIX}experts",
            "Distinct experts of steps, where some are in host memory",
            ("what",),
            registry=registry,
        )
        self._checking = Gauge(
            f"{PREFIX}num_requests_checking", "Requests checked before the queue", registry=registry
        )
        self._running = Gauge(f"{PREFIX}num_requests_running", "Running requests", registry=registry)

    def count(self, _job: Job, result: RequestResult) -> None:
        self.waited.observe(result.waited_s)
        self.took.observe(result.took_s)
        if result.finished is None:
            self.failures.labels(type(result.error).__name__).inc()
            return
        self.requests.labels(result.finished.reason).inc()
        stats = result.finished.stats
        self.prompt.inc(stats.prompt_tokens)
        self.cached.inc(stats.cached_tokens)
        self.generated.inc(stats.generated_tokens)
        self.drafts.inc(stats.steps - stats.plain_steps)
        self.drafted.inc(stats.verified_rows - stats.steps)
        self.accepted.inc(sum(stats.accepted_by_position))
        for position, count in enumerate(stats.accepted_by_position):
            self.accepted_at.labels(str(position)).inc(count)
        if stats.images:
            self.images.labels("encoded").inc(stats.encoded_images)
            self.images.labels("cached").inc(stats.images - stats.encoded_images)
            self.after_images.labels("steps").inc(stats.steps)
            self.after_images.labels("draft_tokens").inc(stats.verified_rows - stats.steps)
            self.after_images.labels("accepted_tokens").inc(sum(stats.accepted_by_position))
        if stats.ttft_s:
            self.first_token.observe(stats.ttft_s)
        if stats.decode_tok_s:
            self.rate.observe(stats.decode_tok_s)

    def page(self, services: Sequence[Service]) -> bytes:
        """Return the page; what can be counted is summed over the models in memory."""
        ready = [each for each in services if each.worker.state is State.ready]
        usage = [each.facts().get("prefix_cache", {}) for each in ready]
        total = {what: sum(each[what] for each in usage) for what in (usage[0] if usage else ())}
        self.observe([each.worker for each in services], total)
        experts = [use for each in ready if (use := each.facts().get("experts")) is not None]
        for what in ("hits", "misses") if experts else ():
            self._experts.labels(what).set(sum(use[what] for use in experts))
        self._checking.set(sum(each.checks.count for each in services))
        return generate_latest(self._registry)

    def families(self) -> list[Metric]:
        """Return all metrics with their values, which can be sent to another process."""
        return list(self._registry.collect())

    def observe(self, workers: Sequence[Worker], prefix_cache: Mapping[str, int]) -> None:
        """Set the gauges."""
        for what, value in prefix_cache.items():
            self._prefix_cache.labels(what).set(value)
        self._waiting.set(sum(worker.waiting for worker in workers))
        self._running.set(sum(worker.running for worker in workers))
