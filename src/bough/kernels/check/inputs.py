"""Random inputs of the kernels, in the shapes of a model."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.gguf.types import QuantType
from bough.kernels.kv_cache.format import FORMATS, HeadPool
from bough.kernels.kv_cache.reference import encode
from bough.kernels.kv_cache.rotation import rotate
from bough.kernels.quant_matmul import PackedWeight, pack
from bough.kernels.runtime import dry_run

Q = QuantType
PAGE = 64
# Bytes of a block that are float16 scales or minima, by their offsets.
HALVES = {
    Q.Q4_0: (0,), Q.Q4_1: (0, 2), Q.Q5_0: (0,), Q.Q5_1: (0, 2), Q.Q8_0: (0,), Q.Q3_K: (108,), Q.Q4_K: (0, 2),
    Q.Q5_K: (0, 2), Q.Q6_K: (208,), Q.IQ4_NL: (0,), Q.IQ4_XS: (0,), Q.MXFP4: (),
}  # fmt: skip
_REPEATED = 128  # rows of a random matrix that are made; a larger one repeats them


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Topology of a batch of trees, [B, T] int64 each."""

    parents: Tensor  # -1: the root
    ancestors: Tensor  # bit j set: row j is this row or above it
    depths: Tensor  # 0: the root


def tree_rows(parents: list[list[int]], device: torch.device) -> TreeRows:
    ancestors: list[list[int]] = []
    for tree in parents:
        bits: list[int] = []
        for row, parent in enumerate(tree):
            bits.append((bits[parent] if parent >= 0 else 0) | 1 << row)
        ancestors.append(bits)
    depths = [[bits.bit_count() - 1 for bits in tree] for tree in ancestors]
    signed = [[bits - 2**64 if bits >= 2**63 else bits for bits in tree] for tree in ancestors]
    return TreeRows(*(torch.tensor(numbers).to(device) for numbers in (parents, signed, depths)))


def random_trees(
    rows: int, batch: int = 1, *, depth: int = 16, seed: int = 0, device: torch.device
) -> TreeRows:
    """Return random trees, no path longer than `depth`."""
    choose = random.Random(seed + rows)
    trees = []
    for _ in range(batch):
        parents, depths = [-1], [1]
        for row in range(1, rows):
            parent = choose.choice([i for i in range(max(0, row - 6), row) if depths[i] < depth] or [0])
            parents.append(parent)
            depths.append(depths[parent] + 1)
        trees.append(parents)
    return tree_rows(trees, device)


def random_rows(type: QuantType, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Return random packed rows, uint8 [rows, row bytes], with scales that a trained matrix could have."""
    count, device = rows * columns // type.block_elements, generator.device
    if type in (Q.F16, Q.BF16, Q.F32):
        dtype = {Q.F16: torch.float16, Q.BF16: torch.bfloat16, Q.F32: torch.float32}[type]
        values = torch.randn(rows, columns, device=device, generator=generator) * 0.02
        return values.to(dtype).view(torch.uint8)
    shape = (count, type.block_bytes)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
    for offset in HALVES[type]:
        values = torch.randn(count, 1, device=device, generator=generator) * 1e-3
        data[:, offset : offset + 2] = values.half().view(torch.uint8)
    if type == Q.MXFP4:
        data[:, 0] = torch.randint(112, 124, (count,), dtype=torch.uint8, device=device, generator=generator)
    return data.view(rows, -1)


class Random:
    """Random tensors on a device; in a dry run, tensors without memory."""

    def __init__(self, device: torch.device):
        self.device, self._dry = device, dry_run.current() is not None
        self._generator: torch.Generator | None = None

    def restart(self) -> None:
        """Begin the same numbers again."""
        self._generator = None if self._dry else torch.Generator(self.device).manual_seed(1)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator, device=self.device)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self._generator, device=self.device)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator, device=self.device)

    def weight(self, type: QuantType, rows: int, columns: int) -> PackedWeight:
        return pack(self.bytes_of(type, rows, columns), type)

    def bytes_of(self, type: QuantType, rows: int, columns: int) -> Tensor:
        """Return packed rows of a type; many of them repeat the first."""
        if self._generator is None:
            size = columns // type.block_elements * type.block_bytes
            return torch.empty(rows, size, dtype=torch.uint8, device=self.device)
        some = random_rows(type, min(rows, _REPEATED), columns, self._generator)
        return some.repeat(-(-rows // len(some)), 1)[:rows]

    def pool(self, format: str, shape: tuple[int, ...], dim: int) -> HeadPool:
        """Return a pool whose rows are random vectors, stored as the cache stores them."""
        pool = HeadPool.empty(FORMATS[format], shape, dim, self.device)
        if not self._dry:
            rows = self.normal(*shape, dim)
            parts = encode(rotate(rows), pool.format) if pool.format.quantised else (rows,)
            for plane, part in zip(pool.planes, parts, strict=True):
                plane.copy_(part)
        return pool
