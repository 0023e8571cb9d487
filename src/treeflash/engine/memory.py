"""How much memory there is, and how much a model needs; no allocation."""

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch

from treeflash.errors import ResourceError, UsageError
from treeflash.gguf.reader import GGUFFile, TensorInfo
from treeflash.kernels.kv_cache.format import BLOCK, FORMATS, KVFormat
from treeflash.kernels.quant_matmul import has_layout, packed_size
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

    # Weights are used as they are held: as floats, or on a GPU in the tiles its kernels read. Otherwise they
    # are packed, and every use unpacks them.
    expanded: bool
    weights: int
    draft: int
    recurrent: int
    kv: tuple[KVFormat, KVFormat]  # of keys and of values
    kv_per_token: int
    max_ctx: int
    available: int
    widened: Mapping[str, int] = field(
        default_factory=dict
    )  # bytes added to types that a GPU holds as float16

    def notes(self) -> list[str]:
        """What the user should know, in words."""
        if not self.widened:
            return []
        return [
            f"weights in {', '.join(self.widened)} have no GPU kernel and are held as float16: "
            f"{gib(sum(self.widened.values()))} more than in the file; "
            "a quantisation of the K family, Q8_0, Q4_0, Q5_0 or IQ4 is faster and smaller"
        ]


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
    kv: tuple[str, str] = ("auto", "auto"),
) -> MemoryPlan:
    available = available_memory(device)
    draft_bytes = draft_size(draft, dtype) if draft is not None else 0
    packed, floats = weight_sizes(file, spec, dtype)
    widened: dict[str, int] = {}
    if device.type == "cuda":
        floats, widened = tile_sizes(file, spec)
        weights = "expanded"
    recurrent = spec.recurrent_bytes()
    pair = kv_pair(spec, device, kv)
    token = spec.kv_bytes_per_token(*(format.row_bytes(spec.head_dim) for format in pair))
    expanded = weights == "expanded" or (
        weights == "auto" and floats + draft_bytes + recurrent < 0.8 * available
    )
    needed = (floats if expanded else packed) + draft_bytes + recurrent
    room = int(0.9 * available) - needed
    context = max_ctx or min(spec.context_length, DEFAULT_CTX[device.type])
    if max_ctx is None and token:
        context = min(context, max(256, room // token))
    if room < token * context:
        raise ResourceError(
            f"{file.path.name} needs {gib(needed + token * context)} with a context of {context} tokens, "
            f"{gib(available)} are free on {device}",
            "lower --max-ctx, close other programs, or take a smaller model or quantisation",
        )
    return MemoryPlan(
        expanded,
        floats if expanded else packed,
        draft_bytes,
        recurrent,
        pair,
        token,
        context,
        available,
        widened,
    )


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


def weight_sizes(file: GGUFFile, spec: ModelSpec, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the weights that are loaded: as stored, and expanded."""
    packed = floats = 0
    for info in _loaded(file, spec):
        packed += info.nbytes
        if info.name == "token_embd.weight":
            # Its rows stay packed; a tied head is an expanded copy beside them.
            floats += info.nbytes + (info.elements * dtype.itemsize if spec.tied_head else 0)
        else:
            floats += info.elements * dtype.itemsize
    return packed, floats


def tile_sizes(file: GGUFFile, spec: ModelSpec) -> tuple[int, dict[str, int]]:
    """Bytes of the weights on a GPU, and those added to each type that has no tiles and becomes float16."""
    total, widened = 0, dict[str, int]()
    for info in _loaded(file, spec):
        embedding = info.name == "token_embd.weight"
        if embedding:
            total += info.nbytes
        # A convolution's few columns are a vector to the loader.
        if len(info.shape) == 1 or "conv1d" in info.name:
            total += info.elements * 4
        elif not embedding or spec.tied_head:
            *count, rows, columns = info.shape
            size = prod(count) * packed_size(info.type, rows, columns)
            total += size
            if not has_layout(info.type) and info.type.bits_per_weight < 16:
                widened[info.type.name] = widened.get(info.type.name, 0) + size - info.nbytes
    return total, widened


def _loaded(file: GGUFFile, spec: ModelSpec) -> Iterator[TensorInfo]:
    for info in file.tensors.values():
        block = info.name.split(".")[1] if info.name.startswith("blk.") else ""
        if not block.isdigit() or int(block) < len(spec.layers):  # not prediction blocks
            yield info


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
