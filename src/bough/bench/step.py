"""Where a step's time goes: its parts for every size, the bytes it reads, and the kernels it runs."""

import json
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bough.bench import step_profile
from bough.bench.machine import read_bandwidth
from bough.bench.step_profile import Span
from bough.config import EngineConfig
from bough.engine.engine import Engine
from bough.engine.sampler import SamplingParams
from bough.engine.sequence import Phase, Request
from bough.errors import UsageError
from bough.kernels.tree import MAX_ROWS
from bough.memory.device import device_name
from bough.session.loading import load_session
from bough.session.session import Session
from bough.spec.tree import Tree

log = logging.getLogger(__name__)

_EXACT_SIZES = (1, 8, 16, 24)  # where steps are not padded
_TRACED = 3  # steps


def bench_step(
    target: Path,
    config: EngineConfig,
    *,
    context: int = 256,
    repeats: int = 15,
    save: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    compiling: Callable[[int, int], None] | None = None,
    warming: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Load a model and measure its steps; `save`: a file to which one JSON line is appended."""
    if config.speculation is not None:
        config = replace(config, speculation=replace(config.speculation, adaptive=False))
    session = load_session(target, config, progress=progress, compiling=compiling, warming=warming)
    result = measure_steps(session, context=context, repeats=repeats)
    result["model"] = target.name
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        with save.open("a") as file:
            print(json.dumps(result), file=file)
    return result


@torch.inference_mode()
def measure_steps(
    session: Session,
    *,
    context: int = 256,
    repeats: int = 15,
    sizes: Sequence[int] | None = None,
    sampling: SamplingParams | None = None,
    bandwidth: float | None = None,
) -> dict[str, Any]:
    """Return medians in milliseconds for steps of these sizes, or all, after `context` tokens of prompt.

    `gap_ms` is what a whole step takes beyond its parts: the time the device waits for the host. On a GPU
    also
    `parts_ms`: how forward and acceptance divide among kernels, by the shares of a trace, which itself
    slows a step.
    """
    engine, plan = session.engine, session.plan
    if sizes is None:
        sizes = engine.runner.tree_sizes or [size for size in _EXACT_SIZES if size <= engine.max_rows]
    probe = StepProbe(engine, context, rounds=(repeats + 2 + _TRACED) * len(sizes), sampling=sampling)
    bandwidth = bandwidth or read_bandwidth(engine.target.device)
    states = 2 * plan.recurrent + plan.kv_per_token * context
    rows = []
    try:
        for size in sizes:
            times = probe.times(size, repeats)
            times["bytes"] = moved = plan.estimate.read_bytes(size) + states
            times["bandwidth_share"] = moved / (times["verify_ms"] / 1000) / bandwidth
            traced = step_profile.shares(probe.trace(size, _TRACED), _TRACED)
            whole = times["verify_ms"] + times["walk_ms"]
            parts = {"parts_ms": {name: share * whole for name, share in traced.items()}} if traced else {}
            rows.append({"rows": size, **times, **parts})
    finally:
        probe.close()
    return {
        "what": "step",
        "device": device_name(engine.target.device, engine.target.threads),
        "torch": torch.__version__,
        "graphs": engine.runner.captured,
        "context": context,
        "read_gb_s": bandwidth / 1e9,
        "sizes": rows,
    }


def lines(result: dict[str, Any]) -> list[list[str]]:
    columns = ("draft_ms", "verify_ms", "walk_ms", "gap_ms", "step_ms")
    names = ["rows", "draft + tree", "verify", "sample + accept + commit", "gap", "step ms"]
    table = [[*names, "GB read", "of read speed"]]
    for row in result["sizes"]:
        numbers = (f"{row[column]:.2f}" for column in columns)
        moved = f"{row['bytes'] / 1e9:.2f}"
        table.append([str(row["rows"]), *numbers, moved, f"{row['bandwidth_share']:.0%}"])
    return table


def part_lines(result: dict[str, Any]) -> list[list[str]]:
    """Return the kernels of forward and acceptance in milliseconds, header first; [] without a trace."""
    rows = [row for row in result["sizes"] if "parts_ms" in row]
    table = [["rows", *step_profile.LABELS.values()]] if rows else []
    for row in rows:
        table.append([str(row["rows"]), *(f"{row['parts_ms'][part]:.2f}" for part in step_profile.LABELS)])
    return table


class StepProbe:
    """A sequence with some text, and decode steps of chosen sizes that commit one row each."""

    def __init__(self, engine: Engine, context: int, *, rounds: int, sampling: SamplingParams | None = None):
        self._engine, self._device = engine, engine.target.device
        if context > engine.max_ctx - rounds - MAX_ROWS:
            raise UsageError(
                f"{context} tokens of context and {rounds} steps do not fit in {engine.max_ctx}",
                "set a larger `max_ctx`",
            )
        vocabulary = engine.target.spec.vocab_size
        self._text = [(7 * index + 11) % min(vocabulary, 5000) for index in range(context)]
        request = Request(self._text, max_tokens=rounds + 1, sampling=sampling or SamplingParams())
        self._sequence = engine.add(request)
        while self._sequence.phase in (Phase.WAITING, Phase.PREFILL):
            engine.step()

    def close(self) -> None:
        self._engine.release(self._sequence)

    def times(self, rows: int, repeats: int) -> dict[str, float]:
        """Return medians in milliseconds of whole steps: draft, tree, forward, acceptance, commit, read-back.

        What the draft proposes is not what is verified: every size has to be full.
        """
        samples: dict[str, list[float]] = defaultdict(list)
        for number in range(repeats + 2):
            begin = time.perf_counter()
            step = self._engine.pipeline.probe(self._sequence, self.comb(rows))
            whole = time.perf_counter() - begin
            if number >= 2:
                samples["draft_ms"].append(step.draft_s)
                samples["verify_ms"].append(step.forward_s)
                samples["walk_ms"].append(step.accept_s)
                samples["step_ms"].append(whole)
                samples["gap_ms"].append(whole - step.whole_s)
        return {name: 1000 * statistics.median(values) for name, values in samples.items()}

    def trace(self, rows: int, count: int, *, draft: bool = False) -> list[Span]:
        """Return the kernels of `count` forwards with acceptance; `draft`: of the draft calls, too.

        Empty on a CPU, or where tracing fails.
        """
        if self._device.type != "cuda":
            return []
        kernels = [torch.profiler.ProfilerActivity.CUDA]
        tree = self.comb(rows)
        try:
            with torch.profiler.profile(activities=kernels, acc_events=True) as profile:
                for _ in range(count):
                    self._engine.pipeline.probe(self._sequence, tree, draft=draft)
                torch.cuda.synchronize()
            events = [each for each in profile.events() if each.device_type.name == "CUDA"]
        except RuntimeError as error:
            log.warning("no trace of a step's kernels: %s", str(error).partition("\n")[0])
            return []
        copies = ("Memcpy", "Memset")
        return [
            Span(event.name, event.time_range.start, event.time_range.end)
            for event in events
            if not event.name.startswith(copies)
        ]

    def comb(self, rows: int) -> Tree:
        """Return a spine of 15 nodes with leaves, all of them tokens of the text."""
        tokens = [self._text[-1], *(self._text[index % len(self._text)] for index in range(rows - 1))]
        return Tree.of(tokens, [-1, *(row - 1 if row < 16 else row % 15 for row in range(1, rows))])
