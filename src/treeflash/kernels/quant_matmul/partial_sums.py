"""Sums of a product that are left open: who reads them adds them. Knows no kernels.

A product's work is dealt out to CTAs in units of 128 output columns (rows of the matrix) and some of what is
summed over. Where several have parts of the same 128 columns, to add them is a trip through memory at the end
of the product; the kernel behind it, which has to read the sums anyway, does it for less.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

BLOCK = 128  # columns of a unit


@dataclass(frozen=True, slots=True)
class OpenSums:
    """Columns of a product [rows, columns]; CTA c has share + (c < extra) units, in the columns' order."""

    out: Tensor  # float32 [rows, columns]: those that one CTA had alone; what else stands there means nothing
    parts: Tensor  # float32 [CTAs, 2, bucket, 128]: of the CTA's first 128 columns and of its last, if shared
    depth: int  # units of 128 columns
    share: int
    extra: int
    first: int = 0  # column of the product where these begin

    @property
    def rows(self) -> int:
        return self.out.shape[0]

    @property
    def columns(self) -> int:
        return self.out.shape[1]

    def split(self, sizes: Sequence[int]) -> list["OpenSums"]:
        """Columns side by side."""
        firsts = [self.first + sum(sizes[:number]) for number in range(len(sizes))]
        views = self.out.split(list(sizes), 1)
        return [replace(self, out=view, first=first) for view, first in zip(views, firsts, strict=True)]

    def cta_of(self, unit: int) -> int:
        cut = self.extra * (self.share + 1)
        return unit // (self.share + 1) if unit < cut else self.extra + (unit - cut) // self.share

    def closed(self) -> Tensor:
        """[rows, columns]: what the open sums mean."""
        result, last = self.out.clone(), self.first + self.columns
        for block in range(self.first // BLOCK, -(-last // BLOCK)):
            begin, end = (self.cta_of(block * self.depth + step) for step in (0, self.depth - 1))
            if begin < end:
                low, high = max(self.first, block * BLOCK), min(last, (block + 1) * BLOCK)
                own = self.parts[:, :, : self.rows, low - block * BLOCK : high - block * BLOCK]
                total = own[begin, 1]
                for cta in range(begin + 1, end + 1):
                    total = total + own[cta, 0]
                result[:, low - self.first : high - self.first] = total
        return result
