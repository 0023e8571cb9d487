"""Which device there is, how much memory it has, and in which formats it keeps keys and values."""

import gc
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from treeflash.errors import ResourceError, UsageError
from treeflash.kernels.kv_cache.format import BLOCK, FORMATS, KVFormat
from treeflash.models.spec import ModelSpec

# What a process takes of a GPU outside torch's allocator. Where there is a GPU the first is measured.
CUDA_CONTEXT = 512 << 20
CUDA_LIBRARIES = 224 << 20  # workspaces of cuBLAS, machine code that is loaded later; 185 MiB seen on an H200


def pick_device(name: str) -> torch.device:
    """auto: a CUDA device when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ResourceError(f"device {name!r} is not known", "use --device auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ResourceError(
                f"device {name!r} asked for, {count} CUDA devices found", "treeflash doctor shows why"
            )
    return device


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def available_memory(device: torch.device) -> int:
    """Bytes that can be taken now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    # A container may have less than its machine: control groups, both versions.
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, taken = _read(limit).strip(), _read(used).strip()
        if most.isdigit() and taken.isdigit():
            free = min(free, max(0, int(most) - int(taken)))
    return free


def total_memory(device: torch.device) -> int:
    """Bytes of a GPU, whoever uses them; of a CPU's machine, those that can be taken now."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return available_memory(device)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of a device that may be in use, by everyone together, and those that are."""

    limit: int
    taken: int

    @property
    def free(self) -> int:
        return max(0, self.limit - self.taken)


def room_on(device: torch.device, limit: int | None = None) -> Room:
    """`limit`: count on no more of a GPU than this, what others and CUDA itself take included."""
    if device.type != "cuda":
        if limit is not None:
            raise UsageError(
                f"--vram-limit is for a GPU, the device is {device}",
                "leave it out; treeflash show MODEL --fit plans for a GPU that is not here",
            )
        return Room(available_memory(device), 0)
    gc.collect()  # what an engine before this one had does not count
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)  # makes the context, so that it is among what is taken
    return Room(total if limit is None else min(limit, total), total - free)


def supposed_room(limit: int) -> Room:
    """A GPU of that size which is not here, with nothing on it but us."""
    return Room(limit, CUDA_CONTEXT)


def hold_to(room: Room, device: torch.device) -> None:
    """Makes torch fail rather than take more of a GPU than the room has."""
    total = torch.cuda.mem_get_info(device)[1]
    if room.limit < total:
        share = max(0, room.free - CUDA_LIBRARIES) / total
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_per_process_memory_fraction(share, index)


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _kv_format(device: torch.device, name: str) -> KVFormat:
    """auto: float32 on a CPU, whose text is then the same however it is cut into steps; else f16."""
    if name == "auto":
        name = "f16" if device.type == "cuda" else "f32"
    elif name not in FORMATS:
        raise UsageError(f"keys or values in {name!r}, needed one of {', '.join(FORMATS)}")
    elif name == "f32" and device.type != "cpu":
        raise UsageError(f"keys or values in f32 on {device}, f32 is for a CPU", "use --kv f16 or bf16")
    return FORMATS[name]


def kv_pair(
    spec: ModelSpec, device: torch.device, names: tuple[str, str] = ("auto", "auto")
) -> tuple[KVFormat, KVFormat]:
    """How keys and how values of a model are kept, from what was asked for."""
    pair = _kv_format(device, names[0]), _kv_format(device, names[1])
    for format in pair:
        if format.quantised and spec.head_dim % BLOCK:
            raise UsageError(
                f"{spec.name} has heads of {spec.head_dim} values, "
                f"{format.name} needs a multiple of {BLOCK} for keys and values",
                "use --kv f16",
            )
    return pair
