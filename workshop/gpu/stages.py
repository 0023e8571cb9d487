"""Stages of a long run on a rented machine: scripts in processes of their own, within a limit of time."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GRACE_S = 10  # from the end of a script's time until it is killed


class Stages:
    """Runs scripts of this repository; facts are lines of `results`, the scripts' output goes to `logs`."""

    def __init__(self, results: Path, logs: Path, seconds: float):
        self.logs, self._seconds = logs, seconds
        self._begin = time.perf_counter()
        self._results = results.open("a")
        self.failed = False

    @property
    def left(self) -> float:
        return self._seconds - (time.perf_counter() - self._begin)

    def log(self, what: str, **facts: Any) -> None:
        line = {"what": what, "at_s": round(time.perf_counter() - self._begin, 1), **facts}
        print(json.dumps(line), flush=True)
        print(json.dumps(line), file=self._results, flush=True)

    def start(self, name: str, *command: object) -> subprocess.Popen[bytes]:
        """Start a script; its output goes to a log."""
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONUNBUFFERED": "1"}
        with (self.logs / f"{name}.log").open("wb") as log:
            arguments = [sys.executable, *map(str, command)]
            return subprocess.Popen(
                arguments, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def wait(
        self,
        processes: dict[str, subprocess.Popen[bytes]],
        *,
        reserve: float = 0.0,
        good_codes: Collection[int] = (0,),
    ) -> bool:
        """Wait for all; end those that leave less than `reserve` seconds; return whether all succeeded."""
        good = True
        for name, process in processes.items():
            try:
                process.wait(max(1.0, self.left - reserve))
            except subprocess.TimeoutExpired:
                process.terminate()
                try:
                    process.wait(GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            tail = (self.logs / f"{name}.log").read_bytes()[-600:].decode(errors="replace")
            self.log(name, code=process.returncode, tail=tail if process.returncode else tail[-200:])
            good &= process.returncode in good_codes
        self.failed |= not good
        return good
