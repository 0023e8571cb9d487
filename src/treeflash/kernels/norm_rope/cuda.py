"""The CUDA C++ kernels of rows.cu, for few rows before a product: what they take, how they are launched."""

from ctypes import c_float, c_longlong, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from treeflash.kernels.quant_matmul.cuda import card_of, usable
from treeflash.kernels.quant_matmul.driver import Kernel, Module
from treeflash.kernels.quant_matmul.nvrtc import compile_cubin
from treeflash.kernels.quant_matmul.rows import BUCKETS, PackedRows, empty_rows

NORM, SILU, GATED = range(3)
# Blocks of a row on Hopper. Exponentials of 17408 columns would take one SM 1.1 us, and their bytes as long.
CLUSTERS = {NORM: 1, SILU: 8, GATED: 4}
_AT_ONCE = 576  # threads that a block has at most before each takes more columns


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is compiled for."""

    kind: int
    width: int  # columns of a row
    head: int  # dims of a head, for GATED
    cluster: int  # blocks of a row

    @property
    def threads(self) -> int:
        parts = -(-self.width // 256) * 64 // self.cluster  # of four columns
        items = next(items for items in (2, 4, 8, 16) if parts <= _AT_ONCE * items or items == 16)
        return -(-parts // (items * 32)) * 32

    def defines(self, overlap: bool) -> dict[str, int]:
        names = {"KIND": self.kind, "WIDTH": self.width, "HEAD": self.head, "CLUSTER": self.cluster}
        return names | {"THREADS": self.threads, "OVERLAP": int(overlap)}


def source() -> str:
    return files("treeflash.kernels.norm_rope").joinpath("rows.cu").read_text()


def shape_of(kind: int, width: int, head: int = 4, *, clusters: bool) -> Shape:
    """With as many blocks a row as this kind wants and its heads allow."""
    parts = -(-width // 256) * 64
    cluster = CLUSTERS[kind] if clusters else 1
    while parts % cluster or parts // cluster % (head // 4):
        cluster //= 2
    return Shape(kind, width, head, cluster)


def takes(*tensors: Tensor | None, head: int = 4) -> bool:
    """Whether the kernels are made for such rows and this card; all have the same number of columns."""
    given = [x for x in tensors if x is not None]
    width = given[0].shape[-1]
    few = given[0].numel() // width <= BUCKETS[-1]
    if not few or width % 4 or head > 128 or head & (head - 1) or width > 16 * 4 * 1024:
        return False
    return all(x.dtype == torch.float32 and _aligned(_rows(x)) for x in given) and usable(given[0].device)


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _aligned(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(0) % 4 == 0 and x.data_ptr() % 16 == 0


@cache
def kernel_of(shape: Shape, device: torch.device) -> Kernel:
    card = card_of(device)
    cubin = compile_cubin(source(), defines=shape.defines(card.bulk), arch=card.arch)
    return Module(cubin, device).kernel("rows", threads=shape.threads, overlap=card.bulk)


def _launch(
    shape: Shape, x: Tensor, y: Tensor | None, weight: Tensor | None, total: Tensor | None, eps: float
) -> PackedRows:
    packed = empty_rows(len(x), shape.width, x.device)
    group_stride, row_stride = packed.strides
    strides = (x.stride(0), 0 if y is None else y.stride(0), group_stride, row_stride)
    pointers = [part if part is not None else c_void_p(None) for part in (y, weight, total)]
    arguments = [x, *pointers, packed.data, packed.scale, *map(c_longlong, strides), c_float(eps)]
    kernel_of(shape, x.device)((shape.cluster, len(x)), arguments)
    return packed


def _clusters(device: torch.device) -> bool:
    return card_of(device).arch == "sm_90"


def add_rms_norm(x: Tensor, add: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, PackedRows]:
    """See reference.add_rms_norm."""
    total = x if add is None else torch.empty(x.shape, dtype=torch.float32, device=x.device)
    shape = shape_of(NORM, x.shape[-1], clusters=_clusters(x.device))
    more = None if add is None else _rows(add)
    return total, _launch(shape, _rows(x), more, weight, None if add is None else total, eps)


def silu_mul(gate: Tensor, up: Tensor) -> PackedRows:
    """See reference.silu_mul."""
    shape = shape_of(SILU, gate.shape[-1], clusters=_clusters(gate.device))
    return _launch(shape, _rows(gate), _rows(up), None, None, 0.0)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> PackedRows:
    """See reference.gated_rms_norm."""
    heads = _rows(x.flatten(-2))
    shape = shape_of(GATED, heads.shape[-1], x.shape[-1], clusters=_clusters(x.device))
    return _launch(shape, heads, _rows(gate), weight, None, eps)
