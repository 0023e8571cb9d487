"""The CUDA C++ kernels of rows.cu, for at most 64 rows before a matmul: what they take, and their launch."""

from ctypes import Structure, c_float, c_int, c_longlong, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from bough.kernels.quant_matmul import cuda as matmuls
from bough.kernels.quant_matmul.partial_sums import PartialSums, RowScaled, Unfinished
from bough.kernels.quant_matmul.rows import BUCKETS, PackedRows, empty_rows
from bough.kernels.runtime.backends import runs
from bough.kernels.runtime.device import card_of
from bough.kernels.runtime.driver import Kernel, cuda_module
from bough.kernels.runtime.dry_run import cache_tensor
from bough.kernels.runtime.sources import pdl_source

NORM, SILU, GATED = range(3)
# Blocks of a row. One SM would take 1.1 us for the exponentials of 17408 columns and as long for their bytes,
# and 1.4 us to read the eight partial sums of a norm's input.
CLUSTERS = {NORM: 8, SILU: 8, GATED: 4}
# Groups of four columns of a thread, and the most groups of a block for it.
_ITEMS = ((1, 192), (2, 1152), (4, 2304), (8, 3072), (16, 16384))


@dataclass(frozen=True, slots=True)
class NormShape:
    """The compile-time parameters of a kernel."""

    kind: int
    width: int  # columns of a row
    head: int  # dims of a head, for GATED
    cluster: int  # blocks of a row

    @property
    def threads(self) -> int:
        parts = -(-self.width // 256) * 64 // self.cluster  # of four columns
        items = next(items for items, most in _ITEMS if parts <= most)
        return -(-parts // (items * 32)) * 32

    def defines(self, overlap: bool) -> dict[str, int]:
        names = {"KIND": self.kind, "WIDTH": self.width, "HEAD": self.head, "CLUSTER": self.cluster}
        return names | {"THREADS": self.threads, "OVERLAP": int(overlap)}


def source() -> str:
    return pdl_source("norm_rope", "rows.cu")


def shape_of(kind: int, width: int, head: int = 4) -> NormShape:
    """Return the shape with the most blocks a row, up to CLUSTERS, that the heads allow."""
    parts, cluster = -(-width // 256) * 64, CLUSTERS[kind]
    while parts % cluster or parts // cluster % (head // 4):
        cluster //= 2
    return NormShape(kind, width, head, cluster)


def takes(*operands: Tensor | PartialSums | None, head: int = 4) -> bool:
    """Return whether the kernels take such rows on this card; all have the same number of columns."""
    tensors = [x.out if isinstance(x, PartialSums) else x for x in operands if x is not None]
    width = tensors[0].shape[-1]
    few = tensors[0].numel() // width <= BUCKETS[-1]
    if not few or width % 4 or head > 128 or head & (head - 1) or width > 4 * _ITEMS[-1][1]:
        return False
    plain = all(x.dtype == torch.float32 and _aligned(_rows(x)) for x in tensors)
    return plain and runs("norms", "cuda", tensors[0].device)


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _aligned(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(0) % 4 == 0 and x.data_ptr() % 16 == 0


@cache
def kernel_of(shape: NormShape, device: torch.device) -> Kernel:
    card = card_of(device)
    module = cuda_module(source(), shape.defines(card.pdl), device)
    return module.kernel("rows", threads=shape.threads, overlap=card.pdl)


class Operand(Structure):
    """The `Operand` of rows.cu."""

    _fields_ = [
        ("at", c_void_p),
        ("stride", c_longlong),
        ("parts", c_void_p),
        *((name, c_int) for name in ("depth", "share", "extra", "first", "slot", "block")),
    ]

    @classmethod
    def of(cls, x: Tensor | PartialSums | None) -> "Operand":
        if x is None:
            return cls()
        if isinstance(x, Tensor):
            rows = _rows(x)
            return cls(rows.data_ptr(), rows.stride(0))
        numbers = (x.depth, x.share, x.extra, x.first, x.parts[0, 0].numel(), x.parts.shape[-1])
        return cls(x.out.data_ptr(), x.out.stride(0), x.parts.data_ptr(), *numbers)


def _launch(
    shape: NormShape,
    x: Tensor | PartialSums,
    y: Tensor | PartialSums | None,
    *,
    weight: Tensor | None = None,
    total: Tensor | None = None,
    eps: float = 0.0,
) -> PackedRows:
    like = x if isinstance(x, Tensor) else x.out
    rows = like.numel() // shape.width
    grouped = matmuls.grouped(card_of(like.device), rows)
    packed = empty_rows(rows, shape.width, like.device, grouped=grouped)
    pointers = [part if part is not None else c_void_p(None) for part in (weight, total)]
    board = _board(shape, like.device)
    rest = (*pointers, packed.data, packed.scale, *map(c_longlong, packed.strides), board, c_float(eps))
    launched = kernel_of(shape, like.device)
    launched((shape.cluster, packed.rows), [Operand.of(x), Operand.of(y), *rest])
    return packed


@cache_tensor
def _board(shape: NormShape, device: torch.device) -> Tensor:
    """Return where the blocks of a row exchange their results on cards without clusters."""
    return torch.zeros(BUCKETS[-1], shape.cluster, 2, dtype=torch.int64, device=device)


def takes_add_rms_norm(
    x: Tensor, add: Tensor | Unfinished | None, weight: Tensor, eps: float, *, pack: bool = False
) -> bool:
    return pack and not isinstance(add, RowScaled) and (isinstance(add, PartialSums) or takes(x, add))


def takes_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, pack: bool = False) -> bool:
    return pack and takes(x.flatten(-2), gate, head=x.shape[-1])


def takes_silu_mul(gate: Tensor | Unfinished, up: Tensor | Unfinished, *, pack: bool = False) -> bool:
    if isinstance(gate, RowScaled) or isinstance(up, RowScaled):
        return False
    return pack and (isinstance(gate, PartialSums) or isinstance(up, PartialSums) or takes(gate, up))


def add_rms_norm(
    x: Tensor, add: Tensor | PartialSums | None, weight: Tensor, eps: float, *, pack: bool = True
) -> tuple[Tensor, PackedRows]:
    shape = shape_of(NORM, x.shape[-1])
    if add is None:
        return x, _launch(shape, x, None, weight=weight, eps=eps)
    total = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    return total, _launch(shape, x, add, weight=weight, total=total, eps=eps)


def silu_mul(gate: Tensor | PartialSums, up: Tensor | PartialSums, *, pack: bool = True) -> PackedRows:
    like = gate.out if isinstance(gate, PartialSums) else gate
    return _launch(shape_of(SILU, like.shape[-1]), gate, up)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, pack: bool = True) -> PackedRows:
    heads = x.flatten(-2)
    shape = shape_of(GATED, heads.shape[-1], x.shape[-1])
    return _launch(shape, heads, gate, weight=weight, eps=eps)
