"""Several users, simulated: the engine and its texts on a CPU, with the step times of an H200.

    python -m workshop simulated_users --data DIR [--users 1 2 4 8 16] [--least 128]

The engine decides and generates as on a GPU: padded steps, prompts of up to 512 tokens read by decode steps.
A clock of its own adds up what each step, draft call and chunk took on an H200 with the grown 27B, whose text
is that of the embedded pair. So it shows what row sharing and scheduling are worth, and what a faster forward
pass would give; it cannot show what the host costs beyond a fixed time a step. One JSON line for each number
of users.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from bough.config import DraftConfig, EngineConfig
from bough.engine import engine as engine_module
from bough.engine.engine import Engine, Tokens
from bough.engine.prompts import SHORT
from bough.engine.runner import Accepted, EagerRunner, Forward, StepTimes, Verify
from bough.engine.sequence import Request
from bough.models.step import SIZES, padded_rows
from bough.session import building
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from bough.session.session import Session
from bough.spec.costs import StepCosts
from tests.gpu.texts import embedded_pair
from workshop.case import case
from workshop.gpu.exact import GREEDY
from workshop.report import Report
from workshop.server_load import prompts_of


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds of an H200 with the grown 27B (benchmarks/results/compare.jsonl, server_load.jsonl).

    Measured are forward, accept and draft up to 16; the others are estimates that fit those results.
    """

    forward: dict[int, float] = field(
        default_factory=lambda: {1: 6.33, 8: 6.55, 16: 7.78, 24: 8.52, 32: 9.69, 48: 11.96, 64: 14.29}
    )
    accept: float = 0.17
    sequence: float = 0.22  # a step, for each sequence but the first
    draft: dict[int, float] = field(
        default_factory=lambda: {1: 1.36, 2: 1.52, 4: 1.88, 8: 2.98, 16: 3.7, 64: 9.0}
    )
    host: float = 0.9  # a step of several sequences; one alone is launched ahead
    first_token: float = 8.0  # of a request: its template, a sampled token and the server's first event
    chunk: float = 50.0
    chunk_token: float = 0.1

    def verify_s(self, sequences: int, rows: int) -> float:
        return (self.forward[padded_rows(rows)] + self.accept + self.sequence * (sequences - 1)) / 1000

    def draft_s(self, asked: int) -> float:
        return float(np.interp(asked, list(self.draft), list(self.draft.values()))) / 1000 if asked else 0.0


class Clock:
    """The time that an engine's work would have taken; the engine learns from it, too."""

    def __init__(self, engine: Engine, costs: Costs):
        self.now, self.costs = 0.0, costs
        self.rows: list[tuple[int, int, int]] = []  # of each step: sequences, rows, rows of prompts
        self._parts: Sequence[Verify] = ()
        self._engine, runner = engine, engine.runner
        self._verify, self._read_back, self._read = runner.verify, runner.read_back, runner.read
        self._chunk = engine.prompts._forward_chunk
        runner.verify, runner.read_back, runner.read = self.verify, self.read_back, self.read  # ty: ignore
        engine.prompts._forward_chunk = self.chunk  # ty: ignore[invalid-assignment]

    def verify(self, parts: Sequence[Verify]) -> Forward:
        self._parts = parts
        return self._verify(parts)

    def read(self, slot: int, tokens: list[int]) -> Forward:
        forward = self._read(slot, tokens)
        self.now += self.costs.verify_s(1, len(tokens))
        return forward

    def chunk(self, chunk: Any) -> Any:
        self.now += (self.costs.chunk + self.costs.chunk_token * (chunk.stop - chunk.start)) / 1000
        return self._chunk(chunk)

    def read_back(self) -> tuple[list[Accepted], StepTimes]:
        accepted, _ = self._read_back()
        drafter, parts = self._engine.drafter, self._parts
        alone = len(parts) == 1
        asked = int(drafter._texts[parts[0].slot].plan.draft) if alone else drafter._asked  # ty: ignore
        draft_s = self.costs.draft_s(asked)
        verify_s = self.costs.verify_s(len(parts), sum(part.tree.size for part in parts))
        self.now += draft_s + verify_s + (0.0 if alone else self.costs.host / 1000)
        given = sum(part.tree.size for part in parts if part.given)
        self.rows.append((len(parts), sum(part.tree.size for part in parts), given))
        return accepted, StepTimes(draft_s, verify_s, 0.0, draft_s + verify_s)


class PaddedRunner(EagerRunner):
    """Rows as those of a GPU's runner."""

    @staticmethod
    def most_rows(max_rows: int) -> int:
        return padded_rows(max(max_rows, 16))


def session_of(users: int, budget: int) -> Session:
    building.EAGER_SIZES = SIZES
    engine_module.EagerRunner = PaddedRunner  # ty: ignore[invalid-assignment]
    target, draft = embedded_pair()
    config = EngineConfig("cpu", max_ctx=4096, draft=DraftConfig(draft), prefix_cache=0, parallel=users)
    assert config.speculation is not None
    config = replace(config, speculation=replace(config.speculation, budget=budget))
    return load_session(target, config)


def run(
    engine: Engine, clock: Clock, requests: Iterator[Request], users: int, window_s: float
) -> dict[str, Any]:
    """Return what `users` users get in a window of simulated time after a short start."""
    running: dict[Any, float] = {}
    tokens, firsts, begin = 0, [], clock.now + window_s / 4
    start_rows = 0
    while clock.now < begin + window_s:
        for _ in range(users - len(running)):
            running[engine.add(next(requests))] = clock.now
        counts = clock.now >= begin
        start_rows = start_rows if counts else len(clock.rows)
        for sequence, event in engine.step():
            if isinstance(event, Tokens):
                tokens += counts * len(event.ids)
                if sequence in running and sequence.stats.generated_tokens <= len(event.ids):
                    clock.now += clock.costs.first_token / 1000 / users
                    firsts.append(clock.now - running[sequence])
        running = {each: sent for each, sent in running.items() if not each.finished}
    seconds = clock.now - begin
    for sequence in running:
        engine.release(sequence)
    while not engine.idle:
        engine.step()
    rows = clock.rows[start_rows:]
    texts, total, given = (statistics.mean(each) for each in zip(*rows, strict=True))
    return {
        "users": users,
        "tok_s": round(tokens / seconds, 1),
        "tokens_a_step": round(tokens / len(rows), 2),
        "step_ms": round(1000 * seconds / len(rows), 2),
        "texts": round(texts, 1),
        "rows": round(total, 1),
        "rows_of_prompts": round(given, 1),
        "first_token_ms": round(1000 * statistics.median(firsts), 1),
    }


def requests_of(session: Session, texts: Sequence[str], n_gen: int) -> Callable[[], Iterator[Request]]:
    prompts = [session.encode(TextRequest(messages=[{"role": "user", "content": text}])) for text in texts]
    stops = session.tokenizer.stop_ids
    return lambda: (Request(ids, n_gen, GREEDY, stops, may_stop=True) for ids in itertools.cycle(prompts))


def long_answers(engine: Engine, texts: Sequence[str], requests: Iterator[Request], least: int) -> list[str]:
    """Return the texts whose answers have at least `least` tokens."""
    return [
        text
        for text, request in zip(texts, requests, strict=False)
        if sum(len(event.ids) for event in engine.generate(request) if isinstance(event, Tokens)) >= least
    ]


@case()
def main(
    report: Report,
    *,
    data: Annotated[Path, "folder of the suites"],
    suites: Sequence[str] = ("humaneval", "gsm8k", "mbpp", "math500"),
    users: Sequence[int] = (1, 2, 4, 8, 16),
    seconds: Annotated[float, "of simulated time"] = 8.0,
    n_gen: int = 256,
    least: Annotated[int, "tokens of an answer"] = 128,
    budget: int = 22,
    rows_64: Annotated[float | None, "milliseconds of a forward pass of 64 rows"] = None,
    label: str = "",
) -> None:
    costs = Costs()
    if rows_64:
        scale = (rows_64 - costs.forward[8]) / (costs.forward[64] - costs.forward[8])
        forward = {
            rows: ms if rows <= 8 else costs.forward[8] + scale * (ms - costs.forward[8])
            for rows, ms in costs.forward.items()
        }
        costs = replace(costs, forward=forward)
    session = session_of(max(users), budget)
    texts = prompts_of(data, suites)
    chosen = long_answers(session.engine, texts, requests_of(session, texts, n_gen)(), least)
    for count in users:
        session = session_of(count, budget)
        engine = session.engine
        engine.prompts.short = SHORT
        learnt: StepCosts = engine.drafter._policy.costs  # ty: ignore[unresolved-attribute]
        learnt.step = {rows: costs.verify_s(1, rows) for rows in costs.forward}
        learnt.draft = {0: costs.draft_s(1)}
        clock = Clock(engine, costs)
        requests = requests_of(session, chosen, n_gen)()
        found = run(engine, clock, requests, count, seconds)
        report.line(what="simulated users", label=label, **found)
