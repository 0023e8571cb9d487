"""Times prefill on a GPU: its kernels, the cost of int8 in text, then whole prompts of a random 27B model.

    python -m workshop gpu.prefill --out prefill.jsonl [--seconds 375] [--only kernels]
        [--small qwen2.5-coder-0.5b.gguf]

Parts: kernels (matmuls, attention and its tiles), delta (the delta rule; only if named), int8 (its kernels
checked, timed and tuned), text (exact against int8 on real text, with the embedded target and the model of
--small), model (8K, 32K and 128K tokens as today, with each candidate and in int8, by groups of kernels).
The model is grown meanwhile.
tests/gpu/test_delta_rule.py and test_attention.py check the kernels, test_memory.py the logits and the memory
of long prompts.
"""

import math
import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from bough.config import SpecConfig
from bough.engine.engine import Done, Engine, Request
from bough.kernels.attention import prefill as attention
from bough.kernels.causal_conv import DeltaHeads
from bough.kernels.delta_rule import chunk as delta
from bough.kernels.quant_matmul import PackedWeight
from bough.memory.estimate import prefill_bytes
from bough.models.measure import _parts as parts_of
from bough.models.spec import ModelSpec
from bough.models.step import Step
from tests.gpu.inputs import (
    ATTENTION_HEADS,
    DELTA_DIM,
    KEY_HEADS,
    VALUE_HEADS,
    AttentionChunk,
    DeltaChunk,
)
from workshop.case import case
from workshop.gpu import prefill_int8
from workshop.gpu.stages import about_device, growing, guarded, run_parts, scratch_folder, wait_for_model
from workshop.gpu.step import load
from workshop.report import Report, eager_ms

DELTA_SHAPE = (KEY_HEADS, VALUE_HEADS, DELTA_DIM)
# Columns, stages, warps of the scan over blocks; rows, keys, stages, warps of attention.
SCAN_TILES = ((64, 3, 8), (64, 3, 4), (32, 3, 4), (32, 3, 8))
TILES = ((128, 32, 3, 8), (128, 64, 2, 8))
# The same through tensor descriptors.
DESCRIPTOR_TILES = (
    (128, 64, 2, 8), (128, 32, 4, 8), (128, 32, 3, 8), (64, 64, 2, 4), (64, 64, 3, 4), (64, 32, 4, 4),
)  # fmt: skip
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


def time_delta(report: Report) -> None:
    """Time one of the 48 layers; two in turn, so that little of a layer is left in the L2 cache."""
    for tokens in (2048, 8192):
        chunks = [DeltaChunk(DELTA_SHAPE, tokens, 0) for _ in range(2)]
        report.log("fold, a layer", tokens=tokens, ms=round(median_ms(partial(fold, chunks)) / 2, 4))
        report.log("convolution, a layer", tokens=tokens, ms=round(median_ms(partial(heads, chunks)) / 2, 3))
        run = partial(deltas, chunks, heads(chunks))
        report.log("delta rule, a layer", tokens=tokens, ms=round(median_ms(run) / 2, 3))
    guarded(report, "delta tiles", partial(tune_delta, report, run))


def fold(chunks: list[DeltaChunk]) -> None:
    for chunk in chunks:
        chunk.fold()


def heads(chunks: list[DeltaChunk]) -> list[DeltaHeads]:
    return [chunk.heads() for chunk in chunks]


def deltas(chunks: list[DeltaChunk], inputs: list[DeltaHeads]) -> None:
    for chunk, parts in zip(chunks, inputs, strict=True):
        delta.slot_delta(parts, chunk.buffers.state, chunk.slots)


def tune_delta(report: Report, run: Callable[[], None]) -> None:
    scan, prepare = delta.scan_tiles, delta.prepare_tiles
    try:
        for columns, stages, warps in SCAN_TILES:
            chosen = {"COLUMNS": columns, "num_stages": stages, "num_warps": warps}
            delta.scan_tiles = lambda *_, chosen=chosen: chosen
            try_tiles(report, "scan tiles", run, **chosen)
        delta.scan_tiles = scan
        for exact, warps in (("tf32x3", 8), ("tf32", 4), ("tf32x3", 4)):
            chosen = {"LEVELS": 6, "EXACT": exact, "num_stages": 1, "num_warps": warps}
            delta.prepare_tiles = lambda *_, chosen=chosen: chosen
            try_tiles(report, "inverse tiles", run, exact=exact, warps=warps)
    finally:
        delta.scan_tiles, delta.prepare_tiles = scan, prepare


def try_tiles(report: Report, name: str, run: Callable[[], None], **chosen: Any) -> None:
    """Time tiles, some of which need more than a card has."""
    if report.left < 5:
        return
    try:
        report.log(name, ms=round(median_ms(run) / 2, 3), **chosen)
    except Exception as failure:
        report.log(name, failed=str(failure)[:80], **chosen)


def time_attention(report: Report) -> None:
    for rows, length in ((2048, 0), (8192, 0), (8192, 24576), (8192, 122880)):
        flops = 4 * 24 * 256 * (rows * length + rows * rows / 2)
        for format in ("f16", "q8_0"):
            chunk = AttentionChunk(ATTENTION_HEADS, rows, length, (format, format))
            ms = median_ms(chunk.attention, 3)
            facts = {"rows": rows, "behind": length, "format": format, "ms": round(ms, 2)}
            report.log("attention, a layer", tflops=round(flops / ms / 1e9), **facts)

    # One slice of the context, so that each tile is compiled once.
    chunk = AttentionChunk(ATTENTION_HEADS, 8192, 8192, ("f16", "f16"))
    flops = 4 * 24 * 256 * 1.5 * 8192**2
    guarded(report, "attention tiles", partial(tune_attention, report, chunk, flops))
    guarded(report, "attention slices", partial(tune_slices, report))


def tune_slices(report: Report) -> None:
    """Time the bytes of K and V at a time, after a long context: larger ones carry sums less often."""
    chunk, plain = AttentionChunk(ATTENTION_HEADS, 8192, 122880, ("f16", "f16")), attention.SLICE_BYTES
    flops = 4 * 24 * 256 * (8192 * 122880 + 8192**2 / 2)
    for descriptors in (False, True):
        for size in (32, 64, 128, 512):
            if report.left < 6:
                return
            attention.SLICE_BYTES, attention.DESCRIPTORS = size << 20, descriptors
            try:
                rate = round(flops / median_ms(chunk.attention, 2) / 1e9)
                report.log("attention slices", mib=size, descriptors=descriptors, tflops=rate)
            finally:
                attention.SLICE_BYTES, attention.DESCRIPTORS = plain, True


def tune_attention(report: Report, chunk: AttentionChunk, flops: float) -> None:
    """Time tiles, read by pointers and through descriptors; each is compared with today's."""
    plain, expected = (attention.tiles, attention.descriptor_tiles), chunk.attention()
    candidates = [(tile, False) for tile in TILES] + [(tile, True) for tile in DESCRIPTOR_TILES]
    for tile, descriptors in candidates:
        if report.left < 8:
            return
        chosen = dict(zip(("BLOCK_M", "BLOCK_N", "num_stages", "num_warps"), tile, strict=True))
        attention.tiles = lambda *_, chosen=chosen: dict(chosen)
        attention.descriptor_tiles = lambda chosen=chosen: dict(chosen)
        attention.DESCRIPTORS = descriptors
        facts: dict[str, Any] = {"descriptors": descriptors, **chosen}
        try:
            rate = round(flops / median_ms(chunk.attention, 3) / 1e9)
            error = float((chunk.attention() - expected).norm() / expected.norm())
            report.log("attention tiles", tflops=rate, error=float(f"{error:.1e}"), **facts)
        except Exception as failure:
            report.log("attention tiles", failed=str(failure)[:80], **facts)
        finally:
            attention.DESCRIPTORS = True
            attention.tiles, attention.descriptor_tiles = plain


def time_matmuls(report: Report) -> None:
    """Time the matmul of many rows and the scaling of its output, which is a second kernel."""
    for rows in (2048, 8192):
        x, scale = torch.randn(rows, 5120, device="cuda").half(), torch.rand(rows, 1, device="cuda")
        weight = torch.randn(12800, 5120, device="cuda").half().T
        out = torch.empty(rows, 34816, device="cuda")[:, :12800]
        output = torch.mm(x, weight, out_dtype=torch.float32)
        works = {
            "matmul": partial(torch.mm, x, weight, out_dtype=torch.float32),
            "matmul into `out`": partial(torch.mm, x, weight, out_dtype=torch.float32, out=out),
            "matmul in float16": partial(torch.mm, x, weight),
            "scaled into `out`": partial(torch.mul, output, scale, out=out),
            "scaled in place": partial(out.mul_, scale),
            "both, a thousand rows at a time": partial(in_pieces, x, weight, scale, out),
        }
        for name, work in works.items():
            try:
                ms = median_ms(work)
                facts = {"ms": round(ms, 3), "tflops": round(2 * rows * 5120 * 12800 / ms / 1e9)}
            except Exception as failure:
                facts = {"failed": str(failure)[:120]}
            report.log(name, rows=rows, **facts)


def in_pieces(x: Tensor, weight: Tensor, scale: Tensor, out: Tensor) -> None:
    """Scale pieces of the output while they are in the L2 cache."""
    space = torch.empty(1024, 6400, device=x.device)
    for rows in range(0, len(x), 1024):
        for columns in range(0, weight.shape[1], 6400):
            piece = slice(rows, rows + 1024), slice(columns, columns + 6400)
            torch.mm(x[piece[0]], weight[:, piece[1]], out_dtype=torch.float32, out=space)
            torch.mul(space, scale[piece[0]], out=out[piece])


def kernels(report: Report) -> None:
    torch.manual_seed(1)
    for timing in (arithmetic, time_matmuls, time_attention):
        if report.left > 10:
            guarded(report, timing.__name__, lambda timing=timing: timing(report))


def delta_rule(report: Report) -> None:
    torch.manual_seed(1)
    time_delta(report)


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


@dataclass(frozen=True, slots=True)
class Way:
    """A way to read prompts: what of the candidates is on."""

    name: str
    descriptors: bool = True
    int8: bool = False


EXACT = Way("exact")
POINTERS = Way("exact, without descriptors", descriptors=False)
INT8 = Way("int8", int8=True)


class Switches:
    """Turns candidates on and off in a model that was loaded for int8."""

    def __init__(self, engine: Engine):
        found, queue, seen = [], [engine.target], set()
        while queue:
            thing = queue.pop()
            if isinstance(thing, PackedWeight):
                found.append(thing)
            elif id(thing) not in seen and not isinstance(thing, Tensor):
                seen.add(id(thing))
                queue += parts_of(thing)
        self._weights = [(weight, weight.int8_rows) for weight in found if weight.int8_rows]
        assert self._weights, "no matrix is marked for int8"

    def set(self, way: Way) -> None:
        attention.DESCRIPTORS = way.descriptors
        for weight, rows in self._weights:
            object.__setattr__(weight, "int8_rows", rows if way.int8 else 0)


def model(report: Report) -> None:
    folder = wait_for_model(report, "random")
    longest = 131072
    options = {
        "max_ctx": longest + 256,
        "prefill_chunk": 8192,
        "prefill": "int8",
        "prefix_cache": 0,
        "speculation": SpecConfig(budget=22, adaptive=False),
        "graphs": False,
    }
    session = load(report, "random 27b", folder / "target.gguf", folder / "draft.gguf", **options)
    shutil.rmtree(folder, ignore_errors=True)
    engine, rate = session.engine, arithmetic(report)
    switches = Switches(engine)
    every, few = (EXACT, POINTERS, INT8), (EXACT, INT8)
    guarded(report, "logits", lambda: logits(report, engine, switches, every))
    for tokens, ways in ((8192, every), (32768, few), (longest, few)):
        for way in ways:
            if report.left < 8 + tokens / 4000:
                report.log("left out", tokens=tokens, way=way.name)
                continue
            switches.set(way)
            guarded(report, way.name, partial(prompt, report, engine, tokens, way, rate))
    for way in few:
        switches.set(way)
        guarded(report, "chunks", partial(chunks, report, engine, way))


def prompt(report: Report, engine: Engine, tokens: int, way: Way, rate: float) -> None:
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
    planned = prefill_bytes(spec, chunk, len(engine.drafter.features.taps), int8=way.int8)
    report.log(
        "prefill",
        way=way.name,
        tokens=tokens,
        chunk=chunk,
        tok_s=round(tokens / seconds),
        share=round(prefill_flops(spec, tokens) / seconds / rate, 3),
        seconds=round(seconds, 3),
        profiled=not found,
        peak_mib=round(peak / 2**20),
        planned_mib=round(planned / 2**20),
    )
    report.log("time by group", way=way.name, tokens=tokens, **by_group)


def last_logits(engine: Engine, prompt: list[int]) -> Tensor:
    """Return the logits [vocabulary] after a prompt of one chunk."""
    target, states = engine.target, engine.states
    slot = states.open()
    slots, tokens = torch.tensor([slot], device=target.device), torch.tensor([prompt], device=target.device)
    try:
        states.reserve(slot, len(prompt))
        step = Step.chunk(slots, tokens, states.buffers.lengths[slots])
        return target.logits(target.forward(step, states.buffers).hidden[:, -1])[0]
    finally:
        states.close(slot)


@torch.inference_mode()
def logits(report: Report, engine: Engine, switches: Switches, ways: list[Way]) -> None:
    """Compare each way's logits after 700 tokens with those of the exact one."""
    found = {}
    for way in ways:
        switches.set(way)
        found[way] = last_logits(engine, prompt_of(700))
    exact = found[EXACT]
    for way, each in found.items():
        error = float((each - exact).norm() / exact.norm())
        same = torch.equal(each, exact)
        limit = 0.0 if way is EXACT else 0.3 if way.int8 else 3e-2
        report.check(f"logits, {way.name}", error <= limit, error=float(f"{error:.1e}"), same_bits=same)


def chunks(report: Report, engine: Engine, way: Way) -> None:
    plain = engine.prefill_chunk
    for chunk in (1024, 2048, 4096, 8192):
        if report.left < 6:
            break
        engine.prefill_chunk = chunk
        first_token_s(engine, 8192, 0)
        speed = round(8192 / first_token_s(engine, 8192, 1))
        report.log("chunk size", way=way.name, chunk=chunk, tok_s_at_8192=speed)
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
    "kernels": kernels,
    "delta": delta_rule,
    "int8": prefill_int8.kernels,
    "text": prefill_int8.text,
    "model": model,
}
# Seconds of the parts before the model, which gets the rest of the time.
SHARES = {"kernels": 75.0, "delta": 60.0, "int8": 55.0, "text": 30.0}


@case(seconds=375)
def main(
    report: Report,
    *,
    only: Annotated[str, "parts, in their order"] = "kernels,int8,text,model",
    small: Annotated[Path | None, "a real small model, for the cost of int8 in its text"] = None,
    shape: Annotated[str, "of the model: 27b, or double for a trial"] = "27b",
    part: Literal["kernels", "delta", "int8", "text", "model"] | None = None,
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
