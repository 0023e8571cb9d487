"""How many threads torch uses on a CPU: no more than other programs leave idle."""

import logging
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from bough.config import omp_threads
from bough.errors import UsageError

log = logging.getLogger(__name__)

SAMPLE_S = 0.1
_STAT = Path("/proc/stat")


def checked_threads(threads: int | None) -> int | None:
    """Return the setting; raise for more threads than there are CPUs."""
    cpus = len(_own_cpus())
    if threads is not None and not 1 <= threads <= cpus:
        raise UsageError(f"`threads` is {threads}, needed 1 to {cpus}, the CPUs of this process")
    return threads


@cache
def torch_threads(most: int) -> int:
    """Return how many threads torch should use: as many as there are idle CPUs now, at most `most`.

    Threads that wait for one without a CPU make a step tens of times slower. The number is chosen once: the
    last bits of float32 products depend on it. The user's OMP_NUM_THREADS is not changed.
    """
    idle = idle_cpus() if most > 1 and omp_threads() is None else None
    if idle is None or (count := threads_for(idle, most)) == most:
        return most
    cpus = len(_own_cpus())
    log.warning(
        "other programs keep %.1f of %d CPUs busy: using %d instead of %d threads; `threads` sets the number",
        *(cpus - idle, cpus, count, most),
    )
    return count


def threads_for(idle: float, most: int) -> int:
    return max(1, min(most, int(idle + 0.5)))


def idle_cpus(sleep: Callable[[float], None] = time.sleep, stat: Path = _STAT) -> float | None:
    """Return how many of this process's CPUs are idle, seen over SAMPLE_S; None: the system does not say."""
    try:
        before = _ticks(stat)
        sleep(SAMPLE_S)
        after = _ticks(stat)
    except (OSError, ValueError, IndexError):
        return None
    shares = []
    for cpu in _own_cpus() & before.keys() & after.keys():
        idle, total = (late - early for early, late in zip(before[cpu], after[cpu], strict=True))
        shares.append(idle / total if total > 0 else 1.0)
    return sum(shares) if shares else None


def _own_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _ticks(stat: Path) -> dict[int, tuple[int, int]]:
    """Return the idle and all ticks of each CPU since boot."""
    cores = {}
    for line in stat.read_text().splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(field) for field in fields[:8]]  # the rest are counted in these already
            cores[int(name[3:])] = (ticks[3] + ticks[4], sum(ticks))
    return cores
