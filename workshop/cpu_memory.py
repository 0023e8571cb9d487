"""Peak memory and time of loading a model on a CPU, in this fresh process.

    python -m workshop cpu_memory [--model M.gguf] [--threads 2] [--max-ctx 2048] [--out FILE]

Without --model the embedded target is measured. A tiny model is loaded and run first: what the process takes
then (PyTorch, imports, native code) is the baseline. `over_baseline` is the peak (VmHWM) beyond it after a
load and a text of 64 tokens; `ratio` is that without the KV cache, as a multiple of the file, and
`ratio_without_text` also without the tokenizer and the template.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bough.config import EngineConfig
from bough.engine.engine import Request
from bough.gguf.reader import GGUFFile
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from bough.session.session import Session
from bough.text.tokenizer import Tokenizer
from workshop.case import TARGET, case
from workshop.report import Report
from workshop.tiny import make_tiny

PROMPT = "Count the words of this sentence. " * 40


@case()
def main(report: Report, *, model: Path = TARGET, threads: int = 2, max_ctx: int = 2048) -> None:
    torch.set_num_threads(threads)
    config = EngineConfig(
        "cpu", max_ctx, speculation=None, cpu_backend="native", threads=threads, prefix_cache=0
    )
    with tempfile.TemporaryDirectory() as folder:
        run(load_session(make_tiny(Path(folder, "tiny.gguf")), config))
    report.line(**report.head(), what="cpu_memory", **measure(model, config))


def measure(model: Path, config: EngineConfig) -> dict[str, Any]:
    model.read_bytes()  # from the page cache from now on
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    baseline = resident("VmRSS")
    start, cpu = time.perf_counter(), time.process_time()
    session = load_session(model, config)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    loaded = resident("VmHWM") - baseline
    run(session)
    over, size = resident("VmHWM") - baseline, model.stat().st_size / 2**20
    text = resident("VmRSS")
    with GGUFFile.open(model) as file:
        kept = Tokenizer.from_metadata(file.metadata)  # a second one, after the peak was read
    text = resident("VmRSS") - text
    del kept
    cache = sum(plane.nbytes for plane in session.engine.states.planes) / 2**20
    return {
        "load_s": seconds,
        "load_cpu_s": cpu,
        "baseline_mib": baseline,
        "loaded_mib": loaded,
        "over_baseline_mib": over,
        "text_mib": text,
        "file_mib": size,
        "cache_mib": cache,
        "ratio": (over - cache) / size,
        "ratio_without_text": (over - cache - text) / size,
    }


def run(session: Session) -> None:
    prompt = session.encode(TextRequest(messages=[{"role": "user", "content": PROMPT}]))
    for _ in session.engine.generate(Request(prompt=prompt, max_tokens=64)):
        pass


def resident(field: str) -> float:
    """Return a line of the process's status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))
