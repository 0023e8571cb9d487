"""The native CPU library: packed weights, their matmuls, and whole steps of a model, with threads of its own.

The sources say how results stay independent of the rows and threads around them; the torch layers of `models`
are the specification.
"""

import ctypes
import mmap
import weakref
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bough.gguf.types import NATIVE_TYPES, QuantType
from bough.kernels.hadamard import BlockRotation
from bough.kernels.native import library
from bough.kernels.native.library import INT8, INT16, NativeMatrix, NativeRotation

_HUGE = 2 << 20  # bytes of a huge page
_CHUNK = 64 << 20  # address space that is asked for at once; memory is taken as it is written


def unavailable() -> str | None:
    """Return why there is no native code for this machine; None: there is."""
    functions, reason = library.find_library()
    return reason if functions is None else None


def has_kind(type: QuantType) -> bool:
    return type.name in NATIVE_TYPES


def packed_bytes(type: QuantType, rows: int, columns: int) -> int:
    """Return the bytes of a packed matrix; 0: native code does not take this type or shape."""
    functions, _ = library.find_library()
    assert functions is not None
    return functions.tf_packed_bytes(NATIVE_TYPES.index(type.name), rows, columns) if has_kind(type) else 0


def argmax_rows(x: Tensor) -> Tensor:
    """Return `x.argmax(-1)` of x [R, N] on a CPU: the first of equal values, NaN above all."""
    functions, _ = library.find_library()
    if functions is None or x.dtype != torch.float32 or not x.is_contiguous() or not x.shape[1]:
        return x.argmax(-1)
    best = torch.empty(len(x), dtype=torch.int64)
    functions.tf_argmax(x.data_ptr(), len(x), x.shape[1], best.data_ptr())
    return best


def rank_rows(x: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """Return the likeliest ids [R, count] of logits x [R, N] on a CPU, best first, and log probabilities.

    Of equal ones the lower id comes first; those of probability 0 have id 0. None: not for these logits.
    """
    functions, _ = library.find_library()
    if functions is None or x.dtype != torch.float32 or not x.is_contiguous() or not 0 < count <= x.shape[1]:
        return None
    ids, scores = torch.empty(len(x), count, dtype=torch.int64), torch.empty(len(x), count)
    done = functions.tf_rank(x.data_ptr(), *x.shape, count, ids.data_ptr(), scores.data_ptr())
    return (ids, scores) if done else None


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight [rows, columns] in the layout of the native matmul, with a bias or without."""

    rows: int
    columns: int
    data: Tensor
    bias: Tensor | None
    struct: NativeMatrix  # points to data, bias and basis
    basis: tuple[BlockRotation, NativeRotation] | None = None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)


class WeightMemory:
    """Hands out zeroed memory, 64-byte aligned, which is freed when no tensor refers to it any more.

    In huge pages where the system has them: a step reads all weights, and with pages of 4 KB address
    translation takes a quarter of its time (27 MB, Zen 4).
    """

    def __init__(self) -> None:
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def take(self, size: int) -> Tensor:
        """Return `size` zeroed bytes."""
        if self._used + size > self._chunk.numel():
            self._chunk, self._used = _huge_pages(max(size, _CHUNK)), 0
        start, self._used = self._used, self._used + (size + 63) // 64 * 64
        return self._chunk[start : start + size]


def _huge_pages(size: int) -> Tensor:
    size = (size + _HUGE - 1) // _HUGE * _HUGE
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    return whole[start : start + size]


class Library:
    """The native library with a pool of threads."""

    def __init__(self, threads: int, *, variant: str | None = None):
        """`variant`: other than the best for this CPU, for tests."""
        functions, self.variant = library.find_library()
        if variant is not None:
            functions, self.variant = library.open_library(library.library_path(variant)), variant
        assert functions is not None, self.variant
        self.c = functions
        self.pool = functions.tf_pool_new(threads)
        if not self.pool:
            raise MemoryError("no memory for threads")
        self.threads = functions.tf_pool_threads(self.pool)
        self._scratch, self._memory = torch.empty(0, dtype=torch.uint8), WeightMemory()
        # Not at exit: a thread may still be in a step then.
        weakref.finalize(self, functions.tf_pool_free, self.pool).atexit = False

    def pack(
        self,
        source: Tensor | np.ndarray,
        type: QuantType,
        shape: tuple[int, int],
        bias: Tensor | None = None,
        rotation: BlockRotation | None = None,
    ) -> PackedMatrix:
        """Pack a matrix; source: the bytes of all rows as they are in a GGUF file."""
        kind, (rows, columns) = NATIVE_TYPES.index(type.name), shape
        size = self.c.tf_packed_bytes(kind, rows, columns)
        assert size, f"{type.name} [{rows}, {columns}] cannot be packed"
        size_read = rows * columns // type.block_elements * type.block_bytes
        source = source.numpy() if isinstance(source, Tensor) else source
        assert source.flags.c_contiguous and source.nbytes == size_read, (
            f"{source.nbytes} bytes, needed {size_read}"
        )
        assert bias is None or len(bias) == rows
        data = self._memory.take(size)
        self.c.tf_pack(self.pool, kind, source.ctypes.data, rows, columns, data.data_ptr())
        struct = NativeMatrix(self.c.tf_packed_kind(kind), rows, columns, data.data_ptr())
        struct.bias = None if bias is None else bias.data_ptr()
        if rotation is None:
            return PackedMatrix(rows, columns, data, bias, struct)
        order = None if rotation.order is None else rotation.order.data_ptr()
        described = NativeRotation(rotation.block, rotation.signs.data_ptr(), order)
        struct.rotation = ctypes.addressof(described)
        return PackedMatrix(rows, columns, data, bias, struct, (rotation, described))

    def matmul(self, matrix: PackedMatrix, x: Tensor, *, mode: int = INT16) -> Tensor:
        """Return x [..., K] float32 times the matrix [N, K], transposed: [..., N]."""
        assert x.shape[-1] == matrix.columns and x.dtype == torch.float32, f"{x.shape}, {x.dtype}"
        x = x.contiguous()
        out = torch.empty(*x.shape[:-1], matrix.rows)
        rows = x.numel() // matrix.columns
        if rows:
            scratch = self.scratch(self.c.tf_matmul_scratch(matrix.columns))
            self.c.tf_matmul(
                self.pool, matrix.struct, mode, x.data_ptr(), rows, out.data_ptr(), scratch.data_ptr()
            )
        return out

    def embed(self, matrix: PackedMatrix, tokens: Tensor) -> Tensor:
        """Return the rows [..., K] of the matrix, as float32."""
        flat = tokens.flatten().contiguous()
        out = torch.empty(*tokens.shape, matrix.columns)
        assert not flat.numel() or 0 <= int(flat.min()) <= int(flat.max()) < matrix.rows
        self.c.tf_embed(matrix.struct, flat.data_ptr(), flat.numel(), out.data_ptr())
        return out

    def scratch(self, size: int) -> Tensor:
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch
