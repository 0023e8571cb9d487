"""Measuring one generation: throughput, TTFT, acceptance length, step times, memory."""

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from treeflash.bench.suites import Prompt
from treeflash.engine.sampler import SamplingParams
from treeflash.session.requests import Finished, Progress, Text, TextRequest
from treeflash.session.session import Session
from treeflash.spec.draft import Drafter, Outcome

RUN, TIMES = 12, 3  # an output loops once an n-gram of RUN tokens occurs TIMES times


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings shared by all prompts of a run."""

    n_gen: int = 256
    seed: int = 0
    thinking: bool | None = None


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


class Endpoint(Protocol):
    """Something that can be benchmarked. `budget` 0 is plain decoding; None: the endpoint's default."""

    def clear_cache(self) -> None:
        """Clear the prefix cache, if possible."""

    def generate(
        self, prompt: Prompt, messages: Sequence[Mapping[str, Any]], *, budget: int | None, temperature: float
    ) -> Measurement: ...


class LocalEndpoint:
    def __init__(self, session: Session, settings: Settings, cancelled: Callable[[], bool]):
        self._session, self._settings, self._cancelled = session, settings, cancelled
        drafter = session.engine.drafter
        self._steps = drafter if isinstance(drafter, _RecordingDrafter) else _RecordingDrafter(drafter)
        session.engine.drafter = cast(Drafter, self._steps)

    def clear_cache(self) -> None:
        self._session.engine.prefixes.clear()

    def generate(
        self, prompt: Prompt, messages: Sequence[Mapping[str, Any]], *, budget: int | None, temperature: float
    ) -> Measurement:
        settings = self._settings
        request = TextRequest(
            messages=messages,
            tools=prompt.tools,
            max_tokens=settings.n_gen,
            sampling=SamplingParams(temperature=temperature, seed=settings.seed),
            thinking=settings.thinking,
            draft_budget=budget,
            cancelled=self._cancelled,
        )
        memory = _PeakMemory(self._session.engine.target.device.type)
        self._steps.outcomes.clear()
        text, begun = "", 0.0
        finished: Finished | None = None
        for event in self._session.generate(request):
            match event:
                case Text(piece):
                    text += piece
                case Progress():
                    begun = begun or time.perf_counter()
                case Finished():
                    finished = event
        assert finished is not None
        stats, loop = finished.stats, loop_start(finished.tokens)
        # Until the end of the last step, even if its only token was the end token.
        decoding = self._steps.last - begun - stats.ttft_s if stats.steps else 0.0
        return Measurement(
            text=text if text else self._session.tokenizer.decode(finished.tokens),
            finish=finished.reason,
            tokens=stats.generated_tokens,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            ttft_s=stats.ttft_s,
            tok_s=stats.decode_tok_s,
            acceptance_length=stats.acceptance_length if loop is None else self._steps.acceptance(loop),
            loops=loop is not None,
            steps=stats.steps,
            rows_per_step=stats.rows_per_step,
            draft_s=stats.draft_s,
            verify_s=stats.verify_s,
            rest_s=max(0.0, decoding - stats.draft_s - stats.verify_s),
            accepted_by_position=stats.accepted_by_position,
            steps_by_rows=self._steps.by_rows(),
            memory=memory.peak(),
        )


def loop_start(tokens: Sequence[int]) -> int | None:
    """Return the number of tokens after which the output loops (an n-gram's third occurrence), or None.

    Acceptance after that point says nothing about real text.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    for end in range(RUN, len(tokens) + 1):
        ngram = tuple(tokens[end - RUN : end])
        seen[ngram] += 1
        if seen[ngram] == TIMES:
            return end
    return None


class _RecordingDrafter:
    """A drafter that records the outcome of every step.

    Tree events carry the same data, but each costs a host/device synchronisation.
    """

    def __init__(self, drafter: Drafter):
        self._drafter = drafter
        self.outcomes: list[Outcome] = []
        self.last = 0.0  # end of the last step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def learn(self, outcome: Outcome) -> None:
        self.last = time.perf_counter()
        self.outcomes.append(outcome)
        self._drafter.learn(outcome)

    def acceptance(self, loop: int) -> float:
        """Return the acceptance length of the first `loop` tokens; the first token comes from the prefill."""
        counted = steps = 0
        for outcome in self.outcomes:
            if 1 + counted >= loop:
                break
            counted, steps = counted + len(outcome.tokens), steps + 1
        return counted / steps if steps else 0.0

    def by_rows(self) -> dict[str, list[float]]:
        """Return the number of steps and their total milliseconds by verified rows."""
        totals: dict[str, list[float]] = {}
        for outcome in self.outcomes:
            entry = totals.setdefault(str(outcome.verified), [0, 0.0])
            entry[0] += 1
            entry[1] = round(entry[1] + 1000 * (outcome.draft_seconds + outcome.step_seconds), 3)
        return totals


class _PeakMemory:
    def __init__(self, device: str):
        import torch

        self._cuda = torch.cuda if device == "cuda" else None
        if self._cuda:
            self._cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        if self._cuda:
            return self._cuda.max_memory_allocated()
        # Kibibytes on Linux, bytes on macOS.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
