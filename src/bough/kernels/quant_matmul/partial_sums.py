"""Outputs of a matmul that the kernel which reads them completes: split-K partial sums, row scales.

A matmul's work is dealt out to CTAs in units of a block of output columns (128 or 256 rows of the matrix)
and a slice of the summed dimension. Where several CTAs have partial sums of one block, adding them is a round
trip through memory at the end of the matmul. The next kernel reads the output anyway and adds them for less.

A matmul of many rows is a library's, over rows that were scaled by powers of two. Scaling its output back is
a second pass over it: 108 of the 885 ms of 8,192 tokens of a 27B on an H200. The next kernel can do it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PartialSums:
    """Columns of an output [rows, columns]; CTA c has share + (c < extra) units, in the columns' order."""

    out: Tensor  # float32 [rows, columns]: valid where one CTA computed all of a block
    parts: Tensor  # float32 [CTAs, 2, bucket, block]: of the CTA's first and last block, if shared
    depth: int  # units of a block
    share: int
    extra: int
    first: int = 0  # column of the whole output where these begin

    @property
    def device(self) -> torch.device:
        return self.out.device

    @property
    def rows(self) -> int:
        return self.out.shape[0]

    @property
    def columns(self) -> int:
        return self.out.shape[1]

    def split(self, sizes: Sequence[int]) -> list["PartialSums"]:
        firsts = [self.first + sum(sizes[:number]) for number in range(len(sizes))]
        views = self.out.split(list(sizes), 1)
        return [replace(self, out=view, first=first) for view, first in zip(views, firsts, strict=True)]

    def cta_of(self, unit: int) -> int:
        cut = self.extra * (self.share + 1)
        return unit // (self.share + 1) if unit < cut else self.extra + (unit - cut) // self.share

    def reduced(self) -> Tensor:
        """Return the sums [rows, columns]: the specification of the fused reductions."""
        result, last, size = self.out.clone(), self.first + self.columns, self.parts.shape[-1]
        for block in range(self.first // size, -(-last // size)):
            begin, end = (self.cta_of(block * self.depth + step) for step in (0, self.depth - 1))
            if begin < end:
                low, high = max(self.first, block * size), min(last, (block + 1) * size)
                block_parts = self.parts[:, :, : self.rows, low - block * size : high - block * size]
                total = block_parts[begin, 1]
                for cta in range(begin + 1, end + 1):
                    total = total + block_parts[cta, 0]
                result[:, low - self.first : high - self.first] = total
        return result


@dataclass(frozen=True, slots=True)
class RowScaled:
    """Columns of an output [rows, columns] of which each row has still to be multiplied by its scale."""

    out: Tensor  # float32 [rows, columns]
    scale: Tensor  # float32 [rows]: powers of two

    @property
    def device(self) -> torch.device:
        return self.out.device

    def split(self, sizes: Sequence[int]) -> list["RowScaled"]:
        return [replace(self, out=part) for part in self.out.split(list(sizes), 1)]

    def scaled(self) -> Tensor:
        """Return the output: the specification of the kernels that read it."""
        return self.out * self.scale[:, None]


Unfinished = PartialSums | RowScaled
