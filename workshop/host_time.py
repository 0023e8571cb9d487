"""What the host does for a sequence in a step of many: microseconds and Python calls.

    python -m workshop host_time [--sequences 64] [--steps 200]

A tiny random model decodes; then the forward pass and the acceptance of one step are replayed as they are, so
that nothing is left but the engine's own work. Prints a JSON line: the least and the median of the steps.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bough.engine.engine import Engine, Request
from bough.engine.sampler import SamplingParams
from bough.engine.sequence import Phase
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from workshop.case import case
from workshop.report import Report
from workshop.tiny import make_tiny


def replaying_engine(path: Path, sequences: int, steps: int) -> Engine:
    """Return an engine of decoding sequences, whose device work is that of one step, again and again."""
    tokens = 4 * sequences + steps  # the first ones decode while the others' prompts are processed
    with GGUFFile.open(path) as file:
        engine = Engine(Decoder.load(file), max_ctx=16 + tokens, slots=sequences, max_rows=16)
    for index in range(sequences):
        sampling = SamplingParams(seed=index)
        engine.add(Request([index + 1] * 4, max_tokens=tokens, sampling=sampling, may_stop=False))
    while engine._scheduler.waiting or any(each.phase is Phase.PREFILL for each in engine._scheduler.running):
        engine.step()
    engine.step()
    assert engine.running == sequences
    runner: Any = engine.runner
    with torch.inference_mode():
        forward = runner._run_forward(sequences, sequences)
        acceptance = runner._run_accept(forward)
    runner._run_forward = lambda capacity, size: forward
    runner._run_accept = lambda forward: acceptance
    return engine


def calls_of_a_step(engine: Engine) -> int:
    """Return the calls of Python functions in one step."""
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return count


@case()
def main(report: Report, *, sequences: int = 64, steps: int = 200) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(Path(folder) / "tiny.gguf", family="qwen35", layers=4)
        engine = replaying_engine(Path(folder) / "tiny.gguf", sequences, steps)
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        times.append(1e6 * (time.perf_counter() - begin) / sequences)
    calls = calls_of_a_step(engine) / sequences
    found = {"least_us": round(min(times), 2), "median_us": round(statistics.median(times), 2)}
    report.line(sequences=sequences, **found, calls=round(calls, 1))
