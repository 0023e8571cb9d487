"""What benchmarks share: printed figures and JSON lines, the seconds that are left, times on a device."""

import json
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any


class Report:
    """Prints figures and appends each as a JSON line."""

    def __init__(
        self,
        out: Path | None,
        seconds: float = float("inf"),
        device: str = "cuda",
        folder: Path = Path(),
        settings: dict[str, Any] | None = None,
    ):
        self.failed = False
        self.out, self.device, self.folder = out, device, folder
        self.settings = settings or {}
        self._begin, self._seconds = time.perf_counter(), seconds
        self._file = out.open("a", encoding="utf-8") if out else None

    @cached_property
    def _source(self) -> dict[str, Any]:
        """What every line names."""
        return self.head("date", "commit", "command")

    @property
    def left(self) -> float:
        return self._seconds - (time.perf_counter() - self._begin)

    @property
    def spent(self) -> float:
        return time.perf_counter() - self._begin

    def head(self, *names: str) -> dict[str, Any]:
        """Return the facts of the machine and of this run, all of them or those named."""
        from bough.bench import machine

        facts = machine.head(self.settings, shlex.join(["python", "-m", "workshop", *sys.argv[1:]]))
        return {name: facts[name] for name in names or facts}

    def line(self, **facts: Any) -> None:
        """Print a result as it is written."""
        print(json.dumps(facts), flush=True)
        self.write(**facts)

    def check(self, name: str, passed: bool, **facts: Any) -> None:
        self.failed |= not passed
        print("PASS" if passed else "FAIL", name, facts or "", flush=True)
        self.write(check=name, passed=passed, **facts)

    def log(self, name: str, **facts: Any) -> None:
        print(f"[{self.spent:5.1f} s]", name, facts or "", flush=True)
        self.write(**{"what": name, **facts})

    def time(self, name: str, **facts: Any) -> None:
        print("TIME", name, facts, flush=True)
        self.write(time=name, **facts)

    def kernel_time(self, name: str, rows: int, us: float, **facts: Any) -> None:
        more = (f"{key} {value}" for key, value in facts.items())
        print(f"{name:34s} {rows:3d} rows {us:8.2f} us a layer", *more, flush=True)
        self.write(time=name, rows=rows, us=us, **facts)

    def write(self, **line: Any) -> None:
        if self._file:
            self._file.write(json.dumps(self._source | line) + "\n")  # at once: several threads may report
            self._file.flush()

    def part(self, run: Callable[["Report"], None], *, needs: float = 0.0) -> None:
        """Run a part if `needs` seconds are left; an exception fails this part only."""
        import torch

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
    import torch

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
    import torch

    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
