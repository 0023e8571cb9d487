"""The environment of a run: device, versions, commit, and the memory bandwidth that bounds plain decoding."""

import os
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import bough
from bough.engine.runner import Mark, StepClock
from bough.memory.device import device_name
from bough.session.session import Session


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
    return {
        "device": device_name(target.device, target.threads),
        "torch": version("torch"),
        "threads": target.threads,
        # Only one row of the embedding is read per token; a tied head is counted separately.
        "weights_bytes": session.plan.estimate.read_bytes(1),
        "read_bandwidth": read_bandwidth(target.device),
        "max_ctx": session.max_ctx,
    }


def read_bandwidth(device: torch.device) -> float:
    """Return bytes a second that a plain sum reads from memory."""
    count = (1 << 30) if device.type == "cuda" else (1 << 25)
    data = torch.ones(count, dtype=torch.float32, device=device)
    clock, times = StepClock(device), []
    for _ in range(6):
        clock.mark(Mark.FORWARD)
        data.sum()
        clock.mark(Mark.FORWARDED)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(clock.seconds(Mark.FORWARD, Mark.FORWARDED))
    return data.nbytes / min(times)


def _commit() -> str:
    """Return the checkout's commit, with a suffix if it was changed, or "installed"."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "installed"
    return answer.stdout.strip() or "installed"
