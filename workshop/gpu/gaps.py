"""Where the device waits for the host while a prompt is read: idle times between kernels, and what ran then.

    python -m workshop gpu.gaps --target GGUF --draft GGUF --out FILE [--tokens 8192]

For each chunk size: seconds of a whole prompt, milliseconds that the device was busy and idle, the idle times
by the kernels around them, the kernels, and the calls on the host that took longest.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from bough.bench.step_profile import Span, exclusive_times
from bough.config import DraftConfig, EngineConfig
from bough.engine.engine import Engine
from bough.session.loading import load_session
from workshop.case import DRAFT, TARGET, case
from workshop.gpu.prefill import first_token_s
from workshop.report import Report

LONGEST = 16


def idle_times(kernels: Sequence[Span]) -> list[tuple[float, str, str]]:
    """Return the microseconds that the device was idle, with the kernels before and after; longest first."""
    done, found = 0.0, []
    for before, after in pairwise(sorted(kernels, key=lambda each: each.begin)):
        done = max(done, before.end)
        if after.begin > done:
            found.append((after.begin - done, before.name, after.name))
    return sorted(found, reverse=True)


def trace(report: Report, engine: Engine, tokens: int) -> None:
    every = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=every, acc_events=True) as profile:
        first_token_s(engine, tokens, 2)
        torch.cuda.synchronize()
    events = list(profile.events())
    ranges = [(each.name, each.time_range) for each in events if each.device_type.name == "CUDA"]
    kernels = [Span(name, at.start, at.end) for name, at in ranges]
    busy, idle = sum(us for _, us in exclusive_times(kernels)), idle_times(kernels)
    report.log("device", busy_ms=round(busy / 1000, 2), idle_ms=round(sum(us for us, *_ in idle) / 1000, 2))
    between, ran, calls = (defaultdict[str, list[float]](list) for _ in range(3))
    for us, before, after in idle:
        between[f"{before[:40]} | {after[:40]}"].append(us)
    for span, us in exclusive_times(kernels):
        ran[span.name[:60]].append(us)
    for each in events:
        if each.device_type.name == "CPU":
            calls[each.name[:60]].append(each.time_range.elapsed_us())
    for what, found in (("idle", between), ("kernel", ran), ("host", calls)):
        for name, each in sorted(found.items(), key=lambda pair: -sum(pair[1]))[:LONGEST]:
            ms = {"ms": round(sum(each) / 1000, 2), "longest_ms": round(max(each) / 1000, 3)}
            report.log(what, times=len(each), where=name, **ms)


@case()
def main(
    report: Report,
    *,
    target: Path = TARGET,
    draft: Path = DRAFT,
    tokens: int = 8192,
    chunks: Sequence[int] = (1024, 2048, 8192),
) -> None:
    config = EngineConfig(report.device, max_ctx=tokens + 64, draft=DraftConfig(draft), prefix_cache=0)
    engine = load_session(target, config).engine
    for chunk in chunks:
        engine.prefill_chunk = chunk
        first_token_s(engine, tokens, 0)
        seconds = first_token_s(engine, tokens, 1)
        report.log("prompt", chunk=chunk, seconds=round(seconds, 4), tok_s=round(tokens / seconds))
        if report.device == "cuda":
            trace(report, engine, tokens)
