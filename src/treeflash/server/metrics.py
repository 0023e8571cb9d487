"""Counters for Prometheus, acceptance under the names that other servers use; knows no protocol."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from treeflash.session.worker import EngineWorker, Job, Outcome

PREFIX = "treeflash:"
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
            "request_success", "Requests answered, by what ended them", ("finished_reason",)
        )
        self.failures = counter("request_failure", "Requests that the engine refused or failed", ("error",))
        self.prompt = counter("prompt_tokens", "Prompt tokens")
        self.cached = counter("prompt_tokens_cached", "Of these, tokens kept from earlier requests")
        self.generated = counter("generation_tokens", "Tokens written")
        self.drafts = counter("spec_decode_num_drafts", "Steps that verified a proposal")
        self.drafted = counter("spec_decode_num_draft_tokens", "Proposed tokens")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Proposed tokens that were accepted")
        self.accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Steps that accepted a proposed token at this depth",
            ("position",),
        )
        self.first_token = histogram("time_to_first_token_seconds", "From the start of the prompt")
        self.waited = histogram("request_queue_time_seconds", "In the queue")
        self.took = histogram("e2e_request_latency_seconds", "From the queue's head to the last token")
        self.rate = histogram("generation_tokens_per_second", "Of one request", _RATES)
        self._waiting = Gauge(f"{PREFIX}num_requests_waiting", "In the queue", registry=registry)
        self._kept = Gauge(
            f"{PREFIX}prefix_cache", "What is remembered of earlier prompts", ("what",), registry=registry
        )
        self._running = Gauge(f"{PREFIX}num_requests_running", "Being answered", registry=registry)

    def count(self, _job: Job, outcome: Outcome) -> None:
        self.waited.observe(outcome.waited_s)
        self.took.observe(outcome.took_s)
        if outcome.finished is None:
            self.failures.labels(type(outcome.error).__name__).inc()
            return
        self.requests.labels(outcome.finished.reason).inc()
        stats = outcome.finished.stats
        self.prompt.inc(stats.prompt_tokens)
        self.cached.inc(stats.cached_tokens)
        self.generated.inc(stats.generated_tokens)
        self.drafts.inc(stats.steps - stats.plain_steps)
        self.drafted.inc(stats.verified_rows - stats.steps)
        self.accepted.inc(sum(stats.accepted_by_position))
        for position, count in enumerate(stats.accepted_by_position):
            self.accepted_at.labels(str(position)).inc(count)
        self.first_token.observe(stats.ttft_s)
        if stats.decode_tok_s:
            self.rate.observe(stats.decode_tok_s)

    def page(self, worker: EngineWorker, kept: Mapping[str, int]) -> bytes:
        for what, value in kept.items():
            self._kept.labels(what).set(value)
        self._waiting.set(worker.waiting)
        self._running.set(int(worker.running))
        return generate_latest(self._registry)
