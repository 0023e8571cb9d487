"""Where a step's time goes: its parts for every size, the bytes it reads, and which kernels it spends on.

Knows no terminal: results are plain values.
"""

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

from treeflash.bench import step_profile
from treeflash.bench.step_profile import Span
from treeflash.config import EngineConfig
from treeflash.engine.engine import Engine
from treeflash.engine.runner import Clock
from treeflash.engine.sampler import Sampler, SamplingParams
from treeflash.errors import UsageError
from treeflash.memory.device import device_name
from treeflash.models.step import Step
from treeflash.session.session import Session
from treeflash.spec.tree import DraftTree

log = logging.getLogger(__name__)

_EXACT_SIZES = (1, 8, 16, 24)  # where steps are as large as their tree
_TRACED = 3  # steps


def bench_step(
    target: Path,
    config: EngineConfig,
    *,
    context: int = 256,
    repeats: int = 15,
    save: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    warming: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Loads a model and measures its steps; `save`: one JSON line is appended there."""
    if config.speculation is not None:
        config = replace(config, speculation=replace(config.speculation, adaptive=False))
    session = Session.load(target, config, progress=progress, warming=warming)
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
    """Medians in milliseconds for sizes of a step, else for all, behind `context` tokens of prompt.

    `gap_ms` is what a whole step takes beyond its parts: the time a device waits for the host. On a GPU also
    `parts_ms`: into which kernels the pass and what decides behind it go, by the shares that a trace shows;
    it slows a step itself.
    """
    engine, plan = session.engine, session.plan
    if sizes is None:
        sizes = engine.steps.sizes or [size for size in _EXACT_SIZES if size <= engine.max_rows]
    bench = _Bench(engine, context, rounds=(repeats + 2 + _TRACED) * len(sizes), sampling=sampling)
    bandwidth = bandwidth or read_bandwidth(engine.target.device)
    moved = plan.weights - engine.target.embed.data.nbytes + 2 * plan.recurrent + plan.kv_per_token * context
    rows = []
    try:
        for size in sizes:
            found = bench.times(size, repeats)
            found["bytes"] = moved
            found["bandwidth_share"] = moved / (found["verify_ms"] / 1000) / bandwidth
            traced = step_profile.shares(bench.trace(size, _TRACED), _TRACED)
            whole = found["verify_ms"] + found["walk_ms"]
            parts = {"parts_ms": {name: share * whole for name, share in traced.items()}} if traced else {}
            rows.append({"rows": size, **found, **parts})
    finally:
        bench.close()
    return {
        "what": "step",
        "device": device_name(engine.target.device),
        "torch": torch.__version__,
        "graphs": engine.steps.captured,
        "context": context,
        "read_gb_s": bandwidth / 1e9,
        "sizes": rows,
    }


@torch.inference_mode()
def kernel_times(session: Session, rows: int, *, context: int = 256, steps: int = 4) -> dict[str, float]:
    """Milliseconds of a pass and what decides behind it by kernel name, the longest first.

    Of a trace, which slows them; what a kernel waits for the one before it is not counted.
    """
    bench = _Bench(session.engine, context, rounds=steps + 4)
    try:
        bench.step(rows)
        found = step_profile.by_kernel(bench.trace(rows, steps))
    finally:
        bench.close()
    return {name[:70]: microseconds / 1000 / steps for name, microseconds in found.items()}


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that a plain sum reads from memory."""
    count = (1 << 30) if device.type == "cuda" else (1 << 25)
    data = torch.ones(count, dtype=torch.float32, device=device)
    clock, times = Clock(device), []
    for _ in range(6):
        clock.mark(0)
        data.sum()
        clock.mark(1)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(clock.seconds(0, 1))
    return data.nbytes / min(times)


def lines(result: dict[str, Any]) -> list[list[str]]:
    """The result as a table, its head first."""
    columns = ("draft_ms", "verify_ms", "walk_ms", "gap_ms", "step_ms")
    names = ["rows", "draft + tree", "verify", "sample + walk + commit", "gap", "step ms"]
    table = [[*names, "GB read", "of read speed"]]
    for row in result["sizes"]:
        numbers = (f"{row[column]:.2f}" for column in columns)
        moved = f"{row['bytes'] / 1e9:.2f}"
        table.append([str(row["rows"]), *numbers, moved, f"{row['bandwidth_share']:.0%}"])
    return table


def part_lines(result: dict[str, Any]) -> list[list[str]]:
    """What verify and all behind it are made of, in milliseconds, its head first; empty without a trace."""
    rows = [row for row in result["sizes"] if "parts_ms" in row]
    table = [["rows", *step_profile.LABELS.values()]] if rows else []
    for row in rows:
        table.append([str(row["rows"]), *(f"{row['parts_ms'][part]:.2f}" for part in step_profile.LABELS)])
    return table


class _Bench:
    """A sequence with some text, and steps behind it that commit one row each."""

    def __init__(self, engine: Engine, context: int, *, rounds: int, sampling: SamplingParams | None = None):
        self._engine, self._device = engine, engine.target.device
        longest = engine.max_ctx - rounds - 64
        if context > longest:
            raise UsageError(
                f"{context} tokens of context and {rounds} steps do not fit in {engine.max_ctx}",
                "give a larger --max-ctx",
            )
        self._slot = engine.states.open()
        engine.drafter.open()
        engine.steps.begin([])
        vocabulary = engine.target.spec.vocab_size
        params = (sampling or SamplingParams()).seeded()
        text = [(7 * place + 11) % min(vocabulary, 5000) for place in range(context)]
        self._sampler = Sampler(params, text, vocabulary, self._device, fixed=engine.steps.draws)
        engine.states.reserve(self._slot, context + rounds + 64)
        slots = torch.tensor([self._slot], device=self._device)
        for start in range(0, context, 512):
            ids = text[start : start + 512]
            tokens = torch.tensor([ids], device=self._device)
            step = Step.chunk(slots, tokens, engine.states.buffers.lengths[slots])
            output = engine.target.forward(step, engine.states.buffers, taps=engine.drafter.taps)
            engine.states.advance(step)
            engine.drafter.append(ids, output.features[0])
        self._anchor, self._text = text[-1], text
        self._propose()  # what waited for a first question is done

    def close(self) -> None:
        self._engine.states.close(self._slot)

    def times(self, rows: int, repeats: int) -> dict[str, float]:
        clock = self._engine.steps.clock
        found: dict[str, list[float]] = defaultdict(list)
        for number in range(repeats + 2):
            begin = time.perf_counter()
            self.step(rows)
            whole = time.perf_counter() - begin
            if number >= 2:
                for name, part in (("draft_ms", (0, 1)), ("verify_ms", (2, 3)), ("walk_ms", (4, 5))):
                    found[name].append(clock.seconds(*part))
                found["step_ms"].append(whole)
                found["gap_ms"].append(whole - clock.seconds(0, 5))
        return {name: 1000 * statistics.median(values) for name, values in found.items()}

    def step(self, rows: int) -> None:
        """All of it: draft, tree, pass, draws, walk, commit, and the way back to the host.

        What the draft proposes is not what is verified: every size has to be full.
        """
        steps = self._engine.steps
        steps.clock.mark(0)
        if steps.draft_parts:
            for part in steps.draft_parts:
                part()
        else:
            self._propose()
        steps.clock.mark(1)
        self._verify(rows)
        steps.clock.wait()

    def trace(self, rows: int, count: int) -> list[Span]:
        """Kernels of so many passes and what decides behind them; none on a CPU, or where tracing fails."""
        if self._device.type != "cuda":
            return []
        kernels = [torch.profiler.ProfilerActivity.CUDA]
        try:
            with torch.profiler.profile(activities=kernels, acc_events=True) as profile:
                for _ in range(count):
                    self._verify(rows)
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

    def _verify(self, rows: int) -> None:
        steps = self._engine.steps
        self._load(rows)
        steps.walk(steps.look(rows), self._sampler)

    def _propose(self) -> None:
        engine, rank = self._engine, self._sampler.rank
        engine.drafter.propose(self._anchor, len(self._text), engine.max_rows, rank)

    def _load(self, rows: int) -> None:
        """A comb: a spine of 15 with leaves, all of it text that was seen."""
        tokens = [self._anchor, *(self._text[place % len(self._text)] for place in range(rows - 1))]
        parents = [-1, *(row - 1 if row < 16 else row % 15 for row in range(1, rows))]
        self._engine.steps.load(DraftTree.of(tokens, parents), 1)
