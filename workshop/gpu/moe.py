"""Times a model with random weights of the shapes of Qwen3.5-35B-A3B; tests/gpu/test_experts.py checks it.

    python -m workshop gpu.moe --out moe.jsonl [--folder MODEL] [--seconds 400]

Steps of 1, 8, 24 and more rows beside the time that their bytes take at the card's read bandwidth, with the
experts that the rows of the step really chose; prefill of 2,048 and 8,192 tokens. Then the same with half of
the experts in host memory alone: steps whose routing is made up, by the share of experts that have a place,
beside the step without a miss and the time of the missed bytes on the bus. --device cpu --tiny: a trial run.
"""

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from bough.bench.step import StepProbe, lines, measure_steps, read_bandwidth
from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Done, Request
from bough.gguf.reader import GGUFFile
from bough.models import layers
from bough.models.decoder import Decoder
from bough.models.spec import ExpertSpec, ModelSpec
from bough.session.loading import load_session
from bough.session.session import Session
from tests.gpu.texts import embedded_pair
from workshop.case import case
from workshop.gpu.routings import Fed, feeding, with_hits
from workshop.gpu.stages import about_device
from workshop.grow.grow import grow
from workshop.grow.shape import preset
from workshop.report import Report

SIZES = (1, 8, 24)
# Of a step's distinct experts, those that have a place: all, as at 16, 12 and 8 GB, and at random (None).
SHARES = (1.0, 0.95, 0.88, 0.66, None)
TOKENS = {1: 1.0, 8: 3.4, 24: 4.5}  # a step: assumed, not measured; the weights are random


def written(report: Report, folder: Path | None, tiny: bool) -> Path:
    """Return the folder of the model, written first unless it is given."""
    if folder is not None:
        return folder
    folder, begin = Path(tempfile.mkdtemp(prefix="bough-moe-")), time.perf_counter()
    shape: Any = "35b-a3b"
    if tiny:
        with GGUFFile.open(embedded_pair()[0]) as file:
            found = preset("35b-a3b", ModelSpec.from_gguf(file), None)
        experts = ExpertSpec(count=16, used=8, width=256, shared_width=256)
        sizes = replace(found.target, layers=16, width=1024, vocab_size=20000, experts=experts)
        shape = replace(found, target=sizes)
    grown = grow(folder, shape, random=True, force=True)
    report.log(
        "wrote", seconds=round(time.perf_counter() - begin, 1), bytes=grown.bytes, shape=grown.shape.name
    )
    return folder


@contextmanager
def recorded_experts() -> Iterator[list[Tensor]]:
    """Give the experts [rows, used] that each layer chooses meanwhile."""
    found: list[Tensor] = []
    on_device, on_host = layers.route_rows, layers.plain_experts.route

    def route_rows(*arguments: Any, **options: Any) -> Any:
        result = on_device(*arguments, **options)
        found.append(result[2].chosen.clone())
        return result

    def route(*arguments: Any) -> Any:
        result = on_host(*arguments)
        found.append(result[1].clone())
        return result

    layers.route_rows, layers.plain_experts.route = route_rows, route
    try:
        yield found
    finally:
        layers.route_rows, layers.plain_experts.route = on_device, on_host


def chosen_share(session: Session, rows: int) -> float:
    """Return the share of a layer's experts that a step of these rows reads, on average."""
    experts = session.engine.target.spec.experts
    assert experts is not None and not session.engine.runner.captured
    probe = StepProbe(session.engine, 64, rounds=4)
    try:
        with recorded_experts() as found:
            session.engine.pipeline.probe(probe._sequence, probe.comb(rows), draft=False)
    finally:
        probe.close()
    return statistics.mean(len(each.unique()) for each in found) / experts.count


def steps(report: Report, session: Session, shares: dict[int, float], *, repeats: int) -> None:
    """Time steps by size beside the floor of the bytes that each reads."""
    bandwidth, plan = read_bandwidth(session.engine.target.device), session.plan
    sizes = None if repeats > 1 else SIZES
    result = measure_steps(session, bandwidth=bandwidth, repeats=repeats, sizes=sizes)
    report.log("steps", **result)
    for row in lines(result):
        print("   ", f"{row[0]:>5}", *(f"{cell:>24}" for cell in row[1:]), flush=True)
    states = 2 * plan.recurrent + plan.kv_per_token * result["context"]
    for row in result["sizes"]:
        if row["rows"] not in shares:
            continue
        share = shares[row["rows"]]
        moved = plan.estimate.dense + plan.estimate.routed * share + states
        floor = 1000 * moved / bandwidth
        report.log(
            "floor",
            rows=row["rows"],
            experts_read=round(share, 4),
            gb=round(moved / 1e9, 3),
            floor_ms=round(floor, 3),
            forward_ms=round(row["verify_ms"], 3),
            share_of_bandwidth=round(floor / row["verify_ms"], 3),
        )


def cached_steps(report: Report, session: Session, fed: dict[int, Fed], *, repeats: int) -> None:
    """Time steps by rows and by the share of their experts that have a place."""
    target, plan, spec = session.engine.target, session.plan, session.engine.target.spec
    assert isinstance(target, Decoder) and spec.experts is not None and plan.estimate.expert_slots is not None
    caches, slots = target.expert_caches, plan.estimate.expert_slots
    expert = plan.estimate.host_experts / (len(spec.layers) * spec.experts.count)
    bus = {"kernel": caches.copy_rate(), "copies": copy_bandwidth(target.device)}
    report.log("bus", **{f"{name}_gb_s": round(rate / 1e9, 1) for name, rate in bus.items()}, slots=slots)
    probe = StepProbe(session.engine, 64, rounds=(repeats + 2) * len(fed) * len(SHARES))
    sizes = {"experts": spec.experts.count, "used": spec.experts.used, "slots": slots, "steps": repeats + 2}
    try:
        for rows, routing in fed.items():
            resident = 0.0
            for share in SHARES:
                layers = [with_hits(share, rows, **sizes, seed=layer) for layer in range(len(spec.layers))]
                routing.load(np.stack([chosen for chosen, _ in layers], 1))
                caches.fill(None)
                times, use = probe.times(rows, repeats), caches.use
                assert use is not None
                missed = use.misses * expert / (repeats + 2)
                resident = resident or times["verify_ms"]
                floor = resident + 1000 * missed / bus["copies"]
                report.log(
                    "cached step",
                    rows=rows,
                    asked=share,
                    hits=round(use.share, 4),
                    distinct=round((use.hits + use.misses) / (repeats + 2) / len(spec.layers), 1),
                    forward_ms=round(times["verify_ms"], 3),
                    step_ms=round(times["step_ms"], 3),
                    resident_ms=round(resident, 3),
                    missed_gb=round(missed / 1e9, 3),
                    floor_ms=round(floor, 3),
                    of_floor=round(times["verify_ms"] / floor, 3),
                    tok_s=round(1000 * TOKENS[rows] / times["step_ms"], 1),
                )
    finally:
        probe.close()


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes a second of copies from pinned host memory."""
    source = torch.zeros(1 << 28, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    target.copy_(source)
    begin = time.perf_counter()
    for _ in range(4):
        target.copy_(source)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 4 * len(source) / (time.perf_counter() - begin)


def prefill(report: Report, session: Session, lengths: tuple[int, ...]) -> None:
    for tokens in lengths:
        speeds = []
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            prompt = torch.randint(0, 5000, (tokens,), generator=generator).tolist()
            *_, done = session.engine.generate(Request(prompt=prompt, max_tokens=1))
            assert isinstance(done, Done)
            speeds.append(tokens / done.stats.ttft_s)
        report.log("prefill", tokens=tokens, tok_s=[round(speed) for speed in speeds])


@torch.inference_mode()
def run(report: Report, folder: Path, cold: int, *, tiny: bool) -> None:
    report.log("experts in host memory alone", of_each_layer=cold)
    longest = 8192 if not tiny else 128
    config = EngineConfig(
        device=report.device,
        max_ctx=longest + 1024,
        speculation=SpecConfig(budget=63, adaptive=False),
        draft=DraftConfig(folder / "draft.gguf"),
        experts_host=cold,
    )
    begin = time.perf_counter()
    session = load_session(folder / "target.gguf", config, graphs=False)
    report.log("loaded", seconds=round(time.perf_counter() - begin, 1), routed=session.plan.estimate.routed)
    repeats, spec = 1 if tiny else 15, session.engine.target.spec
    if cold:
        assert spec.experts is not None
        shape = (repeats + 2, len(spec.layers))
        fed = {rows: Fed((*shape, rows), spec.experts.count, session.engine.target.device) for rows in SIZES}
        with feeding(fed):
            report.check("captured", session.engine.warmup.capture())
            cached_steps(report, session, fed, repeats=repeats)
    else:
        shares = {rows: chosen_share(session, rows) for rows in SIZES}
        if report.device == "cuda":
            report.check("captured", session.engine.warmup.capture())
        report.log("experts read", shares=shares)
        steps(report, session, shares, repeats=repeats)
    prefill(report, session, (longest // 4, longest))


@case(seconds=400)
def main(
    report: Report,
    *,
    folder: Annotated[Path | None, "has target.gguf and draft.gguf of the shapes; else written"] = None,
    cold: Annotated[Sequence[int], "experts of each layer in host memory alone"] = (0, 128),
    tiny: Annotated[bool, "a small model, for a trial"] = False,
) -> None:
    report.log("moe", **about_device(report))
    model = written(report, folder, tiny)
    for experts in cold if report.device == "cuda" else (0,):
        run(report, model, experts, tiny=tiny)
        gc.collect()
        torch.cuda.empty_cache()
