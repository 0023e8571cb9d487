"""Reports GPU memory in use and compares it with the plan, and times rows gathered from host memory.

    python -m workshop gpu.memory --out memory.jsonl [--folder DIR] [--limit 24]

--folder: target.gguf and draft.gguf of 27B shapes; without it they are grown, with random weights.
tests/gpu/test_memory.py checks that the plan holds.
"""

import gc
from pathlib import Path
from typing import Annotated

import torch

from bough.config import SpecConfig
from bough.engine.engine import Done, Progress, Request
from bough.kernels.gather_rows import gather_rows
from bough.memory.device import CUDA_CONTEXT
from tests.gpu.device_memory import in_use
from tests.gpu.inputs import DEVICE
from tests.gpu.texts import GREEDY, embedded_pair, load_session
from workshop.case import case
from workshop.gpu.stages import grown_pair
from workshop.report import Report, eager_ms

GIB = 1 << 30


def outside_torch(report: Report) -> None:
    """Report what a process takes outside torch's allocator; has to be the first part."""
    begin = in_use()
    half = torch.randn(4096, 4096, device=DEVICE, dtype=torch.float16)
    torch.mm(half, half, out_dtype=torch.float32)
    torch.nn.functional.silu(half).sum().item()
    libraries = in_use() - begin - torch.cuda.memory_reserved(DEVICE)
    report.log(
        "outside torch",
        context_mib=begin >> 20,
        supposed_mib=CUDA_CONTEXT >> 20,
        libraries_mib=libraries >> 20,
    )


def gather(report: Report) -> None:
    """Time embedding rows read from pinned host memory and from the device, in a CUDA graph."""
    table = torch.randint(0, 256, (248320, 2880), dtype=torch.uint8).pin_memory()
    on_device = table.to(DEVICE)
    for count in (8, 64, 2048):
        rows = torch.randint(0, len(table), (count,), device=DEVICE)
        for name, held in (("host", table), ("device", on_device)):
            gather_rows(held, rows)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                gather_rows(held, rows)
            times = []
            for _ in range(30):
                # Other rows each time, so that no cache holds them.
                rows.copy_(torch.randint(0, len(table), (count,)))
                times.append(1000 * eager_ms(graph.replay, repeats=1))
            report.log("gather", rows=count, table=name, median_us=round(sorted(times)[15], 1))


def small_plan(report: Report) -> None:
    plan = load_session(*embedded_pair(), graphs=False, speculation=SpecConfig()).plan
    report.log("plan of the small pair", line=plan.line(), parts=dict(plan.parts))


def large(report: Report, folder: Path, limit: int, tokens: int) -> None:
    """Report the memory in use of a 27B within a limit, from loading to the end of a long prompt."""
    gc.collect()
    torch.cuda.empty_cache()
    before, seen = in_use(), {}
    torch.cuda.reset_peak_memory_stats(DEVICE)

    def mark(name: str) -> None:
        seen[name] = in_use()
        report.log(
            name,
            in_use_gib=round(seen[name] / GIB, 3),
            allocated_gib=round(torch.cuda.memory_allocated(DEVICE) / GIB, 3),
            reserved_gib=round(torch.cuda.memory_reserved(DEVICE) / GIB, 3),
            peak_reserved_gib=round(torch.cuda.max_memory_reserved(DEVICE) / GIB, 3),
        )

    session = load_session(
        folder / "target.gguf", folder / "draft.gguf", graphs=False, max_ctx=None, speculation=SpecConfig(),
        vram_limit=limit or None,
    )  # fmt: skip
    plan, engine = session.plan, session.engine
    report.log("plan", line=plan.line(), parts_mib={name: size >> 20 for name, size in plan.parts.items()})
    mark("loaded")
    report.check("captured", engine.warmup.capture())
    torch.cuda.empty_cache()
    mark("captured")
    report.log(
        "steps", planned_mib=plan.parts["steps"] >> 20, taken_mib=(seen["captured"] - seen["loaded"]) >> 20
    )
    count = min(tokens, plan.max_ctx - 128)
    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(0, engine.target.spec.vocab_size, (count,), generator=generator).tolist()
    for event in engine.generate(Request(prompt=prompt, max_tokens=64, sampling=GREEDY)):
        match event:
            case Progress(done, total) if done in (total, engine.prefill_chunk):
                mark(f"{done} of {total} prompt tokens")
            case Done():
                report.log("speed", prefill_tok_s=round(count / event.stats.ttft_s))
    mark("generated")
    spare = plan.total - max(seen.values())
    report.log("outside the plan", before_mib=before >> 20, spare_mib=spare >> 20)


@case(seconds=90)
def main(
    report: Report,
    *,
    folder: Path | None = None,
    limit: Annotated[float, "GiB of the whole device; 0: all of it"] = 24,
    tokens: int = 16384,
) -> None:
    for part in (outside_torch, gather, small_plan):
        report.part(part, needs=10)
    with grown_pair(report, folder, random=True) as (target, _):
        report.part(lambda report: large(report, target.parent, int(limit * GIB), tokens), needs=20)
