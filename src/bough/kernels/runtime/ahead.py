"""Compiles the kernels that a model will launch ahead of use, in threads, while its weights are being read.

NVRTC, LLVM and ptxas run outside Python's global lock. Nothing here can fail a start: what could not be
compiled ahead is named in a warning and compiled when it is launched; the self-check of a first start then
replaces it.
"""

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol, Self

import torch

from bough.config import kernel_choice
from bough.kernels import runtime
from bough.kernels.runtime.backends import reason_of
from bough.kernels.runtime.device import kind_of
from bough.kernels.runtime.driver import driver_version
from bough.kernels.runtime.dry_run import DryRun
from bough.kernels.runtime.launchers import load_in_turn, settle_keys
from bough.kernels.runtime.nvrtc import cache_folder, nvrtc_version

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # kernels done, kernels in all


def cores() -> int:
    """Return how many cores this process may use."""
    usable = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(usable(0)) if usable else os.cpu_count() or 1


class KernelChecks(Protocol):
    """The self-check of a model's kernels."""

    def begin(self, path: Path) -> None: ...

    def rehearse(self) -> None: ...

    def decide(self) -> None: ...


class CompileAhead:
    """Finds the kernels by a dry run and compiles them; a context, which ends what has not begun."""

    def __init__(
        self,
        rehearse: Callable[[], object],
        device: torch.device,
        *,
        facts: str,
        check: KernelChecks | None = None,
    ):
        """`rehearse`: runs on tensors without memory; `facts`: of the model, what decides its kernels."""
        self._device, self._check = device, check
        self._marker = cache_folder() / f"{_digest(facts, device)}.compiled"
        if check is not None:
            check.begin(self._marker.with_suffix(".checked"))
        load_in_turn()  # before any other thread launches a kernel
        settle_keys()
        self._pool = ThreadPoolExecutor(cores(), thread_name_prefix="compile")
        self._count = threading.Condition()
        self._done, self._total, self._failed = 0, 0, False
        self._failures: dict[str, str] = {}  # reasons by kernel
        self._listed = self._marker.is_file()  # an earlier run compiled them all
        if not self._listed:
            self._pool.submit(self._list, rehearse)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def wait(self, progress: Progress | None = None) -> None:
        """Wait until all kernels are compiled; report how many are."""
        shown, finished = (0, 0), False
        while not finished:
            with self._count:
                self._count.wait_for(lambda seen=shown: self._finished or self._counts != seen)
                shown, finished = self._counts, self._finished
            if progress is not None and shown[1]:
                progress(*shown)
        if self._failures:
            (name, reason), *others = self._failures.items()
            more = f", nor could {len(others)} others" if others else ""
            log.warning("%s could not be compiled: %s%s", name, reason, more)
        elif shown[1] and not self._failed:
            _touch(self._marker)

    def check(self) -> None:
        """Run the kernels of a first start against their references, once they are compiled."""
        if self._check is not None:
            self._check.decide()

    @property
    def _counts(self) -> tuple[int, int]:
        return self._done, self._total

    @property
    def _finished(self) -> bool:
        return self._listed and self._done == self._total

    def _list(self, rehearse: Callable[[], object]) -> None:
        """Record the launches of a dry run, and have them compiled."""
        work: list[tuple[str, Callable[[], object]]] = []
        try:
            with DryRun(self._device) as listed:
                rehearse()
                if self._check is not None:
                    self._check.rehearse()
            for launch in listed.launches:
                launch.touch(self._device)
            # Triton's first: the longest of them takes as long as several of the others.
            work = [(launch.name, partial(launch.load, self._device)) for launch in listed.launches]
            work += [(f"the CUDA C++ kernel {module.names}", module.load) for module in listed.modules]
        except Exception:
            self._failed = True
            log.warning("kernels are compiled when they are launched, which takes longer", exc_info=True)
        with self._count:
            self._listed, self._total = True, len(work)
            self._count.notify_all()
        for name, build in work:
            self._pool.submit(self._build, name, build)

    def _build(self, name: str, build: Callable[[], object]) -> None:
        try:
            build()
        except Exception as error:
            log.debug("%s could not be compiled", name, exc_info=True)
            self._failures[name] = reason_of(error)
        with self._count:
            self._done += 1
            self._count.notify_all()


def _digest(facts: str, device: torch.device) -> str:
    """Return a hash of all that decides which kernels there are, and their code."""
    import triton

    folder = Path(runtime.__path__[0]).parent
    files = sorted(path for kind in ("*.py", "*.cu") for path in folder.rglob(kind))
    sources = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    versions = (triton.__version__, torch.__version__, nvrtc_version(), kind_of(device), driver_version())
    return hashlib.sha256(repr((facts, sources, versions, kernel_choice())).encode()).hexdigest()


def _touch(path: Path) -> None:
    # A disk that cannot be written only costs another dry run.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError:
        return
