"""What a run's figures depend on besides its settings: device, versions, the tree it came from, the floor."""

import os
import statistics
import subprocess
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import treeflash
from treeflash.gguf.reader import GGUFFile
from treeflash.memory.device import device_name
from treeflash.session.session import Session

SMALLEST, LARGEST = 64 << 20, 2 << 30  # bytes of the buffer that is read


def head(settings: dict[str, Any], command: str) -> dict[str, Any]:
    """Of a run with anything that answers."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "treeflash": treeflash.__version__,
        "commit": _commit(),
        "load": round(os.getloadavg()[0], 2),
        "cpus": os.cpu_count(),
        "settings": settings,
    }


def of_session(session: Session, path: Path) -> dict[str, Any]:
    """Of the machine that a session runs on; with the weights read for a token and how fast that can be."""
    import torch

    target = session.engine.target
    with GGUFFile.open(path) as file:
        # Of the embedding one row is read; a tied head is counted as a copy of its own.
        weights = session.plan.weights - file.tensors["token_embd.weight"].nbytes
    return {
        "device": device_name(target.device),
        "torch": version("torch"),
        "threads": torch.get_num_threads(),
        "weights_bytes": weights,
        "read_bandwidth": read_bandwidth(target.device, weights),
        "max_ctx": session.max_ctx,
    }


def read_bandwidth(device: Any, size: int) -> float:
    """Bytes a second while a buffer as large as the weights is added up; the median of seven."""
    import torch

    buffer = torch.ones(min(max(size, SMALLEST), LARGEST) // 4, device=device)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        float(buffer.sum())
        times.append(time.perf_counter() - start)
    return buffer.nbytes / statistics.median(times[1:])


def _commit() -> str:
    """Of the checkout this runs from, and whether it was changed; else that it was installed."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "installed"
    return found.stdout.strip() or "installed"
