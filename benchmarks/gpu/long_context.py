"""A long text on a GPU: 27B shapes and 262,144 tokens within 24 GiB, the same without a limit, then steps.

PYTHONPATH=src python benchmarks/gpu/long_context.py --out long_context.jsonl [--folder PAIR] [--limit 24]

--folder: where target.gguf and draft.gguf of 27B shapes are, or will be once they are grown. Each part has a
process of its own, since a limit holds for a whole one. --device cpu tries all of it with the small pair.
"""

import argparse
import gc
import itertools
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from long_parts import DEPTHS, Peak, apart, arithmetic, needles, noise, stored, text_of
from report import Report
from step import NEAR_TIE, TREE, guarded, pair, place

from treeflash.bench.step import _Bench, read_bandwidth
from treeflash.config import DraftConfig, EngineConfig
from treeflash.convert.grow import grow
from treeflash.engine.engine import Done, Engine, Progress, Request, Tokens
from treeflash.engine.sampler import SamplingParams
from treeflash.kernels.attention import prefill
from treeflash.kernels.kv_cache.format import FORMATS
from treeflash.memory.estimate import kv_bytes_per_token
from treeflash.memory.planner import MemoryPlan
from treeflash.models.decoder import Decoder
from treeflash.session.loading import load_session
from treeflash.session.session import Session

GIB = 1 << 30
WHOLE = 262_144  # tokens that are asked for within the limit
SHOWN = SamplingParams(seed=1, logprobs=2)
WRITTEN = 64  # tokens behind the prompt
PAIRS = (("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q5_0"), ("q4_0", "q4_0"), ("tq3_0", "tq3_0"))
SHORT, USUAL = 256, 60_000
CONTEXTS = (SHORT, 32 << 10, USUAL, 64 << 10, 128 << 10, 256 << 10)
ROWS = (1, 24)
RATIO = 1.35  # of a tree's step behind 60K tokens to one behind a few


@dataclass(frozen=True)
class Options:
    device: str
    folder: Path
    limit: int
    tokens: int

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def kept(self) -> Path:
        """What the part with the limit leaves for the one without."""
        return self.folder / "limited.pt"


def load(report: Report, options: Options, peak: Peak, **settings: Any) -> Session:
    begin = time.perf_counter()
    config = EngineConfig(
        device=options.device,
        draft=DraftConfig(options.folder / "draft.gguf"),
        speculation=TREE,
        prefix_cache=0,
        **settings,
    )
    with peak:
        session = load_session(options.folder / "target.gguf", config, graphs=False)
    plan = session.plan
    report.tell("loaded", seconds=round(time.perf_counter() - begin, 1), plan=plan.line())
    report.tell("plan", parts_mib={name: size >> 20 for name, size in plan.parts.items()})
    if options.on_gpu:
        # Nobody else may call CUDA meanwhile; what it takes is still there behind it.
        report.check("captured", session.engine.capture())
        peak.look()
        compile_slices(session.engine)
        freed(session.engine.target.device)
        report.tell("ready", seconds=round(time.perf_counter() - begin, 1))
    return session


def compile_slices(engine: Engine) -> None:
    """A short text in slices as small as pages, so that the long one does not wait for their kernels."""
    plain, prefill.SLICE_BYTES = prefill.SLICE_BYTES, 1
    try:
        for _ in engine.generate(Request(prompt=list(range(300)), max_tokens=2, sampling=SHOWN)):
            pass
    finally:
        prefill.SLICE_BYTES = plain


def read(report: Report, engine: Engine, prompt: list[int], places: list[int], name: str) -> dict[str, Any]:
    """Prefill and what is written behind it."""
    request = Request(prompt=prompt, max_tokens=WRITTEN, sampling=SHOWN)
    found: dict[str, Any] = {"tokens": [], "gaps": []}
    begin, told = time.perf_counter(), 0.0
    for event in engine.generate(request):
        match event:
            case Progress(done, total):
                seconds = time.perf_counter() - begin
                if seconds - told > 5 or done == total:
                    told = seconds
                    report.tell("read", tokens=done, of=total, seconds=round(seconds, 1))
                if report.left < 5:
                    raise TimeoutError(f"read {done} of {total} tokens, and no time is left")
            case Tokens(ids, logprobs):
                if not found["tokens"]:
                    found["needles"] = needles(engine, places)
                found["tokens"] += ids
                found["gaps"] += [each.top[0][1] - each.top[1][1] for each in logprobs or ()]
            case Done(_, stats):
                report.tell(
                    f"{name}: speed",
                    prompt=len(prompt),
                    prefill_s=round(stats.ttft_s, 2),
                    prefill_tok_s=round(len(prompt) / stats.ttft_s),
                    decode_tok_s=round(stats.decode_tok_s, 1),
                    tokens_a_step=round(stats.step_tokens / max(1, stats.steps), 2),
                )
    report.check(f"{name}: text behind the prompt", 0 < len(found["tokens"]) <= WRITTEN)
    report.check(f"{name}: keys and values are numbers", bool(found["needles"].isfinite().all()))
    return found


def limited(report: Report, options: Options) -> None:
    """The planner's choice within the limit, and the most that is in use from first to last."""
    options.kept.unlink(missing_ok=True)
    peak = Peak(options.device)
    # A CPU has no such limit: there another format has something to compare.
    settings: dict[str, Any] = {"kv_k": "q8_0", "kv_v": "q5_0"}
    if options.on_gpu:
        settings = {"vram_limit": options.limit, "max_ctx": WHOLE}
    session = load(report, options, peak, **settings)
    plan = session.plan
    if options.on_gpu:
        report.check("the whole context", plan.max_ctx == WHOLE, context=plan.max_ctx)
        report.tell("loaded within", gib=round(peak.bytes / GIB, 3))
    count = min(options.tokens, plan.max_ctx - 2 * WRITTEN)
    prompt, places = text_of(session, count)
    with peak:
        found = read(report, session.engine, prompt, places, "limited")
    kept = {"prompt": prompt, "places": places, "kv": plan.kv, "chunk": plan.prefill_chunk}
    torch.save(found | kept, options.kept)
    if options.on_gpu:
        facts = {"peak_gib": round(peak.bytes / GIB, 3), "planned_gib": round(plan.total / GIB, 3)}
        seen = peak.looks > 100
        report.check("within the limit", seen and peak.bytes <= options.limit, looks=peak.looks, **facts)
        report.check("within the plan", seen and peak.bytes <= plan.total, **facts)


def unlimited(report: Report, options: Options) -> None:
    """The same text without the limit; steps; and, if there is time, how far 16 bits are from the choice."""
    session = load(report, options, Peak(options.device))
    other = torch.load(options.kept, weights_only=False) if options.kept.exists() else None
    # The draft's part is the same for every format; it is measured where it is.
    longest = USUAL if options.on_gpu else 500
    drafting = draft_ms(report, session, longest, ROWS[-1] if options.on_gpu else 8)
    target, plan = session.engine.target, session.plan
    session.engine = None  # its keys and values make room
    if other is not None:
        same = {"kv": other["kv"], "prefill_chunk": other["chunk"]}
        guarded(report, "the same", lambda: compare(report, target, other, "unlimited", **same))
    guarded(report, "steps", lambda: steps(report, options, target, plan, drafting))
    if other is not None and report.left > 20 + len(other["prompt"]) / 4000:
        guarded(report, "16 bits", lambda: compare(report, target, other, "16 bits", kv=plan.kv))


def freed(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def compare(report: Report, target: Decoder, other: dict[str, Any], label: str, **settings: Any) -> None:
    """Keys and values of the needles, and what is written; by steps of the root alone."""
    freed(target.device)
    engine = Engine(target, max_ctx=len(other["prompt"]) + 2 * WRITTEN, **settings)
    found = read(report, engine, other["prompt"], other["places"], label)
    same = settings["kv"] == other["kv"]
    for side, (name, format) in enumerate(zip(("keys", "values"), other["kv"], strict=True)):
        wanted, seen = found["needles"][:, side], other["needles"][:, side]
        # A grown model has layers and heads in which nothing happens.
        layers = [layer for layer in range(len(wanted)) if wanted[layer].norm() > 0]
        allowed = apart(stored(wanted[layers], format), wanted[layers])
        by_layer = [round(apart(seen[layer], wanted[layer]), 5) for layer in layers]
        report.tell(f"{label}: {name} by layer", format=format.name, layers=layers, errors=by_layer)
        for number, depth in enumerate(DEPTHS):
            error = apart(seen[layers, number], wanted[layers, number])
            # In other formats, layers behind the first see what the first made of them.
            limit = 1e-3 if same else 2 * allowed + 0.01
            facts = {"error": round(error, 6), "limit": round(limit, 5)}
            report.check(f"{label}: {name} at {depth:.0%} of the text", error <= limit, **facts)
    first, second = other["tokens"], found["tokens"]
    place = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    report.tell(f"{label}: gaps", smallest=sorted(round(gap, 4) for gap in found["gaps"])[:8])
    if place is None:
        report.check(f"{label}: the next tokens are equal", len(first) == len(second), tokens=len(second))
        return
    facts = {"place": place, "gap": round(found["gaps"][place], 5)}
    if same:
        report.check(f"{label}: the next tokens part at a near tie", facts["gap"] < NEAR_TIE, **facts)
    else:
        report.tell(f"{label}: the next tokens part", **facts)


def steps(report: Report, options: Options, target: Decoder, plan: MemoryPlan, drafting: float) -> None:
    """Every format's step behind pages of any numbers: what a step takes does not depend on them."""
    contexts = CONTEXTS if options.on_gpu else (SHORT, 500)
    rows = ROWS if options.on_gpu else (1, 8)
    bandwidth = read_bandwidth(target.device)
    rate = arithmetic() if options.on_gpu else 1e11
    report.tell("ceilings", read_tb_s=round(bandwidth / 1e12, 3), tflops=round(rate / 1e12))
    for names in PAIRS if options.on_gpu else (("f32", "f32"), ("q8_0", "q5_0")):
        if report.left < 12:
            report.tell("left out", format="/".join(names))
            continue
        label, formats = "/".join(dict.fromkeys(names)), (FORMATS[names[0]], FORMATS[names[1]])
        freed(target.device)
        begin = time.perf_counter()
        engine = Engine(
            target, max_ctx=contexts[-1] + 1024, max_rows=rows[-1], kv=formats, padded=options.on_gpu
        )
        if options.on_gpu:
            report.check(f"{label}: captured", engine.capture())
            noise(engine)
        found = {}
        for context, count in itertools.product(contexts, rows):
            ms = step_ms(engine, context, count)
            found[context, count] = ms
            moved = plan.weights - target.embed.data.nbytes + 2 * plan.recurrent
            moved += kv_bytes_per_token(target.spec, formats) * context
            spec = target.spec
            products = 4 * count * spec.heads * spec.head_dim * context * spec.attention_layers
            floors = [1e3 * moved / bandwidth, 1e3 * products / rate]
            report.tell(
                "step", format=label, context=context, rows=count, ms=round(ms, 3),
                floor_ms=round(max(floors), 3), times_the_floor=round(ms / max(floors), 2),
            )  # fmt: skip
        few, many = (drafting + found[context, rows[-1]] for context in (SHORT, min(USUAL, contexts[-1])))
        facts = {"ratio": round(many / few, 3), "ms": round(many, 3), "draft_ms": round(drafting, 3)}
        if label in ("f16", "q8_0") and options.on_gpu:
            report.check(f"{label}: a tree's step behind {USUAL:,} tokens", many / few <= RATIO, **facts)
        else:
            report.tell(f"{label}: a tree's step behind {USUAL:,} tokens", **facts)
        report.tell("format done", format=label, seconds=round(time.perf_counter() - begin, 1))
        del engine


@torch.inference_mode()
def step_ms(engine: Engine, context: int, rows: int) -> float:
    """Verify and walk; the draft, if there is one, goes before and does not count."""
    times = step_parts(engine, context, rows)
    return times["verify_ms"] + times["walk_ms"]


def step_parts(engine: Engine, context: int, rows: int, repeats: int = 7) -> dict[str, float]:
    bench = _Bench(engine, SHORT, rounds=repeats + 2)
    try:
        # As if the text before were longer: the pages are there, whatever is in them.
        states = engine.states
        states.lengths[0] = context
        states.buffers.lengths[0] = context
        states.reserve(0, repeats + 2 + 64)
        draft = getattr(engine.drafter, "_draft", None)
        if draft is not None:
            draft._buffers.lengths[0] = context
        return bench.times(rows, repeats)
    finally:
        bench.close()


@torch.inference_mode()
def draft_ms(report: Report, session: Session, context: int, rows: int) -> float:
    try:
        times = step_parts(session.engine, context, rows)
    except Exception as failure:
        report.check("the draft's part", False, failed=str(failure)[:200])
        return 0.0
    report.tell("a whole step with the draft", context=context, rows=rows, **times)
    return times["draft_ms"]


PARTS = {"limited": limited, "unlimited": unlimited}


def grown(options: Options, shape: str) -> bool:
    """Whether there is a pair; made where it is missing."""
    folder = options.folder
    if (folder / "target.gguf").exists() and (folder / "draft.gguf").exists():
        return True
    folder.mkdir(parents=True, exist_ok=True)
    if not options.on_gpu:
        shutil.copy(pair().target, folder / "target.gguf")
        shutil.copy(pair().draft, folder / "draft.gguf")
        return True
    begin = time.perf_counter()
    grow(folder, shape, force=True)
    print(f"grew {shape} in {time.perf_counter() - begin:.0f} s", flush=True)
    return True


def orchestrate(given: argparse.Namespace, options: Options) -> int:
    begin, failed = time.perf_counter(), 0
    grown(options, given.shape)
    for name in given.only.split(","):
        left = given.seconds - (time.perf_counter() - begin)
        command = [
            sys.executable,
            __file__,
            "--part",
            name,
            "--seconds",
            str(left),
            "--folder",
            str(options.folder),
        ]
        command += ["--device", options.device, "--limit", str(given.limit), "--tokens", str(options.tokens)]
        command += ["--out", str(given.out)] if given.out else []
        try:
            failed |= subprocess.run(command, timeout=max(5.0, left + 20)).returncode
        except subprocess.TimeoutExpired:
            print("FAIL", name, "took too long", flush=True)
            failed = 1
    print("FAIL" if failed else "PASS", "in all", flush=True)
    return int(bool(failed))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=320)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=place().with_name("treeflash-27b"))
    parser.add_argument("--limit", type=float, default=24, help="GiB of the whole device")
    parser.add_argument("--tokens", type=int, default=200_000, help="of the prompt")
    parser.add_argument("--shape", default="27b", help="of the pair that is grown")
    parser.add_argument("--only", default="limited,unlimited", help="parts, in their order")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    options = Options(given.device, given.folder, int(given.limit * GIB), given.tokens)
    if given.part is None:
        return orchestrate(given, options)
    report = Report(given.out, given.seconds, given.device, given.folder)
    report.tell(given.part, torch=torch.__version__)
    report.part(lambda report: PARTS[given.part](report, options), needs=10)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
