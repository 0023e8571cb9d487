"""Times whole steps on a GPU, and the parts of a 27B step; tests/gpu/test_text.py checks texts.

    python -m workshop gpu.step --out step.jsonl [--seconds 150]

The large models are grown meanwhile, by another process on other cores. --device cpu --only small is a trial
run.
"""

import contextlib
import itertools
import logging
import math
import shutil
import statistics
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from bough.bench.step import lines, measure_steps, read_bandwidth
from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Done, Request
from bough.engine.sampler import SamplingParams
from bough.session.loading import load_session
from bough.session.session import Session
from tests.gpu.texts import TREE, ExpectedText, divergence, embedded_pair, expected_texts, generate
from workshop.case import case
from workshop.gpu.stages import about_device, growing, guarded, run_parts, scratch_folder, wait_for_model
from workshop.kernel_times import kernel_times
from workshop.report import Report


def load(
    report: Report, name: str, target: Path, draft: Path | None, *, graphs: bool = True, **options
) -> Session:
    """Load a session and report how long that took."""
    begin = time.perf_counter()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    marks: list[float] = []
    config = EngineConfig(device=report.device, draft=DraftConfig(draft) if draft else None, **options)
    session = load_session(
        target,
        config,
        graphs=graphs,
        warming=lambda done, total: marks.append(time.perf_counter()),
    )
    facts: dict[str, Any] = {"seconds": round(time.perf_counter() - begin, 2)}
    if torch.cuda.is_available():
        facts["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        facts["capture_s"] = [round(b - a, 2) for a, b in itertools.pairwise(marks)]
        if graphs:
            report.check(f"{name}: captured", session.engine.runner.captured)
    report.log(f"loaded {name}", **facts)
    return session


def small(report: Report) -> None:
    """Time texts of the embedded pair: plain, trees without graphs, trees with graphs."""
    expected, (target, draft) = expected_texts(), embedded_pair()
    ways: dict[str, dict[str, Any]] = {
        "plain": {"speculation": None, "draft": None, "graphs": True},
        "tree eager": {"speculation": TREE, "draft": draft, "graphs": False},
        "tree graphs": {"speculation": TREE, "draft": draft, "graphs": True},
    }
    found: dict[str, list[list[int]]] = {}
    for name, options in ways.items():
        session = load(report, name, target, max_ctx=2048, **options)
        generate(session, expected[-1].prompt, max_tokens=16)  # compiles
        runs = [generate(session, text.prompt, max_tokens=96) for text in expected]
        found[name] = [run.tokens for run in runs]
        seconds = sum((s.generated_tokens - 1) / s.decode_tok_s for s in (r.stats for r in runs) if s.steps)
        tokens = sum(run.stats.generated_tokens - 1 for run in runs)
        steps, committed = sum(r.stats.steps for r in runs), sum(r.stats.step_tokens for r in runs)
        report.log(
            f"{name}: speed",
            tok_s=round(tokens / seconds, 1),
            acceptance=round(committed / steps, 3),
            step_ms=round(1000 * seconds / steps, 3),
        )
        if name == "tree graphs":
            sampled(report, session, expected)
    for name in ("tree eager", "tree graphs"):
        same = sum(a == b for a, b in zip(found[name], found["plain"], strict=True))
        report.log(f"{name}: texts identical to plain decoding", same=same, of=len(expected))


def sampled(report: Report, session: Session, expected: list[ExpectedText]) -> None:
    """Compare texts with a temperature, and with penalties, with those of plain steps in the same session."""
    for name, sampling in {
        "T 0.8": SamplingParams(temperature=0.8, top_p=0.95, seed=5),
        "penalties": SamplingParams(repetition_penalty=1.1, presence_penalty=0.3, seed=6),
    }.items():
        options = {"max_tokens": 64, "sampling": sampling}
        tree, plain = (
            generate(session, expected[0].prompt, draft_budget=budget, **options).tokens
            for budget in (None, 0)
        )
        index = divergence(tree, plain)
        report.log(f"{name}: tree text against plain", same=index is None, first=index)


def prefill(report: Report, session: Session) -> None:
    engine = session.engine
    for count in (512, 2048):
        prompt = [(7 * index + 11) % 5000 for index in range(count)]
        speeds = []
        for _ in range(3):
            *_, done = engine.generate(Request(prompt=prompt, max_tokens=1))
            assert isinstance(done, Done)
            speeds.append(count / done.stats.ttft_s)
        report.log("prefill", tokens=count, tok_s=[round(speed) for speed in speeds])


def steps_of(report: Report, session: Session, bandwidth: float, **options) -> dict[int, dict]:
    result = measure_steps(session, bandwidth=bandwidth, **options)
    report.log("steps", **result)
    for row in lines(result):
        print("   ", f"{row[0]:>5}", *(f"{cell:>24}" for cell in row[1:]), flush=True)
    return {row["rows"]: row for row in result["sizes"]}


def random_large(report: Report) -> None:
    """Time the parts of a step by size, prefill and plain decoding of a random 27B model."""
    folder = wait_for_model(report, "random")
    session = load(
        report,
        "random 27b",
        folder / "target.gguf",
        folder / "draft.gguf",
        max_ctx=8192,
        speculation=SpecConfig(budget=63, adaptive=False),
    )
    bandwidth = read_bandwidth(torch.device(report.device))
    rows = steps_of(report, session, bandwidth)
    root = rows[1]["verify_ms"] + rows[1]["walk_ms"]
    report.log(
        "relative to the root alone",
        root_ms=round(root, 3),
        verify_8=round(rows[8]["verify_ms"] / rows[1]["verify_ms"], 3),
        verify_24=round(rows[24]["verify_ms"] / rows[1]["verify_ms"], 3),
        whole_24=round(rows[24]["step_ms"] / root, 3),
        draft_share=round(rows[24]["draft_ms"] / rows[24]["step_ms"], 3),
        gap_share=round(rows[24]["gap_ms"] / rows[24]["step_ms"], 3),
    )
    warm = SamplingParams(temperature=0.8, top_p=0.95, seed=3)
    harsh = SamplingParams(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.2, seed=3)
    for name, sampling in (("T 0.8, top-p 0.95", warm), ("penalties", harsh)):
        found = measure_steps(session, sizes=[24], sampling=sampling, bandwidth=bandwidth)["sizes"][0]
        report.log(f"24 rows, {name}", ratio=round(found["step_ms"] / rows[24]["step_ms"], 3), **found)
    guarded(report, "plain text", lambda: plain_text(report, session, "with a draft loaded"))
    for size in (1, 24):
        guarded(report, "kernels", lambda size=size: kernels(report, session, size))
    guarded(report, "prefill", lambda: prefill(report, session))
    if report.left > 50:
        long = {"sizes": [1, 24], "context": 6000}
        guarded(report, "long context", lambda: steps_of(report, session, bandwidth, **long))
    del session
    torch.cuda.empty_cache()
    if report.left > 30:
        session = load(report, "random 27b, no draft", folder / "target.gguf", None, max_ctx=8192)
        steps_of(report, session, bandwidth)
        plain_text(report, session, "without a draft")
    shutil.rmtree(folder, ignore_errors=True)


def plain_text(report: Report, session: Session, how: str) -> None:
    """Report the throughput of plain greedy decoding, the first token excluded."""
    prompt = [(7 * index + 11) % 5000 for index in range(256)]
    speeds = []
    for _ in range(3):
        request = Request(prompt=prompt, max_tokens=257, may_stop=False, draft_budget=0)
        *_, done = session.engine.generate(request)
        assert isinstance(done, Done)
        speeds.append(done.stats.decode_tok_s)
    report.log(f"plain text, {how}", tok_s=[round(speed, 1) for speed in speeds], tokens=257)


def kernels(report: Report, session: Session, size: int) -> None:
    found = kernel_times(session, size)
    report.log(f"kernels of a step, {size} rows", total=round(sum(found.values()), 3))
    for name, milliseconds in list(found.items())[:25]:
        print(f"    {milliseconds:8.3f} ms {name}", flush=True)
    report.log("kernels", rows=size, ms={name: round(ms, 4) for name, ms in list(found.items())[:40]})


def exact_large(report: Report) -> None:
    """Time texts of the pair grown to 27B, which are the small pair's."""
    folder, expected = wait_for_model(report, "exact"), expected_texts()
    session = load(
        report, "grown 27b", folder / "target.gguf", folder / "draft.gguf", max_ctx=8192, speculation=TREE
    )
    shutil.rmtree(folder, ignore_errors=True)
    generate(session, expected[-1].prompt, max_tokens=16)  # compiles
    speeds = {}
    for name, budget in (("plain", 0), ("tree", None)):
        all_stats = [
            generate(session, text.prompt, max_tokens=128, draft_budget=budget).stats for text in expected
        ]
        speeds[name] = statistics.median(stats.decode_tok_s for stats in all_stats)
        steps = sum(stats.steps for stats in all_stats)
        seconds = sum((stats.generated_tokens - 1) / stats.decode_tok_s for stats in all_stats)
        report.log(
            f"grown, {name}",
            tok_s=round(speeds[name], 1),
            acceptance=round(sum(stats.step_tokens for stats in all_stats) / steps, 3),
            step_ms=round(1000 * seconds / steps, 3),
            by_prompt=[round(stats.decode_tok_s, 1) for stats in all_stats],
        )
    report.log("grown, speed-up", tree_over_plain=round(speeds["tree"] / speeds["plain"], 3))


PARTS = {"small": (small, 20.0), "random": (random_large, 40.0), "exact": (exact_large, 30.0)}


@case(seconds=150)
def main(
    report: Report,
    *,
    only: Annotated[str, "parts, in their order"] = "small,random,exact",
    shape: Annotated[str, "of the large models: 27b, or double for a trial"] = "27b",
    part: Literal["small", "random", "exact"] | None = None,
    folder: Path | None = None,
) -> None:
    if part is None:
        scratch, names = scratch_folder(), only.split(",")
        if report.out:
            report.out.write_text("")
        large = [name for name in names if name != "small"]
        with growing(scratch, shape, large) if large else contextlib.nullcontext():
            run_parts(report, "gpu.step", dict.fromkeys(names, math.inf), "--folder", scratch)
        return
    # A traceback where graphs could not be captured.
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("bough.engine.runner").setLevel(logging.DEBUG)
    report.folder = folder or Path()
    report.log(part, folder=str(folder), **about_device(report))
    run, needs = PARTS[part]
    report.part(run, needs=needs)
