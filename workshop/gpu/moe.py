"""Times a model with random weights of the shapes of Qwen3.5-35B-A3B; tests/gpu/test_experts.py checks it.

    python -m workshop gpu.moe --out moe.jsonl [--folder MODEL] [--seconds 400]

Steps of 1, 8, 24 and more rows beside the time that their bytes take at the card's read bandwidth, with the
experts that the rows of the step really chose; prefill of 2,048 and 8,192 tokens. --device cpu --tiny is a
trial run.
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

import torch
from torch import Tensor

from bough.bench.step import StepProbe, lines, measure_steps, read_bandwidth
from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Done, Request
from bough.gguf.reader import GGUFFile
from bough.models import layers
from bough.models.spec import ExpertSpec, ModelSpec
from bough.session.loading import load_session
from bough.session.session import Session
from tests.gpu.texts import embedded_pair
from workshop.case import case
from workshop.gpu.stages import about_device
from workshop.grow.grow import grow
from workshop.grow.shape import preset
from workshop.report import Report

SIZES = (1, 8, 24)


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
    host = plan.estimate.host_experts
    if host:
        report.log(
            "copies from host memory", gb_s=round(copy_bandwidth(session.engine.target.device) / 1e9, 1)
        )
    for row in result["sizes"]:
        if row["rows"] not in shares:
            continue
        share, weights = shares[row["rows"]], plan.estimate.parts["weights"]
        moved = weights - plan.estimate.routed * (1 - share) + states
        floor = 1000 * moved / bandwidth
        report.log(
            "floor",
            rows=row["rows"],
            experts_read=round(share, 4),
            gb=round(moved / 1e9, 3),
            floor_ms=round(floor, 3),
            forward_ms=round(row["verify_ms"], 3),
            share_of_bandwidth=round(floor / row["verify_ms"], 3),
            host_gb=round(share * host / 1e9, 3),
        )


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
def run(report: Report, folder: Path, host_layers: int, *, tiny: bool) -> None:
    report.log("experts in host memory", layers=host_layers)
    longest = 8192 if not tiny else 128
    config = EngineConfig(
        device=report.device,
        max_ctx=longest + 1024,
        speculation=SpecConfig(budget=63, adaptive=False),
        draft=DraftConfig(folder / "draft.gguf"),
        experts_host=host_layers,
    )
    begin = time.perf_counter()
    session = load_session(folder / "target.gguf", config, graphs=False)
    report.log("loaded", seconds=round(time.perf_counter() - begin, 1), routed=session.plan.estimate.routed)
    shares = {rows: chosen_share(session, rows) for rows in SIZES}
    if report.device == "cuda":
        report.check("captured", session.engine.warmup.capture())
    report.log("experts read", shares=shares)
    steps(report, session, shares, repeats=1 if tiny else 15)
    prefill(report, session, (longest // 4, longest))


@case(seconds=400)
def main(
    report: Report,
    *,
    folder: Annotated[Path | None, "has target.gguf and draft.gguf of the shapes; else written"] = None,
    host_layers: Annotated[Sequence[int], "with experts in host memory"] = (0, 20),
    tiny: Annotated[bool, "a small model, for a trial"] = False,
) -> None:
    report.log("moe", **about_device(report))
    model = written(report, folder, tiny)
    for layers_in_host in host_layers if report.device == "cuda" else (0,):
        run(report, model, layers_in_host, tiny=tiny)
        gc.collect()
        torch.cuda.empty_cache()
