"""What the GPU scripts share: JSON lines, the seconds that are left, and times of CUDA graphs."""

import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Report:
    """Prints figures and appends each as a JSON line."""

    def __init__(
        self,
        out: Path | None,
        seconds: float = float("inf"),
        device: str = "cuda",
        folder: Path = Path(),
    ):
        self.failed = False
        self.device, self.folder = device, folder
        self._begin, self._seconds = time.perf_counter(), seconds
        self._out = out.open("a") if out else None

    @property
    def left(self) -> float:
        return self._seconds - (time.perf_counter() - self._begin)

    def check(self, name: str, passed: bool, **facts: Any) -> None:
        self.failed |= not passed
        print("PASS" if passed else "FAIL", name, facts or "", flush=True)
        self.write(check=name, passed=passed, **facts)

    def log(self, name: str, **facts: Any) -> None:
        print(f"[{time.perf_counter() - self._begin:5.1f} s]", name, facts or "", flush=True)
        self.write(**{"what": name, **facts})

    def time(self, name: str, **facts: Any) -> None:
        print("TIME", name, facts, flush=True)
        self.write(time=name, **facts)

    def kernel_time(self, name: str, rows: int, us: float, **facts: Any) -> None:
        more = (f"{key} {value}" for key, value in facts.items())
        print(f"{name:34s} {rows:3d} rows {us:8.2f} us a layer", *more, flush=True)
        self.write(time=name, rows=rows, us=us, **facts)

    def write(self, **line: Any) -> None:
        if self._out:
            self._out.write(json.dumps(line) + "\n")  # at once: several threads may report
            self._out.flush()

    def part(self, run: Callable[["Report"], None], *, needs: float = 0.0) -> None:
        """Run a part if `needs` seconds are left; an exception fails this part only."""
        if self.left < needs:
            self.log(f"{run.__name__} left out", seconds_left=round(self.left, 1))
            return
        try:
            run(self)
        except Exception:
            traceback.print_exc()
            self.check(f"{run.__name__} ran", False)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def graph_ms(work: Callable[[], object], *, repeats: int = 30) -> float:
    """Return the median time in milliseconds of a CUDA graph of `work`."""
    side = torch.cuda.Stream()
    # Page tables and lengths may still be being written.
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        graph.replay()
    return eager_ms(graph.replay, repeats=repeats)


def eager_ms(work: Callable[[], object], *, repeats: int = 5) -> float:
    """Return the median time in milliseconds of `work` between two events."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
