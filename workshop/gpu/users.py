"""Where the time of several users goes: requests side by side in one engine, without a server.

    python -m workshop gpu.users --data DIR --target GGUF --draft GGUF --out FILE
        [--users 1 4 8 16] [--seconds 2.5] [--suites mbpp gsm8k math500]

Every user asks one prompt after the other. For each number of users: tokens a second in all, tokens and
milliseconds a step, rows of a step and how many of them read prompts, and the parts of a step: `draft_ms` and
`verify_ms` on the device, the others on the host.
"""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

from bough.bench.suites import load
from bough.config import DraftConfig, EngineConfig
from bough.engine.engine import Engine, Tokens
from bough.engine.inputs import Verify
from bough.engine.runner import Accepted, Forward, StepTimes
from bough.engine.sequence import Request
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from bough.spec.tree import SharedTrees
from workshop.case import DRAFT, TARGET, case
from workshop.gpu.exact import GREEDY
from workshop.report import Report


class Watch:
    """What the steps of an engine did since `clear`."""

    def __init__(self, engine: Engine):
        self.rows: list[tuple[int, int, int]] = []  # sequences, rows, rows of prompts
        self.device: list[tuple[float, float]] = []  # seconds of draft and forward
        self.host: defaultdict[str, float] = defaultdict(float)
        runner, drafter = engine.runner, engine.drafter
        verify, read_back = runner.verify, runner.read_back

        def noted_verify(parts: Sequence[Verify], shared: SharedTrees | None = None) -> Forward:
            rows = sum(part.tree.size for part in parts) if shared is None else shared.size
            given = sum(part.tree.size for part in parts if part.given)
            self.rows.append((len(parts), rows, given))
            return verify(parts, shared)

        def noted_read_back() -> tuple[list[Accepted], StepTimes]:
            found, times = read_back()
            self.device.append((times.draft_s, times.verify_s))
            return found, times

        runner.verify, runner.read_back = noted_verify, noted_read_back  # ty: ignore[invalid-assignment]
        for owner, names in (
            (runner, ("draft", "verify", "accept", "read_back")),
            (drafter, ("trees", "observe")),
            (engine, ("release",)),
            (engine.prompts, ("process", "_first_token")),
        ):
            for name in names:
                setattr(owner, name, self._timed(name.strip("_"), getattr(owner, name)))

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.host[name] += time.perf_counter() - begin

        return timed

    def clear(self) -> None:
        self.rows.clear()
        self.device.clear()
        self.host.clear()

    def facts(self, steps: int) -> dict[str, Any]:
        texts, rows, given = (statistics.mean(each) for each in zip(*self.rows, strict=True))
        draft_s, verify_s = (statistics.mean(each) for each in zip(*self.device, strict=True))
        return {
            "texts": round(texts, 1),
            "rows": round(rows, 1),
            "rows_of_prompts": round(given, 1),
            "draft_ms": round(1000 * draft_s, 2),
            "verify_ms": round(1000 * verify_s, 2),
            "host_ms": {name: round(1000 * total / steps, 3) for name, total in self.host.items()},
        }


def run(engine: Engine, requests: Iterator[Request], users: int, seconds: float) -> tuple[int, list[float]]:
    """Return the tokens that `users` users got, and the seconds of each step."""
    running, tokens, steps = set(), 0, []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        running |= {engine.add(next(requests)) for _ in range(users - len(running))}
        begin = time.perf_counter()
        tokens += sum(len(event.ids) for _, event in engine.step() if isinstance(event, Tokens))
        steps.append(time.perf_counter() - begin)
        running = {each for each in running if not each.finished}
    for sequence in running:
        engine.release(sequence)
    return tokens, steps


@case()
def main(
    report: Report,
    *,
    data: Annotated[Path, "folder of the suites"],
    target: Path = TARGET,
    draft: Path = DRAFT,
    suites: Sequence[str] = ("humaneval", "gsm8k", "mbpp", "math500"),
    users: Sequence[int] = (1, 4, 8, 16),
    seconds: float = 2.5,
    n_gen: int = 256,
) -> None:
    config = EngineConfig(
        report.device,
        max_ctx=4096,
        draft=DraftConfig(draft),
        prefix_cache=0,
        parallel=max(users),
    )
    session = load_session(target, config)
    engine, stops = session.engine, session.tokenizer.stop_ids
    while engine.runner.capture_next():
        pass
    report.log("loaded and captured")
    loaded = [load(name, 60, data=data, offline=True) for name in suites]
    prompts = [prompt for group in zip(*loaded, strict=False) for prompt in group]
    requests = (
        Request(ids, n_gen, GREEDY, stops, may_stop=False)
        for ids in itertools.cycle(
            [session.encode(TextRequest(messages=list(prompt.messages))) for prompt in prompts]
        )
    )
    watch = Watch(engine)
    for count in users:
        run(engine, requests, count, seconds / 2)
        watch.clear()
        begin = time.perf_counter()
        tokens, steps = run(engine, requests, count, seconds)
        spent = time.perf_counter() - begin
        facts = {"users": count, "tok_s": round(tokens / spent, 1), "steps": len(steps)}
        facts |= {"tokens_a_step": round(tokens / len(steps), 2)}
        facts |= {"step_ms": round(1000 * statistics.median(steps), 2)}
        report.log("users", **facts, longest_ms=round(1000 * max(steps), 1), **watch.facts(len(steps)))
