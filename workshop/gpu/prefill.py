"""Times prefill on a GPU: int8 matmuls, their cost in text, then whole prompts of a random 27B model.

    python -m workshop gpu.prefill --out prefill.jsonl [--seconds 375] [--only model]
        [--small qwen2.5-coder-0.5b.gguf]

Parts: int8 (a 27B's matrices in int8 and exactly), text (exact against int8 on real text, with the embedded
target and the model of --small), model (8K, 32K and 128K tokens exactly and in int8, by groups of kernels).
The model is grown meanwhile. `bough doctor --gpu` times each kernel; tests/gpu check them.
"""

import itertools
import math
import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Done, Engine, Request
from bough.kernels.quant_matmul import PackedWeight
from bough.memory.estimate import prefill_bytes
from bough.models.measure import _parts as parts_of
from bough.models.spec import ModelSpec
from bough.session.loading import load_session
from workshop.case import case
from workshop.gpu import prefill_int8
from workshop.gpu.stages import about_device, growing, guarded, run_parts, scratch_folder, wait_for_model
from workshop.report import Report, eager_ms

WAYS, LONGEST = ("exact", "int8"), 131072
GROUPS = {
    "int8: rounded": ("quantise",),
    "delta: inverse": ("_prepare_kernel",),
    "delta: scan": ("_scan_kernel", "_fold_kernel"),
    "convolution": ("_chunk_conv_kernel",),
    "attention": ("_chunk_attention_kernel", "_expand_kernel"),
    "weights expanded": ("expand",),
    "matmul": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "_matmul_kernel"),
    "scaled": ("_scale_rows_kernel",),
    "norms and gates": ("norm", "silu", "gated", "rows_", "head_", "cache"),
    "scaled and copied": ("elementwise", "copy", "index", "Memcpy", "Memset"),
}


def median_ms(work: Callable[[], object], repeats: int = 5) -> float:
    work()
    return eager_ms(work, repeats=repeats)


def arithmetic(report: Report) -> float:
    """Return the operations a second of a matmul of 8192 cubed in bf16 on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    rate = 2 * 8192**3 / median_ms(lambda: a @ b, 20) * 1e3
    report.log("arithmetic", bf16_8192_tflops=round(rate / 1e12, 1))
    return rate


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 5000, (tokens,), generator=generator).tolist()


def first_token_s(engine: Engine, tokens: int, seed: int) -> float:
    *_, done = engine.generate(Request(prompt=prompt_of(tokens, seed), max_tokens=1))
    assert isinstance(done, Done)
    return done.stats.ttft_s


def prefill_flops(spec: ModelSpec, tokens: int) -> float:
    """Return the operations of matmuls and attention; the delta rule's own 0.9 percent are left out."""
    weights = 3 * spec.width * spec.feed_forward * len(spec.layers)
    inner = spec.heads * spec.head_dim
    weights += spec.attention_layers * spec.width * (3 * inner + 2 * spec.kv_heads * spec.head_dim)
    if spec.delta is not None:
        wide = spec.delta.channels + 2 * spec.delta.inner + 2 * spec.delta.value_heads
        weights += spec.delta_layers * spec.width * wide
    return 2.0 * weights * tokens + 2.0 * spec.attention_layers * inner * tokens**2


class Switch:
    """Turns int8 on and off in a model that was loaded for it."""

    def __init__(self, engine: Engine):
        weights, queue, seen = [], [engine.target], set()
        while queue:
            thing = queue.pop()
            if isinstance(thing, PackedWeight):
                weights.append(thing)
            elif id(thing) not in seen and not isinstance(thing, Tensor):
                seen.add(id(thing))
                queue += parts_of(thing)
        self._weights = [(weight, weight.int8_rows) for weight in weights if weight.int8_rows]
        assert self._weights, "no matrix is marked for int8"

    def set(self, way: str) -> None:
        for weight, rows in self._weights:
            object.__setattr__(weight, "int8_rows", rows if way == "int8" else 0)


def model(report: Report) -> None:
    folder = wait_for_model(report, "random")
    config = EngineConfig(
        report.device,
        max_ctx=LONGEST + 256,
        prefill_chunk=8192,
        prefill="int8",
        prefix_cache=0,
        speculation=SpecConfig(budget=22, adaptive=False),
        draft=DraftConfig(folder / "draft.gguf"),
    )
    session = load_session(folder / "target.gguf", config, graphs=False)
    shutil.rmtree(folder, ignore_errors=True)
    engine, rate, switch = session.engine, arithmetic(report), Switch(session.engine)
    for tokens, way in itertools.product((8192, 32768, LONGEST), WAYS):
        if report.left < 8 + tokens / 4000:
            report.log("left out", tokens=tokens, way=way)
            continue
        switch.set(way)
        guarded(report, way, partial(prompt, report, engine, tokens, way, rate))
    for way in WAYS:
        switch.set(way)
        guarded(report, "chunks", partial(chunks, report, engine, way))


def prompt(report: Report, engine: Engine, tokens: int, way: str, rate: float) -> None:
    """Time a prompt: a short one three times, and any one by groups of kernels."""
    spec = engine.target.spec
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if tokens <= 8192:
        first_token_s(engine, tokens, 0)
    found = [first_token_s(engine, tokens, seed + 1) for seed in range(3 if tokens <= 8192 else 0)]
    profiled, by_group = groups(engine, tokens)
    peak = torch.cuda.max_memory_allocated() - before
    seconds = statistics.median(found or [profiled])
    chunk = min(engine.prefill_chunk, tokens)
    planned = prefill_bytes(spec, chunk, len(engine.drafter.features.taps), int8=way == "int8")
    report.log(
        "prefill",
        way=way,
        tokens=tokens,
        chunk=chunk,
        tok_s=round(tokens / seconds),
        share=round(prefill_flops(spec, tokens) / seconds / rate, 3),
        seconds=round(seconds, 3),
        profiled=not found,
        peak_mib=round(peak / 2**20),
        planned_mib=round(planned / 2**20),
    )
    report.log("time by group", way=way, tokens=tokens, **by_group)


def chunks(report: Report, engine: Engine, way: str) -> None:
    plain = engine.prefill_chunk
    for chunk in (1024, 2048, 4096, 8192):
        if report.left < 6:
            break
        engine.prefill_chunk = chunk
        first_token_s(engine, 8192, 0)
        speed = round(8192 / first_token_s(engine, 8192, 1))
        report.log("chunk size", way=way, chunk=chunk, tok_s_at_8192=speed)
    engine.prefill_chunk = plain


def groups(engine: Engine, tokens: int) -> tuple[float, dict[str, float]]:
    """Return a profiled prompt's seconds, and the milliseconds of groups of kernels; print the largest."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds = first_token_s(engine, tokens, 9)
        torch.cuda.synchronize()
    found, names = defaultdict(float), defaultdict(float)
    for event in profile.key_averages():
        ms = event.self_device_time_total / 1000
        group = next(
            (group for group, parts in GROUPS.items() if any(p in event.key for p in parts)), "other"
        )
        found[group] += ms
        names[event.key[:80]] += ms
    for name, ms in sorted(names.items(), key=lambda x: -x[1])[: 25 if tokens <= 8192 else 8]:
        print(f"    {ms:9.2f} ms {name}", flush=True)
    return seconds, {name: round(ms, 1) for name, ms in sorted(found.items(), key=lambda x: -x[1])}


PARTS = {
    "int8": prefill_int8.time_int8,
    "text": prefill_int8.text,
    "model": model,
}
# Seconds of the parts before the model, which gets the rest of the time.
SHARES = {"int8": 55.0, "text": 30.0}


@case(seconds=375)
def main(
    report: Report,
    *,
    only: Annotated[str, "parts, in their order"] = "int8,text,model",
    small: Annotated[Path | None, "a real small model, for the cost of int8 in its text"] = None,
    shape: Annotated[str, "of the model: 27b, or double for a trial"] = "27b",
    part: Literal["int8", "text", "model"] | None = None,
    folder: Path | None = None,
) -> None:
    if part is None:
        scratch, names = scratch_folder().with_name("bough-prefill"), only.split(",")
        if report.out:
            report.out.write_text("")
        with growing(scratch, shape, ["random"] if "model" in names else []):
            shares = {name: SHARES.get(name, math.inf) if "model" in names else math.inf for name in names}
            options = ["--small", small] if small else []
            run_parts(report, "gpu.prefill", shares, "--folder", scratch, *options)
        return
    report.folder, prefill_int8.small_model = folder or Path(), small
    report.log(part, **about_device(report))
    torch.manual_seed(1)
    report.part(PARTS[part], needs=5.0)
