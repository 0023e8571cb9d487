"""Measures how long a start takes on a GPU, by phase, and whether the first answer is as fast as the tenth.

    python -m workshop gpu.start --out start.jsonl [--folder DIR] [--disk DIR]

Each start is a process of its own: the small pair with empty caches and again, a grown 27B from the page
cache with its kernels not yet compiled and again. --folder: target.gguf and draft.gguf of 27B shapes, in the
page cache; without it they are grown, in memory. --disk: a folder on a disk, to which the 27B is copied for a
start from a cold file. --device cpu --only small is a trial run.
"""

import json
import logging
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

from workshop.case import case, command, environment
from workshop.report import Report

FIRST_EVER_S, READY_S, COLD, SLOWER = 25.0, 10.0, 1.3, 0.05  # what is asked for
ANSWERS, TOKENS = 10, 64
PROMPT = "Write a Python function that returns the sum of the even numbers of a list."
_PIECE = 64 << 20


def start(target: Path, draft: Path, device: str, began: float, shortlist: int | None) -> dict[str, Any]:
    """Load a model in this process and answer ten times; `began`: when the process was started."""
    import torch

    from bough.config import DraftConfig, EngineConfig
    from bough.session.loading import load_session
    from tests.gpu.texts import generate

    facts: dict[str, Any] = {"imports_s": time.time() - began}
    # Why kernels were not compiled ahead.
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("bough.kernels.runtime.ahead").setLevel(logging.DEBUG)
    on_gpu, peak = device == "cuda", None
    if on_gpu:
        from tests.gpu.device_memory import PeakMemory

        torch.cuda.init()
        peak = PeakMemory()
        peak.__enter__()
    compiled: list[int] = []
    proposing = DraftConfig(draft, shortlist=shortlist)
    config = EngineConfig(device, draft=proposing, prefix_cache=0)
    session = load_session(target, config, compiling=lambda done, total: compiled.append(total))
    facts |= {"ready_s": time.time() - began, "phases_s": dict(session.load_seconds)}
    facts["compiled_ahead"] = compiled[-1] if compiled else 0
    answers = [generate(session, PROMPT, max_tokens=TOKENS).stats]
    facts["answered_s"] = time.time() - began
    answers += [generate(session, PROMPT, max_tokens=TOKENS).stats for _ in range(ANSWERS - 1)]
    facts["acceptance"] = [stats.acceptance_length for stats in answers]
    facts["steps_ms"] = {
        rows: {"draft": 1000 * each.draft_s, "verify": 1000 * each.verify_s}
        for rows, each in session.engine.warmup.measure_steps().items()
    }
    facts["tok_s"] = [stats.decode_tok_s for stats in answers]
    facts["ttft_ms"] = [1000 * stats.ttft_s for stats in answers]
    facts["draft_share"] = [stats.draft_s / (stats.draft_s + stats.verify_s) for stats in answers]
    if peak is not None:
        peak.__exit__()
        facts |= {"peak_bytes": peak.bytes, "planned_bytes": session.plan.total}
        facts["captured"] = session.engine.runner.captured
    return facts


class Starts:
    """Starts models in processes of their own, with caches in a folder of this run."""

    def __init__(self, report: Any, scratch: Path, device: str):
        self._report, self._scratch, self._device = report, scratch, device

    def __call__(
        self, name: str, target: Path, draft: Path, *, shortlist: int | None = None
    ) -> dict[str, Any]:
        caches = {
            "TRITON_CACHE_DIR": str(self._scratch / "triton"),
            "CUDA_CACHE_PATH": str(self._scratch / "cuda"),
            "XDG_CACHE_HOME": str(self._scratch / "cache"),
        }
        line = command("gpu.start", "--target", target, "--draft", draft, "--device", self._device)
        line += ["--began", str(time.time()), *(["--shortlist", str(shortlist)] if shortlist else [])]
        done = subprocess.run(
            line, env=environment() | caches, stdout=subprocess.PIPE, text=True, timeout=170, check=True
        )
        facts = json.loads(done.stdout.splitlines()[-1])
        self._report.time(name, **rounded(facts))
        tenth = statistics.median(facts["tok_s"][-3:])
        self._report.check(
            f"{name}: the first answer as fast as the tenth",
            facts["tok_s"][0] >= (1 - SLOWER) * tenth,
            first=round(facts["tok_s"][0], 1),
            tenth=round(tenth, 1),
        )
        if "peak_bytes" in facts:
            within = facts["peak_bytes"] <= facts["planned_bytes"]
            self._report.check(f"{name}: memory as planned", within)
            self._report.check(f"{name}: captured", facts["captured"])
        return facts


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def small(report: Any, begin: Starts) -> None:
    """Start the small pair with empty caches, and again."""
    from tests.gpu.texts import embedded_pair

    first = begin("small pair, first run ever", *embedded_pair())
    report.check("first run ever", first["ready_s"] <= FIRST_EVER_S, seconds=round(first["ready_s"], 1))
    begin("small pair, second run", *embedded_pair())


def large(report: Any, begin: Starts, folder: Path, shortlist: int | None) -> None:
    """Start a 27B from the page cache, its kernels not yet compiled, and again."""
    pair = folder / "target.gguf", folder / "draft.gguf"
    read_through(pair[0])
    begin("27B, kernels not compiled yet", *pair)
    again = begin("27B, second run", *pair)
    report.check("27B from the page cache", again["ready_s"] <= READY_S, seconds=round(again["ready_s"], 1))
    if shortlist is not None:
        begin(f"27B, drafts of {shortlist} tokens", *pair, shortlist=shortlist)


def cold(report: Any, begin: Starts, folder: Path, disk: Path) -> None:
    """Start a 27B from a file that is not in the page cache, beside the time of a plain read of it."""
    shutil.copy(folder / "target.gguf", disk / "target.gguf")
    drop(disk / "target.gguf")
    seconds = read_through(disk / "target.gguf")
    drop(disk / "target.gguf")
    found = begin("27B from a cold file", disk / "target.gguf", folder / "draft.gguf")
    reading = found["phases_s"]["reading"]
    report.check(
        "reading a cold file",
        reading <= COLD * seconds,
        reading_s=round(reading, 2),
        disk_s=round(seconds, 2),
    )


def read_through(path: Path) -> float:
    """Read a file once, in order; return the seconds."""
    begin, buffer = time.perf_counter(), bytearray(_PIECE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - begin


def drop(path: Path) -> None:
    """Remove a file from the page cache."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@case(seconds=170)
def main(
    report: Report,
    *,
    only: Annotated[str, "parts"] = "small,large",
    shape: Annotated[str, "of the large model: 27b, or double for a trial"] = "27b",
    folder: Path | None = None,
    disk: Path | None = None,
    target: Annotated[Path | None, "start this one, and nothing else"] = None,
    draft: Path | None = None,
    shortlist: Annotated[int | None, "another start of the 27B, drafts that rank this many tokens"] = None,
    began: float = 0.0,
) -> None:
    if target is not None and draft is not None:
        print(json.dumps(start(target, draft, report.device, began, shortlist)), flush=True)
        return
    import torch

    from workshop.grow.grow import grow

    settings = {"torch": torch.__version__, "tokens": TOKENS, "shape": shape}
    report.write(**report.head() | {"settings": settings})
    memory = Path("/dev/shm")
    scratch = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None, prefix="bough-start-"))
    begin = Starts(report, scratch, report.device)
    try:
        report.part(lambda report: small(report, begin))
        if "large" in only:
            grown = folder or scratch
            if folder is None:
                clock = time.perf_counter()
                grow(scratch, shape, force=True)
                report.log("grown", seconds=round(time.perf_counter() - clock, 1))
            report.part(lambda report: large(report, begin, grown, shortlist), needs=30)
            if disk is not None:
                report.part(lambda report: cold(report, begin, grown, disk), needs=60)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
