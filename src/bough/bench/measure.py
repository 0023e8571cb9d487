"""Measuring one generation: throughput, TTFT, acceptance length, step times, memory."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union

from bough.bench.suites import SuitePrompt
from bough.engine.sampler import SamplingParams
from bough.engine.stats import StepRecord
from bough.session.collected import GeneratedOutput
from bough.session.loops import loop_start
from bough.session.requests import TextRequest
from bough.session.session import Session

if TYPE_CHECKING:
    from bough.bench.remote import RemoteEndpoint

SPEED, SCORED = 256, 640  # most tokens of an answer; a score of answers that were cut is too low


@dataclass(frozen=True, slots=True)
class BenchSettings:
    n_gen: int | None = None  # most tokens of an answer; None: SPEED, or SCORED where there is a score
    seed: int = 0
    thinking: bool | None = None

    def limit(self, prompt: SuitePrompt) -> int:
        return self.n_gen or (SPEED if prompt.score is None else SCORED)


@dataclass(slots=True)
class Measurement:
    """One generation and its measurements; times in seconds; None: not available from a remote server."""

    text: str
    finish: str
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    tok_s: float  # decode throughput: tokens after the first over the time since the first
    acceptance_length: float | None = None  # up to where the output starts to loop
    loops: bool | None = None
    steps: int | None = None
    rows_per_step: float | None = None
    draft_s: float | None = None
    verify_s: float | None = None
    rest_s: float | None = None  # decoding time outside draft and verify
    accepted_by_position: list[int] | None = (
        None  # at index i: steps that accepted more than i drafted tokens
    )
    steps_by_rows: dict[str, list[float]] = field(default_factory=dict)  # rows: [steps, total milliseconds]
    memory: int | None = None  # peak bytes, of the GPU or else of the process


class LocalEndpoint:
    """A session as what is measured. `budget` 0 is plain decoding; None: the session's default."""

    def __init__(self, session: Session, settings: BenchSettings, cancelled: Callable[[], bool]):
        self._session, self._settings, self._cancelled = session, settings, cancelled

    def clear_cache(self) -> None:
        self._session.engine.prefixes.clear()

    def generate(
        self,
        prompt: SuitePrompt,
        messages: Sequence[Mapping[str, Any]],
        *,
        budget: int | None,
        temperature: float,
    ) -> Measurement:
        settings = self._settings
        request = TextRequest(
            messages=messages,
            tools=prompt.tools,
            max_tokens=settings.limit(prompt),
            sampling=SamplingParams(temperature=temperature, seed=settings.seed),
            thinking=settings.thinking,
            draft_budget=budget,
            cancelled=self._cancelled,
        )
        memory = _PeakMemory(self._session.engine.target.device.type)
        output = GeneratedOutput()
        for event in self._session.generate(request):
            output.add(event)
        finished = output.finished
        assert finished is not None
        stats, loop = finished.stats, loop_start(finished.tokens)
        return Measurement(
            text=output.text or self._session.tokenizer.decode(finished.tokens),
            finish=finished.reason,
            tokens=stats.generated_tokens,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            ttft_s=stats.ttft_s,
            tok_s=stats.decode_tok_s,
            acceptance_length=stats.acceptance_length if loop is None else _acceptance(stats.step_log, loop),
            loops=loop is not None,
            steps=stats.steps,
            rows_per_step=stats.rows_per_step,
            draft_s=stats.draft_s,
            verify_s=stats.verify_s,
            rest_s=max(0.0, stats.decode_s - stats.draft_s - stats.verify_s),
            accepted_by_position=stats.accepted_by_position,
            steps_by_rows=_by_rows(stats.step_log),
            memory=memory.peak(),
        )


Endpoint = Union[LocalEndpoint, "RemoteEndpoint"]


def _acceptance(steps: Sequence[StepRecord], tokens: int) -> float:
    """Return tokens per step until `tokens` are generated; the first of them came from prefill."""
    counted = taken = 0
    for step in steps:
        if 1 + counted >= tokens:
            break
        counted, taken = counted + step.tokens, taken + 1
    return counted / taken if taken else 0.0


def _by_rows(steps: Sequence[StepRecord]) -> dict[str, list[float]]:
    sums: dict[str, list[float]] = {}
    for step in steps:
        entry = sums.setdefault(str(step.rows), [0, 0.0])
        entry[0] += 1
        entry[1] = round(entry[1] + 1000 * step.seconds, 3)
    return sums


class _PeakMemory:
    def __init__(self, device: str):
        import torch

        self._cuda = torch.cuda if device == "cuda" else None
        if self._cuda:
            self._cuda.reset_peak_memory_stats()

    def peak(self) -> int | None:
        """Return bytes; None: the system does not say."""
        if self._cuda:
            return self._cuda.max_memory_allocated()
        try:
            import resource
        except ImportError:  # Windows
            return None
        # Kibibytes on Linux, bytes on macOS.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
