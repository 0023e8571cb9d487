"""The memory of this machine, and what the driver of its GPU says. Imports no torch."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence

_UNKNOWN = 8 << 30  # where the system does not say


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of Windows."""

    _fields_ = [
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("total", "free", "total_page", "free_page")),
        *((name, ctypes.c_uint64) for name in ("total_virtual", "free_virtual", "extended")),
    ]


def physical_memory() -> int:
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _windows().total or _UNKNOWN


def free_memory() -> int:
    """Return the bytes that can be allocated now, where /proc does not say."""
    if hasattr(os, "sysconf"):
        return physical_memory()
    return _windows().free or _UNKNOWN


def _windows() -> _MemoryStatus:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    if (windll := getattr(ctypes, "windll", None)) is not None:
        windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    return status


def nvidia_smi(fields: Sequence[str], *options: str) -> list[list[str]]:
    """Return what NVIDIA's driver says of each card, a text for each field; nothing where it says nothing."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, *options, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[value.strip() for value in line.split(",")] for line in answer.splitlines() if line.strip()]
