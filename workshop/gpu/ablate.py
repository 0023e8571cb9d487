"""Ablates the kernels of a tree's forward pass, shows their timeline, and times plain decoding.

    python -m workshop gpu.ablate --out ablate.jsonl [--model DIR] [--draft] [--seconds 80]

A kernel is left out by returning its earlier output. The time saved is its share of the whole pass: less than
it takes alone, because kernels overlap. DIR holds target.gguf and draft.gguf; without it they are grown.
--draft: with the draft's taps, and for 24 rows, too. --device cpu --shape double is a trial run.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bough.bench.step import StepProbe
from bough.config import SpecConfig
from bough.engine.engine import Done, Engine, Request
from bough.engine.runner import Mark, StepClock
from bough.models import decoder, layers
from bough.models.step import Step
from bough.session.session import Session
from bough.spec.tree import Tree
from workshop.case import case
from workshop.gpu.stages import grown_pair, guarded
from workshop.gpu.step import load
from workshop.report import Report

# Functions by the names under which decoder.py and layers.py call them. A name that a commit does not have is
# skipped, so that two commits can be compared.
PARTS: dict[str, tuple[str, ...]] = {
    "norms": ("add_rms_norm",),
    "silu": ("silu_mul",),
    "convolution": ("tree_conv",),
    "delta rule": ("tree_delta",),
    "gated norm": ("gated_rms_norm",),
    "heads and cache": ("head_rope", "cache_heads"),
    "attention": ("paged_attention",),
    "packing": ("pack_rows",),
}
GROUPS = {**PARTS, "all but matmuls": tuple(name for names in PARTS.values() for name in names)}
CONTEXT, REPEATS = 256, 25


def kind_of(value: Any) -> Any:
    """Return what a function's output shape depends on."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if hasattr(value, "columns"):  # PackedRows, PartialSums
        return type(value).__name__, value.rows, value.columns
    return value if isinstance(value, bool) else None


@contextmanager
def without(names: Sequence[str], run: Callable[[], Any]) -> Iterator[None]:
    """Make the functions return what they returned during `run` for arguments of the same shapes."""
    patched = [(module, name) for module in (decoder, layers) for name in names if hasattr(module, name)]
    real = [getattr(module, name) for module, name in patched]
    outputs: dict[Any, Any] = {}

    def key(name: str, args: tuple, options: dict) -> Any:
        return name, tuple(map(kind_of, args)), tuple((k, kind_of(v)) for k, v in sorted(options.items()))

    def recorded(name: str, function: Callable, *args, **options) -> Any:
        result = outputs[key(name, args, options)] = function(*args, **options)
        return result

    try:
        for (module, name), function in zip(patched, real, strict=True):
            setattr(module, name, partial(recorded, name, function))
        run()
        for module, name in patched:
            setattr(module, name, lambda *args, name=name, **rest: outputs[key(name, args, rest)])
        yield
    finally:
        for (module, name), function in zip(patched, real, strict=True):
            setattr(module, name, function)


def captured(run: Callable[[], Any]) -> Callable[[], None]:
    """Return the replay of `run` captured as a CUDA graph; on a CPU `run` itself."""
    if not torch.cuda.is_available():
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def milliseconds(run: Callable[[], None]) -> float:
    """Return the median time on the device."""
    clock, times = StepClock(torch.device("cuda" if torch.cuda.is_available() else "cpu")), []
    for _ in range(REPEATS if torch.cuda.is_available() else 1):
        clock.mark(Mark.FORWARD)
        run()
        clock.mark(Mark.FORWARDED)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1000 * clock.seconds(Mark.FORWARD, Mark.FORWARDED))
    return statistics.median(times)


def forward_of(engine: Engine, tree: Tree) -> Callable[[], Any]:
    """Return the target's forward pass over a tree in slot 0."""
    device, buffers = engine.target.device, engine.states.buffers
    slots = torch.tensor([0], device=device)
    tokens, parents = (rows.to(device)[None] for rows in (tree.tokens, tree.parents))
    step = Step.tree(slots, tokens, parents, buffers.lengths[slots])
    return partial(engine.target.verify, step, buffers, taps=engine.drafter.features.taps)


def ablate(report: Report, probe: StepProbe, engine: Engine, rows: int) -> None:
    probe.times(rows, 1)  # compiles, and reserves pages
    forward = forward_of(engine, probe.comb(rows))
    whole = milliseconds(captured(forward))
    report.log("forward", rows=rows, ms=round(whole, 3))
    for label, names in GROUPS.items():
        try:
            with without(names, forward):
                rest = milliseconds(captured(forward))
            report.log(f"without {label}", rows=rows, ms=round(rest, 3), saves=round(whole - rest, 3))
        except Exception as error:
            report.check(f"without {label}", False, rows=rows, error=repr(error)[:200])
        if report.left < 10:
            break
    report.log("forward again", rows=rows, ms=round(milliseconds(captured(forward)), 3))


def timeline(report: Report, probe: StepProbe, engine: Engine, rows: int) -> None:
    """Show when the kernels of some layers in the middle of a forward pass begin and end, in microseconds."""
    found = sorted((span.begin, span.end, span.name) for span in probe.trace(rows, 1))
    # Four layers, one of them an attention layer.
    middle = found[len(found) // 2 :][: 4 * len(found) // len(engine.target.spec.layers)]
    report.log("timeline", rows=rows, kernels=len(found), us=round(found[-1][1] - found[0][0], 1))
    begin, before = middle[0][0], middle[0][0]
    for start, end, name in middle:
        print(f"    {start - begin:9.2f} {end - start:8.2f} {start - before:+8.2f}  {name[:60]}", flush=True)
        before = end
    report.log("shown", kernels=[[round(a - begin, 2), round(b - a, 2), n[:60]] for a, b, n in middle])


def plain(report: Report, session: Session) -> None:
    """Time plain decoding, the next forward launched before the token is read back or after."""
    vocabulary = session.engine.target.spec.vocab_size
    prompt = [(7 * index + 11) % min(vocabulary, 5000) for index in range(CONTEXT)]
    times: dict[bool, list[float]] = {False: [], True: []}
    for read_first in 3 * (False, True):
        request = Request(prompt, max_tokens=96, may_stop=read_first, draft_budget=0)
        *_, done = session.engine.generate(request)
        assert isinstance(done, Done)
        times[read_first].append(1000 / done.stats.decode_tok_s)
    unread, read = (round(statistics.median(times[read_first]), 3) for read_first in (False, True))
    report.log("plain decoding, ms a token", unread=unread, read_first=read, each=times)


def forwards(report: Report, session: Session, rows: Sequence[int]) -> None:
    probe = StepProbe(session.engine, CONTEXT, rounds=64)
    try:
        for count in rows:
            ablate(report, probe, session.engine, count)
        if torch.cuda.is_available():
            timeline(report, probe, session.engine, rows[0])
    finally:
        probe.close()


@case(seconds=80)
def main(report: Report, *, model: Path | None = None, draft: bool = False, shape: str = "27b") -> None:
    with grown_pair(report, model, shape, random=True) as (target, proposer), torch.inference_mode():
        speculation = SpecConfig(budget=23, adaptive=False) if draft else None
        session = load(
            report, "the model", target, proposer if draft else None, max_ctx=4096, speculation=speculation
        )
        guarded(report, "plain decoding", partial(plain, report, session))
        smallest = session.engine.runner.step_rows(1)
        guarded(
            report, "forwards", partial(forwards, report, session, (smallest, 24) if draft else (smallest,))
        )
