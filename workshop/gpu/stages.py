"""Stages of a long run on a rented machine: cases and their parts in processes of their own, and models."""

import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from workshop.case import DRAFT, TARGET, command, environment
from workshop.grow.grow import grow
from workshop.report import Report

GROWING_CORES = 12  # at most
GRACE_S = 10  # from the end of a script's time until it is killed


class Stages:
    """Runs cases; facts are lines of `results`, the output goes to `logs`."""

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

    def start(self, name: str, case: str, *arguments: object) -> subprocess.Popen[bytes]:
        """Start a case; its output goes to a log."""
        with (self.logs / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command(case, *arguments), env=environment(), stdout=log, stderr=subprocess.STDOUT
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


def run_parts(report: Report, name: str, shares: Mapping[str, float], *options: object) -> None:
    """Run each part of a case in its own process, so that a CUDA error ends one part only.

    shares: the seconds of each part at most.
    """
    for part, share in shares.items():
        seconds = min(report.left, share)
        line = command(name, "--part", part, "--seconds", seconds, "--device", report.device, *options)
        line += ["--out", str(report.out)] if report.out else []
        try:
            failed = subprocess.run(line, env=environment(), timeout=max(5.0, seconds + 20)).returncode
            report.failed |= bool(failed)
        except subprocess.TimeoutExpired:
            print("FAIL", part, "took too long", flush=True)
            report.failed = True
    print("FAIL" if report.failed else "PASS", "in all", flush=True)


def about_device(report: Report) -> dict[str, Any]:
    return {"torch": torch.__version__} | (
        {"gpu": torch.cuda.get_device_name()} if report.device == "cuda" else {}
    )


@contextlib.contextmanager
def growing(folder: Path, shape: str, names: Sequence[str]) -> Iterator[None]:
    """Grow models into an empty folder in another process meanwhile; `wait_for_model` waits for one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    cores = max(1, min(GROWING_CORES, len(os.sched_getaffinity(0)) - 3))
    spawned = multiprocessing.get_context("spawn")
    writer = spawned.Process(target=_write_models, args=(folder, shape, cores, names), daemon=True)
    writer.start()
    try:
        yield
    finally:
        writer.kill()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def grown_pair(
    report: Report, folder: Path | None, shape: str | None = "27b", *, random: bool = False
) -> Iterator[tuple[Path, Path]]:
    """Yield the pair in `folder`, else a grown one, for this time; without a shape the embedded one."""
    if folder is None and shape is None:
        yield TARGET, DRAFT
        return
    with tempfile.TemporaryDirectory(dir=scratch_folder().parent, prefix="bough-") as scratch:
        if folder is None:
            begin, folder = time.perf_counter(), Path(scratch)
            grown = grow(folder, shape, random=random, force=True)
            report.log(f"grew the {shape}", seconds=round(time.perf_counter() - begin, 1), bytes=grown.bytes)
        yield folder / "target.gguf", folder / "draft.gguf"


def guarded(report: Report, name: str, work: Callable[[], Any]) -> None:
    try:
        work()
    except Exception:
        traceback.print_exc()
        report.check(name, False)


def scratch_folder() -> Path:
    """Return a folder in memory, if there is room for both large models, else on disk."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 45e9
    return (memory if roomy else Path(tempfile.gettempdir())) / "bough-step"


def _write_models(folder: Path, shape: str, cores: int, names: Sequence[str]) -> None:
    """Grow models on the last `cores` cores, away from those that drive the GPU."""
    every = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, every[-cores:])
    for name in names:
        begin = time.perf_counter()
        part = folder / f"{name}.part"
        grown = grow(part, shape, random=name == "random", force=True)
        facts = {"seconds": round(time.perf_counter() - begin, 1), "bytes": grown.bytes}
        (part / "facts.json").write_text(json.dumps(facts))
        part.rename(folder / name)


def wait_for_model(report: Report, name: str) -> Path:
    """Return the folder of a model once it is written."""
    folder = report.folder / name
    while not folder.exists():
        if report.left < 15:
            raise TimeoutError(f"the {name} model is not written yet, and no time is left")
        time.sleep(0.2)
    report.log(f"grew the {name} 27b", **json.loads((folder / "facts.json").read_text()))
    return folder
