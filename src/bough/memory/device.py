"""Device selection, memory sizes and limits of a device, and the KV cache formats it supports."""

import gc
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from bough.config import pretended_card
from bough.errors import ResourceError, UsageError
from bough.kernels.kv_cache.format import BLOCK, FORMATS, KVFormat
from bough.memory.host import free_memory
from bough.models.spec import ModelSpec

KVFormats = tuple[KVFormat, KVFormat]  # of K and of V

TRITON_ON_WINDOWS = "pip install triton-windows, or run in WSL2"
CUDA_TORCH = (
    "pip install torch --index-url https://download.pytorch.org/whl/cu130 (cu126 for drivers before 580)"
)
# One of these is there where an NVIDIA driver is: on Linux, in WSL2, on Windows.
_DRIVERS = ("/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libcuda.so.1", "C:/Windows/System32/nvcuda.dll")
# Bytes that a process uses on a GPU outside torch's allocator. Where there is a GPU, the context is measured.
CUDA_CONTEXT = 512 << 20
# Bytes of a GPU that stay free for what other programs take later: a desktop's windows, a browser. On Windows
# and WSL2 the driver moves what does not fit to host memory, silently and ten times slower.
RESERVE, SHARED_RESERVE, WINDOWS_RESERVE = 256 << 20, 512 << 20, 1 << 30
_SHARED_SHARE = 0.03  # of a card that other programs use, at least
CUDA_LIBRARIES = 224 << 20  # cuBLAS workspaces, modules that are loaded later; 185 MiB measured on an H200


def pick_device(name: str) -> torch.device:
    """Return the device of this name; "auto" is CUDA where available, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ResourceError(f"`device` is {name!r}, needed auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ResourceError(f"`device` is {name!r}, {count} CUDA devices found", "bough doctor shows why")
    return device


def has_driver() -> bool:
    return any(Path(path).exists() for path in _DRIVERS)


def unused_gpu() -> str | None:
    """Return why an NVIDIA card that is here is not used, in a sentence; None: there is none, or it is."""
    if torch.cuda.is_available() or not has_driver():
        return None
    if torch.version.cuda is not None or torch.version.hip is not None:
        return (
            "an NVIDIA driver is here, but PyTorch finds no GPU, so the CPU computes: bough doctor says why"
        )
    return f"an NVIDIA driver is here, but this PyTorch has no CUDA, so the CPU computes: {cuda_torch()}"


def cuda_torch() -> str:
    return CUDA_TORCH + (", then pip install triton-windows" if platform.system() == "Windows" else "")


def triton_version() -> str | None:
    """Return the version of Triton, of whichever package it comes in; None if it cannot be imported."""
    try:
        import triton
    except ImportError:
        return None
    return getattr(triton, "__version__", "unknown")


def check_triton(device: torch.device) -> None:
    """Raise if a GPU is to be used and Triton, in which most kernels are written, is missing."""
    if device.type != "cuda" or triton_version() is not None:
        return
    windows = platform.system() == "Windows"
    raise ResourceError(
        "a GPU needs Triton, which is not installed",
        f"{TRITON_ON_WINDOWS if windows else 'pip install triton'}; `device` cpu runs without it",
    )


def device_name(device: torch.device, threads: int | None = None) -> str:
    """Return a device's name; of a CPU with the threads in use, None: torch's."""
    if device.type == "cuda":
        acting = pretended_card()
        return torch.cuda.get_device_name(device) + (f" as {acting}" if acting else "")
    return f"{platform.machine()} CPU, {threads or torch.get_num_threads()} threads"


def available_memory(device: torch.device) -> int:
    """Return the bytes that can be allocated now."""
    if device.type == "cuda":
        return cuda_memory(device)[0]
    free = free_memory()
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    # A container may have less than its machine: control groups, both versions.
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, usage = _read(limit_file).strip(), _read(usage_file).strip()
        if limit.isdigit() and usage.isdigit():
            free = min(free, max(0, int(limit) - int(usage)))
    return free


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The limit of a device's memory in bytes and how much of it is in use, over all processes."""

    limit: int
    in_use: int

    @property
    def free(self) -> int:
        return max(0, self.limit - self.in_use)


def memory_budget(device: torch.device, limit: int | None = None) -> MemoryBudget:
    """Return a device's budget; `limit` caps a GPU's, the CUDA context and other processes included."""
    if device.type != "cuda":
        if limit is not None:
            raise UsageError(
                f"`vram_limit` is for a GPU, the device is {device}",
                "leave it out; bough show with `fit` plans for a GPU of any size",
            )
        return MemoryBudget(available_memory(device), 0)
    gc.collect()  # an engine that was loaded before does not count
    torch.cuda.empty_cache()
    free, total = cuda_memory(device)  # creates the context, so that it counts as in use
    reserved = torch.cuda.memory_reserved(device)
    room = reserve(total, total - free - reserved - CUDA_CONTEXT)
    return MemoryBudget(total - room if limit is None else min(limit, total), total - free)


def cuda_memory(device: torch.device) -> tuple[int, int]:
    """Return the free and all bytes of a GPU; of one that shares the host's memory, what that has to give.

    The driver counts the host's page cache as in use: a file of 17 GB that was just read, for example.
    """
    free, total = torch.cuda.mem_get_info(device)
    if getattr(torch.cuda.get_device_properties(device), "is_integrated", False):
        free = max(free, min(total, available_memory(torch.device("cpu"))))
    return free, total


def reserve(total: int, others: int) -> int:
    """Return the bytes of a GPU that a plan leaves free; `others`: what other programs use now."""
    if platform.system() == "Windows" or "microsoft" in platform.release().lower():  # WSL2's kernel says so
        return WINDOWS_RESERVE
    return max(SHARED_RESERVE, int(_SHARED_SHARE * total)) if others > CUDA_CONTEXT // 4 else RESERVE


def assumed_budget(limit: int) -> MemoryBudget:
    """Return the budget of a GPU of this size that is not installed here and runs nothing else.

    The limit is all that may be used.
    """
    return MemoryBudget(limit, CUDA_CONTEXT)


def limit_allocator(budget: MemoryBudget, device: torch.device) -> None:
    """Make torch's CUDA allocator fail beyond the budget, also where that is the whole card.

    Else the drivers of Windows and WSL2 go on in host memory.
    """
    total = torch.cuda.mem_get_info(device)[1]
    # What torch holds already, for a scorer of prompts, is in use and not free, but it is torch's own.
    reserved = torch.cuda.memory_reserved(device)
    share = max(0, budget.free + reserved - CUDA_LIBRARIES) / total
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_per_process_memory_fraction(share, index)


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def kv_formats(spec: ModelSpec, device: torch.device, names: tuple[str, str] = ("auto", "auto")) -> KVFormats:
    """Return the KV cache formats of these names, checked against the model and the device."""
    settings = ("kv", "kv") if names[0] == names[1] else ("kv_k", "kv_v")
    k, v = (_kv_format(device, name, setting) for name, setting in zip(names, settings, strict=True))
    for format, setting in zip((k, v), settings, strict=True):
        if format.quantised and spec.head_dim % BLOCK:
            raise UsageError(
                f"{spec.name} has a head size of {spec.head_dim}, "
                f"a KV cache in {format.name} needs a multiple of {BLOCK}",
                "use `kv` f16",
                param=setting,
            )
    return k, v


def _kv_format(device: torch.device, name: str, setting: str) -> KVFormat:
    """Resolve "auto": f16 on a GPU; f32 on a CPU, where the output then does not depend on chunk sizes."""
    if name == "auto":
        name = "f16" if device.type == "cuda" else "f32"
    elif name not in FORMATS:
        raise UsageError(f"`{setting}` is {name!r}, needed one of {', '.join(FORMATS)}", param=setting)
    elif name == "f32" and device.type != "cpu":
        raise UsageError(
            f"`{setting}` is f32 on {device}, f32 is for a CPU", "use `kv` f16 or bf16", param=setting
        )
    return FORMATS[name]
