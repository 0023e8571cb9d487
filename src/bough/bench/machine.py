"""The environment of a run: device, versions, commit, and the memory bandwidth that bounds plain decoding."""

import os
import statistics
import subprocess
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bough
from bough.memory.device import device_name
from bough.session.session import Session

SMALLEST, LARGEST = 64 << 20, 2 << 30  # bytes of the bandwidth test's buffer


def head(settings: dict[str, Any], command: str) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "bough": bough.__version__,
        "commit": _commit(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "cpus": os.cpu_count(),
        "settings": settings,
    }


def of_session(session: Session) -> dict[str, Any]:
    """Return a local session's header fields, with the weight bytes read per token and the bandwidth."""

    target = session.engine.target
    # Only one row of the embedding is read per token; a tied head is counted separately.
    weights = session.plan.estimate.read_bytes(1)
    return {
        "device": device_name(target.device, target.threads),
        "torch": version("torch"),
        "threads": target.threads,
        "weights_bytes": weights,
        "read_bandwidth": read_bandwidth(target.device, weights),
        "max_ctx": session.max_ctx,
    }


def read_bandwidth(device: Any, size: int) -> float:
    """Return the read bandwidth in bytes per second: the median of seven sums over a weight-sized buffer."""
    import torch

    buffer = torch.ones(min(max(size, SMALLEST), LARGEST) // 4, device=device)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        float(buffer.sum())
        times.append(time.perf_counter() - start)
    return buffer.nbytes / statistics.median(times[1:])


def _commit() -> str:
    """Return the checkout's commit, with a suffix if it was changed, or "installed"."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "installed"
    return answer.stdout.strip() or "installed"
