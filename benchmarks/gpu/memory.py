"""What a GPU's memory is used for, beside what the plan says; the token embedding in the host's memory.

PYTHONPATH=src python benchmarks/gpu/memory.py --out memory.jsonl [--folder GROWN] [--limit 24] [--tokens N]

--folder: target.gguf and draft.gguf of 27B shapes; without it they are grown, with random weights.
--device cpu tries the small parts.
"""

import argparse
import gc
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from report import Report
from step import GREEDY, pair

from treeflash.config import DraftConfig, EngineConfig
from treeflash.convert.grow import grow
from treeflash.engine.engine import Done, Engine, Progress, Request, Tokens
from treeflash.gguf.reader import GGUFFile
from treeflash.kernels.gather_rows import gather_rows
from treeflash.memory.device import CUDA_CONTEXT, CUDA_LIBRARIES
from treeflash.models.decoder import Decoder
from treeflash.models.measure import held_bytes
from treeflash.session.loading import load_session

GIB = 1 << 30
# What the plan counts to the byte, as it is held once an engine is made and before a step runs.
EXACT = ("weights", "token embedding", "draft", "draft context", "recurrent states", "tree rows", "sampling")
EXACT = (*EXACT, "keys and values", "products")


def in_use(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def outside(report: Report, device: torch.device) -> None:
    """What a process takes outside torch's allocator: has to be the first part."""
    begin = in_use(device)
    half = torch.randn(4096, 4096, device=device, dtype=torch.float16)
    torch.mm(half, half, out_dtype=torch.float32)
    torch.nn.functional.silu(half).sum().item()
    torch.cuda.synchronize()
    libraries = in_use(device) - begin - torch.cuda.memory_reserved(device)
    report.tell(
        "outside torch",
        context_mib=begin >> 20,
        supposed_mib=CUDA_CONTEXT >> 20,
        libraries_mib=libraries >> 20,
    )
    report.check(
        "libraries take no more than is allowed for", libraries <= CUDA_LIBRARIES, seen=libraries >> 20
    )


def rows_from_the_host(report: Report, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    on_gpu = device.type == "cuda"
    for width, shape in itertools.product((1, 34, 36, 2880, 4104), ((1,), (2, 3), (64,), (2048,))):
        table = torch.randint(0, 256, (5000, width), dtype=torch.uint8, generator=generator)
        rows = torch.randint(0, 5000, shape, generator=generator)
        held = table.pin_memory() if on_gpu else table
        found = gather_rows(held, rows.to(device)).cpu()
        report.check(f"rows of {width} bytes, {list(shape)}", torch.equal(found, table[rows]))
    if not on_gpu:
        return
    table = torch.randint(0, 256, (248320, 2880), dtype=torch.uint8, generator=generator).pin_memory()
    beside = table.to(device)
    for count in (8, 64, 2048):
        rows = torch.randint(0, len(table), (count,), device=device)
        for name, held in (("host", table), ("device", beside)):
            gather_rows(held, rows)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = gather_rows(held, rows)
            times = []
            for _ in range(30):
                # Other rows each time, so that no cache has them.
                rows.copy_(torch.randint(0, len(table), (count,)))
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                times.append(1000 * begin.elapsed_time(end))
            same = torch.equal(found.cpu(), table[rows.cpu()])
            report.check(f"{count} rows from the {name} in a graph", same)
            report.tell("gather", rows=count, table=name, median_us=round(statistics.median(times), 1))


def written(engine: Engine, prompt: list[int], count: int) -> list[int]:
    events = engine.generate(Request(prompt=prompt, max_tokens=count, sampling=GREEDY))
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


def same_text(report: Report, device: torch.device) -> None:
    """The small pair's target with its embedding here and there."""
    prompt, texts = list(range(100, 400)), []
    for host in (False, True):
        with GGUFFile.open(pair().target) as file:
            target = Decoder.load(file, device=device, host_embedding=host)
        engine = Engine(target, max_ctx=1024)
        report.check("captured", engine.capture())
        report.check("the embedding is where it should be", target.embed.data.is_cuda != host)
        texts.append(written(engine, prompt, 64))
    report.check(
        "an embedding in host memory gives the same text", texts[0] == texts[1], tokens=len(texts[0])
    )


def small_plan(report: Report, device: torch.device) -> None:
    files = pair()
    config = EngineConfig(device=str(device), draft=DraftConfig(files.draft), max_ctx=2048)
    session = load_session(files.target, config, graphs=False)
    report.tell("plan of the small pair", line=session.plan.line(), parts=dict(session.plan.parts))
    target = session.engine.target
    held = held_bytes(target)
    report.check(
        "weights are as planned", held == session.plan.weights, held=held, planned=session.plan.weights
    )


def large(report: Report, device: torch.device, folder: Path, limit: int, tokens: int) -> None:
    """27B shapes within a limit: what is used when, and that decoding works at the end of a long prompt."""
    gc.collect()
    torch.cuda.empty_cache()
    before, held, seen = in_use(device), torch.cuda.memory_allocated(device), {}
    torch.cuda.reset_peak_memory_stats(device)
    config = EngineConfig(
        device=str(device), draft=DraftConfig(folder / "draft.gguf"), vram_limit=limit or None
    )

    def mark(name: str) -> None:
        torch.cuda.synchronize()
        seen[name] = in_use(device)
        report.tell(
            name,
            in_use_gib=round(seen[name] / GIB, 3),
            allocated_gib=round(torch.cuda.memory_allocated(device) / GIB, 3),
            reserved_gib=round(torch.cuda.memory_reserved(device) / GIB, 3),
            peak_reserved_gib=round(torch.cuda.max_memory_reserved(device) / GIB, 3),
        )

    session = load_session(folder / "target.gguf", config, graphs=False)
    plan, engine = session.plan, session.engine
    report.tell("plan", line=plan.line(), parts_mib={name: size >> 20 for name, size in plan.parts.items()})
    mark("loaded")
    planned = sum(size for name, size in plan.parts.items() if name in EXACT)
    allocated = torch.cuda.memory_allocated(device) - held
    close = abs(allocated - planned) <= 0.005 * planned
    report.check("tensors are as planned", close, allocated=allocated, planned=planned)
    report.check("captured", engine.capture())
    torch.cuda.empty_cache()
    mark("captured")
    report.tell(
        "steps", planned_mib=plan.parts["steps"] >> 20, taken_mib=(seen["captured"] - seen["loaded"]) >> 20
    )
    count = min(tokens, plan.max_ctx - 128)
    vocabulary = engine.target.spec.vocab_size
    prompt = torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(7)).tolist()
    found: list[int] = []
    for event in engine.generate(Request(prompt=prompt, max_tokens=64, sampling=GREEDY)):
        match event:
            case Progress(done, total) if done in (total, engine._chunk):
                mark(f"read {done} of {total}")
            case Tokens():
                found += event.ids
            case Done():
                report.tell("speed", prefill_tok_s=round(count / event.stats.ttft_s))
    mark("written")
    report.check("64 tokens behind the prompt", 0 < len(found) <= 64, tokens=len(found), prompt=count)
    most = max(seen.values())
    report.check("no more in use than planned", most <= plan.total, used=most, planned=plan.total)
    report.check("no more in use than allowed", most <= plan.budget.limit, used=most, limit=plan.budget.limit)
    report.tell("beside the model", before_mib=before >> 20, spare_mib=(plan.total - most) >> 20)


def part(work: Callable[..., object], *given: object) -> Callable[[Report], None]:
    def run(report: Report) -> None:
        work(report, *given)

    run.__name__ = work.__name__
    return run


def growing(report: Report, folder: Path) -> None:
    grown = grow(folder, "27b", random=True)
    report.tell("grew the 27b", bytes=grown.bytes)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--limit", type=float, default=24, help="GiB of the whole device; 0: all of it")
    parser.add_argument("--tokens", type=int, default=16384)
    given = parser.parse_args()
    device = torch.device(given.device)
    with tempfile.TemporaryDirectory() as folder:
        report = Report(given.out, given.seconds, given.device, Path(folder))
        if device.type == "cuda":
            report.part(part(outside, device), needs=5)
        for work in (rows_from_the_host, small_plan):
            report.part(part(work, device), needs=10)
        if device.type == "cuda":
            report.part(part(same_text, device), needs=10)
            grown = given.folder or Path(folder)
            if given.folder is None:
                report.part(part(growing, grown), needs=40)
            report.part(part(large, device, grown, int(given.limit * GIB), given.tokens), needs=20)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
