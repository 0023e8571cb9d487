"""How much memory there is, and how much a model needs; no allocation."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from treeflash.errors import ResourceError
from treeflash.gguf.reader import GGUFFile
from treeflash.models.spec import ModelSpec

# A context larger than this is taken only when asked for: most prompts are far shorter, and on a CPU
# prefill is slow.
DEFAULT_CTX = {"cpu": 32768, "cuda": 262144}


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


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a model takes on a device, before any of it is allocated; bytes."""

    expanded: bool  # weights held as floats; otherwise packed, and every use unpacks them
    weights: int
    draft: int
    recurrent: int
    kv_per_token: int
    max_ctx: int
    available: int


def draft_size(path: Path, dtype: torch.dtype) -> int:
    """Bytes of a draft's weights once expanded; 0 for what is not there, which loading will name."""
    if path.suffix == ".gguf" and path.is_file():
        with GGUFFile.open(path) as file:
            return sum(info.elements for info in file.tensors.values()) * dtype.itemsize
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    stored = sum(file.stat().st_size for file in files if file.is_file())
    return stored * dtype.itemsize // 2  # checkpoints are 16 bits a weight


def plan_memory(
    file: GGUFFile,
    spec: ModelSpec,
    device: torch.device,
    *,
    dtype: torch.dtype,
    max_ctx: int | None,
    weights: str,
    draft: Path | None = None,
    kv_format: str = "auto",
) -> MemoryPlan:
    available = available_memory(device)
    draft_bytes = draft_size(draft, dtype) if draft is not None else 0
    packed, floats = weight_sizes(file, spec, dtype)
    recurrent = spec.recurrent_bytes()
    kv = spec.kv_bytes_per_token(8 * kv_dtype(device, kv_format).itemsize)
    expanded = weights == "expanded" or (
        weights == "auto" and floats + draft_bytes + recurrent < 0.8 * available
    )
    needed = (floats if expanded else packed) + draft_bytes + recurrent
    room = int(0.9 * available) - needed
    context = max_ctx or min(spec.context_length, DEFAULT_CTX[device.type])
    if max_ctx is None and kv:
        context = min(context, max(256, room // kv))
    if room < kv * context:
        raise ResourceError(
            f"{file.path.name} needs {gib(needed + kv * context)} with a context of {context} tokens, "
            f"{gib(available)} are free on {device}",
            "lower --max-ctx, close other programs, or take a smaller model or quantisation",
        )
    return MemoryPlan(
        expanded, floats if expanded else packed, draft_bytes, recurrent, kv, context, available
    )


def kv_dtype(device: torch.device, format: str = "auto") -> torch.dtype:
    """Unless told: float32 on a CPU, whose text is then the same however it is cut into steps; else f16."""
    if format != "auto":
        return {"f16": torch.float16, "bf16": torch.bfloat16}[format]
    return torch.float16 if device.type == "cuda" else torch.float32


def weight_sizes(file: GGUFFile, spec: ModelSpec, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the weights that are loaded: as stored, and expanded."""
    packed = floats = 0
    for info in file.tensors.values():
        block = info.name.split(".")[1] if info.name.startswith("blk.") else ""
        if block.isdigit() and int(block) >= len(spec.layers):
            continue  # prediction blocks
        packed += info.nbytes
        if info.name == "token_embd.weight":
            # Its rows stay packed; a tied head is an expanded copy beside them.
            floats += info.nbytes + (info.elements * dtype.itemsize if spec.tied_head else 0)
        else:
            floats += info.elements * dtype.itemsize
    return packed, floats


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
