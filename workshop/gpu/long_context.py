"""Times a long prompt on a GPU, 27B shapes within 24 GiB, and steps after contexts up to 262,144 tokens.

    python -m workshop gpu.long_context --out long_context.jsonl [--folder DIR]

--folder: where target.gguf and draft.gguf of 27B shapes are, or will be once they are grown. Each part has a
process of its own, since a memory limit holds for a whole one. --device cpu --only unlimited is a trial run
of the steps with the embedded pair. tests/gpu/test_long_context.py checks the limit, the KV cache and the
text.
"""

import gc
import itertools
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch

from bough.bench.step import StepProbe, read_bandwidth
from bough.engine.engine import Engine
from bough.kernels.kv_cache.format import FORMATS
from bough.kernels.tree import MAX_ROWS
from bough.memory.estimate import kv_bytes_per_token
from bough.memory.planner import MemoryPlan
from bough.models.decoder import Decoder
from bough.session.session import Session
from bough.state.sequences import CacheConfig
from tests.gpu.device_memory import PeakMemory
from tests.gpu.long_text import compile_slices, long_text, read
from tests.gpu.texts import embedded_pair, load_session
from workshop.case import case
from workshop.gpu.stages import guarded, run_parts, scratch_folder
from workshop.grow.grow import grow
from workshop.report import Report, eager_ms

GIB = 1 << 30
WHOLE = 262_144  # tokens of context asked for within the limit
GENERATED = 64  # tokens after the prompt
PAIRS = (("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q5_0"), ("q4_0", "q4_0"), ("tq3_0", "tq3_0"))
SHORT, USUAL = 256, 60_000
CONTEXTS = (SHORT, 32 << 10, USUAL, 64 << 10, 128 << 10, 256 << 10)
ROWS = (1, 24)
RATIO = 1.35  # at most, of a tree's step after 60K tokens to one after a few


@dataclass(frozen=True)
class Options:
    device: str
    folder: Path
    limit: int
    tokens: int

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


def limited(report: Report, options: Options) -> None:
    """Time the prompt within the limit, and report the most memory in use from first to last."""
    peak, begin = PeakMemory(), time.perf_counter()
    with peak:
        session = load_session(
            options.folder / "target.gguf", options.folder / "draft.gguf", device=options.device,
            graphs=False, prefix_cache=0, vram_limit=options.limit, max_ctx=WHOLE,
        )  # fmt: skip
    plan = session.plan
    report.log("loaded", seconds=round(time.perf_counter() - begin, 1), plan=plan.line())
    report.log("plan", parts_mib={name: size >> 20 for name, size in plan.parts.items()})
    # No other thread may call CUDA while a graph is captured; what the capture takes stays allocated.
    report.check("captured", session.engine.warmup.capture())
    peak.sample()
    compile_slices(session.engine)
    freed(session.engine.target.device)
    report.log("ready", seconds=round(time.perf_counter() - begin, 1))
    prompt, needles = long_text(session, min(options.tokens, plan.max_ctx - 2 * GENERATED))
    with peak:
        found = read(session.engine, prompt, needles, GENERATED, progress_of(report))
    stats = found.stats
    assert stats is not None
    report.log(
        "limited: speed",
        prompt=len(prompt),
        prefill_s=round(stats.ttft_s, 2),
        prefill_tok_s=round(len(prompt) / stats.ttft_s),
        decode_tok_s=round(stats.decode_tok_s, 1),
        tokens_a_step=round(stats.step_tokens / max(1, stats.steps), 2),
    )
    report.log(
        "limited: memory",
        looks=peak.samples,
        peak_gib=round(peak.bytes / GIB, 3),
        planned_gib=round(plan.total / GIB, 3),
    )


def progress_of(report: Report) -> Callable[[int, int], None]:
    """Report prefill every five seconds; raise when no time is left."""
    begin, reported = time.perf_counter(), 0.0

    def progress(done: int, total: int) -> None:
        nonlocal reported
        seconds = time.perf_counter() - begin
        if seconds - reported > 5 or done == total:
            reported = seconds
            report.log("prefill", tokens=done, of=total, seconds=round(seconds, 1))
        if report.left < 5:
            raise TimeoutError(f"{done} of {total} tokens processed, and no time is left")

    return progress


def unlimited(report: Report, options: Options) -> None:
    """Time the steps of every KV format."""
    session = load_session(
        options.folder / "target.gguf", options.folder / "draft.gguf", device=options.device,
        prefix_cache=0, max_ctx=None,
    )  # fmt: skip
    # The draft's time does not depend on the format of the target's KV cache: it is measured once.
    longest = USUAL if options.on_gpu else 500
    drafting = draft_ms(report, session, longest, ROWS[-1] if options.on_gpu else 8)
    target, plan = session.engine.target, session.plan
    del session  # frees its KV cache
    guarded(report, "steps", lambda: steps(report, options, target, plan, drafting))


def freed(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def matmul_rate() -> float:
    """Return the operations a second of float16 matmuls."""
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.float16)
    return 2 * 8192**3 / min(eager_ms(lambda: a @ b, repeats=1) for _ in range(8)) * 1e3


@torch.inference_mode()
def fill_with_noise(engine: Engine) -> None:
    """Fill the KV pages with random numbers as large as those of a text."""
    for plane in engine.states.planes:
        if plane.dtype == torch.uint8:
            plane.random_(0, 256)
        elif plane.shape[-1] < engine.target.spec.head_dim:
            plane.uniform_(0.01, 0.02)  # scales
        else:
            plane.normal_()


def steps(report: Report, options: Options, target: Decoder, plan: MemoryPlan, drafting: float) -> None:
    """Time every format's step over KV pages of noise: the time does not depend on the numbers."""
    contexts = CONTEXTS if options.on_gpu else (SHORT, 500)
    rows = ROWS if options.on_gpu else (1, 8)
    bandwidth = read_bandwidth(target.device)
    rate = matmul_rate() if options.on_gpu else 1e11
    report.log("ceilings", read_tb_s=round(bandwidth / 1e12, 3), tflops=round(rate / 1e12))
    for names in PAIRS if options.on_gpu else (("f32", "f32"), ("q8_0", "q5_0")):
        if report.left < 12:
            report.log("left out", format="/".join(names))
            continue
        label, formats = "/".join(dict.fromkeys(names)), (FORMATS[names[0]], FORMATS[names[1]])
        freed(target.device)
        begin = time.perf_counter()
        cache = CacheConfig(*formats)
        engine = Engine(target, max_ctx=contexts[-1] + 1024, max_rows=rows[-1], cache=cache)
        if options.on_gpu:
            report.check(f"{label}: captured", engine.warmup.capture())
            fill_with_noise(engine)
        found = {}
        for context, count in itertools.product(contexts, rows):
            ms = step_ms(engine, context, count)
            found[context, count] = ms
            moved = plan.estimate.read_bytes(1) + 2 * plan.recurrent
            moved += kv_bytes_per_token(target.spec, formats) * context
            spec = target.spec
            operations = 4 * count * spec.heads * spec.head_dim * context * spec.attention_layers
            floors = [1e3 * moved / bandwidth, 1e3 * operations / rate]
            report.log(
                "step", format=label, context=context, rows=count, ms=round(ms, 3),
                floor_ms=round(max(floors), 3), times_the_floor=round(ms / max(floors), 2),
            )  # fmt: skip
        few, many = (drafting + found[context, rows[-1]] for context in (SHORT, min(USUAL, contexts[-1])))
        facts = {"ratio": round(many / few, 3), "ms": round(many, 3), "draft_ms": round(drafting, 3)}
        if label in ("f16", "q8_0") and options.on_gpu:
            report.check(f"{label}: a tree's step after {USUAL:,} tokens", many / few <= RATIO, **facts)
        else:
            report.log(f"{label}: a tree's step after {USUAL:,} tokens", **facts)
        report.log("format done", format=label, seconds=round(time.perf_counter() - begin, 1))
        del engine


@torch.inference_mode()
def step_ms(engine: Engine, context: int, rows: int) -> float:
    """Return the time of verifying and accepting; a draft call before it does not count."""
    times = step_parts(engine, context, rows)
    return times["verify_ms"] + times["walk_ms"]


def step_parts(engine: Engine, context: int, rows: int, repeats: int = 7) -> dict[str, float]:
    probe = StepProbe(engine, SHORT, rounds=repeats + 2)
    try:
        pretend_context(engine, context)
        return probe.times(rows, repeats)
    finally:
        probe.close()


def pretend_context(engine: Engine, context: int) -> None:
    """Make the sequence in slot 0 `context` tokens long; the added pages hold whatever was there before."""
    states, saved = engine.states, engine.drafter.save(0)
    states.lengths[0] = context
    states.buffers.lengths[0] = context
    states.reserve(0, MAX_ROWS)
    if saved is not None:
        vocabulary = engine.target.spec.vocab_size
        tokens = [index * 7919 % vocabulary for index in range(context)]  # nothing for prompt lookup
        engine.drafter.open(0, tokens, replace(saved, length=context))


@torch.inference_mode()
def draft_ms(report: Report, session: Session, context: int, rows: int) -> float:
    try:
        times = step_parts(session.engine, context, rows)
    except Exception as failure:
        report.check("time of the draft", False, failed=str(failure)[:200])
        return 0.0
    report.log("a whole step with the draft", context=context, rows=rows, **times)
    return times["draft_ms"]


PARTS = {"limited": limited, "unlimited": unlimited}


def ensure_pair(options: Options, shape: str) -> None:
    """Grow the pair where it is missing."""
    folder = options.folder
    if (folder / "target.gguf").exists() and (folder / "draft.gguf").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if not options.on_gpu:
        for source, name in zip(embedded_pair(), ("target.gguf", "draft.gguf"), strict=True):
            shutil.copy(source, folder / name)
        return
    begin = time.perf_counter()
    grow(folder, shape, force=True)
    print(f"grew {shape} in {time.perf_counter() - begin:.0f} s", flush=True)


@case(seconds=320)
def main(
    report: Report,
    *,
    folder: Path | None = None,
    limit: Annotated[float, "GiB of the whole device"] = 24,
    tokens: Annotated[int, "of the prompt"] = 200_000,
    shape: Annotated[str, "of the pair that is grown"] = "27b",
    only: Annotated[str, "parts, in their order"] = "limited,unlimited",
    part: Literal["limited", "unlimited"] | None = None,
) -> None:
    folder = folder or scratch_folder().with_name("bough-27b")
    options = Options(report.device, folder, int(limit * GIB), tokens)
    if part is None:
        ensure_pair(options, shape)
        shares = dict.fromkeys(only.split(","), math.inf)
        run_parts(
            report, "gpu.long_context", shares, "--folder", folder, "--limit", limit, "--tokens", tokens
        )
        return
    report.log(part, torch=torch.__version__)
    report.part(lambda report: PARTS[part](report, options), needs=10)
