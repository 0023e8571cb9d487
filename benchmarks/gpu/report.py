"""What the GPU scripts print and write down: checks, figures, and the seconds that are left."""

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch


class Report:
    def __init__(self, out: Path | None, seconds: float, device: str, folder: Path):
        self.failed = False
        self.device, self.folder = device, folder
        self._begin, self._seconds = time.perf_counter(), seconds
        self._out = out.open("a") if out else None

    @property
    def left(self) -> float:
        return self._seconds - (time.perf_counter() - self._begin)

    def check(self, name: str, passed: bool, **facts) -> None:
        self.failed |= not passed
        print("PASS" if passed else "FAIL", name, facts or "", flush=True)
        self._write({"check": name, "passed": passed, **facts})

    def tell(self, name: str, **facts) -> None:
        print(f"[{self._seconds - self.left:5.1f} s]", name, facts or "", flush=True)
        self._write({"what": name, **facts})

    def part(self, run: Callable[["Report"], None], *, needs: float) -> None:
        if self.left < needs:
            self.tell(f"{run.__name__} left out", seconds_left=round(self.left, 1))
            return
        try:
            run(self)
        except Exception:
            traceback.print_exc()
            self.check(f"{run.__name__} ran", False)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _write(self, line: dict) -> None:
        if self._out:
            print(json.dumps(line), file=self._out, flush=True)
