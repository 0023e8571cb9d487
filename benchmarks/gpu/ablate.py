"""What a pass over a tree saves without each of its parts, what runs when, and what plain decoding waits for.

PYTHONPATH=src python benchmarks/gpu/ablate.py --out ablate.jsonl [--model folder] [--draft] [--seconds 80]

A part is left out by giving what it gave before; what the pass saves is its share among the others, less
than it takes alone. --model: a folder with target.gguf and draft.gguf, else they are written. --draft: with
its taps, and for 24 rows, too. --device cpu --shape double tries it out.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from report import Report
from step import guarded, load
from torch import Tensor

from treeflash.bench.step import _Bench
from treeflash.config import SpecConfig
from treeflash.convert.grow import grow
from treeflash.engine.engine import Done, Engine, Request
from treeflash.engine.runner import Clock
from treeflash.models import decoder, layers
from treeflash.session.session import Session

# Functions as the modules that call them name them; what a commit does not have is passed over, so that two
# commits can be compared.
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
GROUPS = {**PARTS, "all but products": tuple(name for names in PARTS.values() for name in names)}
CONTEXT, REPEATS = 256, 25


def kind_of(value: Any) -> Any:
    """What a result's shape depends on."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if hasattr(value, "columns"):  # packed rows, open sums
        return type(value).__name__, value.rows, value.columns
    return value if isinstance(value, bool) else None


@contextmanager
def without(names: Sequence[str], run: Callable[[], Any]) -> Iterator[None]:
    """The functions give what they gave when `run` was run, for arguments of the same shapes."""
    places = [(module, name) for module in (decoder, layers) for name in names if hasattr(module, name)]
    real = [getattr(module, name) for module, name in places]
    given: dict[Any, Any] = {}

    def key(name: str, args: tuple, options: dict) -> Any:
        return name, tuple(map(kind_of, args)), tuple((k, kind_of(v)) for k, v in sorted(options.items()))

    def noted(name: str, function: Callable, *args, **options) -> Any:
        result = given[key(name, args, options)] = function(*args, **options)
        return result

    try:
        for (module, name), function in zip(places, real, strict=True):
            setattr(module, name, partial(noted, name, function))
        run()
        for module, name in places:
            setattr(module, name, lambda *args, name=name, **rest: given[key(name, args, rest)])
        yield
    finally:
        for (module, name), function in zip(places, real, strict=True):
            setattr(module, name, function)


def captured(run: Callable[[], Any]) -> Callable[[], None]:
    """A graph of `run`; on a CPU just that."""
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
    """Median of the device's time."""
    clock, times = Clock(torch.device("cuda" if torch.cuda.is_available() else "cpu")), []
    for _ in range(REPEATS if torch.cuda.is_available() else 1):
        clock.mark(0)
        run()
        clock.mark(1)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1000 * clock.seconds(0, 1))
    return statistics.median(times)


def ablate(report: Report, bench: _Bench, engine: Engine, rows: int) -> None:
    bench._load(rows)
    look = partial(engine.steps._look, rows)
    whole = milliseconds(captured(look))
    report.tell("a pass", rows=rows, ms=round(whole, 3))
    for label, names in GROUPS.items():
        try:
            with without(names, look):
                rest = milliseconds(captured(look))
            report.tell(f"without {label}", rows=rows, ms=round(rest, 3), saves=round(whole - rest, 3))
        except Exception as error:
            report.check(f"without {label}", False, rows=rows, error=repr(error)[:200])
        if report.left < 10:
            break
    report.tell("a pass again", rows=rows, ms=round(milliseconds(captured(look)), 3))


def timeline(report: Report, bench: _Bench, engine: Engine, rows: int) -> None:
    """The kernels of some layers in the middle of a pass: when each begins and ends, in microseconds."""
    found = sorted((span.begin, span.end, span.name) for span in bench.trace(rows, 1))
    # Four layers, among them one of attention.
    middle = found[len(found) // 2 :][: 4 * len(found) // len(engine.target.spec.layers)]
    report.tell("timeline", rows=rows, kernels=len(found), us=round(found[-1][1] - found[0][0], 1))
    begin, before = middle[0][0], middle[0][0]
    for start, end, name in middle:
        print(f"    {start - begin:9.2f} {end - start:8.2f} {start - before:+8.2f}  {name[:60]}", flush=True)
        before = end
    report.tell("shown", kernels=[[round(a - begin, 2), round(b - a, 2), n[:60]] for a, b, n in middle])


def plain(report: Report, session: Session) -> None:
    """Plain decoding, the next pass behind an unread token or behind a read one."""
    vocabulary = session.engine.target.spec.vocab_size
    prompt = [(7 * place + 11) % min(vocabulary, 5000) for place in range(CONTEXT)]
    times: dict[bool, list[float]] = {False: [], True: []}
    for read_first in 3 * (False, True):
        request = Request(prompt, max_tokens=96, may_cut=read_first, draft_budget=0)
        *_, done = session.engine.generate(request)
        assert isinstance(done, Done)
        times[read_first].append(1000 / done.stats.decode_tok_s)
    unread, read = (round(statistics.median(times[read_first]), 3) for read_first in (False, True))
    report.tell("plain decoding, ms a token", unread=unread, read_first=read, each=times)


def passes(report: Report, session: Session, rows: Sequence[int]) -> None:
    bench = _Bench(session.engine, CONTEXT, rounds=64)
    try:
        for count in rows:
            ablate(report, bench, session.engine, count)
        if torch.cuda.is_available():
            timeline(report, bench, session.engine, rows[0])
    finally:
        bench.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--draft", action="store_true")
    parser.add_argument("--shape", default="27b")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = options.model or Path(made)
        if options.model is None:
            grow(folder, options.shape, random=True, force=True)
        report = Report(options.out, options.seconds, options.device, folder)
        speculation = SpecConfig(budget=23, adaptive=False) if options.draft else None
        draft = folder / "draft.gguf" if options.draft else None
        session = load(report, "it", folder / "target.gguf", draft, max_ctx=4096, speculation=speculation)
        with torch.inference_mode():
            guarded(report, "plain decoding", partial(plain, report, session))
            smallest = session.engine.steps.size(1)
            sizes = (smallest, 24) if options.draft else (smallest,)
            guarded(report, "passes", partial(passes, report, session, sizes))
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
