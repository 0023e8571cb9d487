"""Sums of a product that are left open: who reads them adds them. Knows no kernels.

A product's work is dealt out to CTAs in units of 128 output columns (rows of the matrix) and some of what is
summed over. Where several have parts of the same 128 columns, to add them is a trip through memory at the end
of the product; the kernel behind it, which has to read the sums anyway, does it for less.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
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
        result = self.out.clone()
        for column in range(self.columns):
            place = self.first + column
            unit = place // BLOCK * self.depth
            begin, end = self.cta_of(unit), self.cta_of(unit + self.depth - 1)
            if begin < end:
                own = self.parts[:, :, : self.rows, place % BLOCK]
                sums = [own[begin, 1], *own[begin + 1 : end + 1, 0]]
                result[:, column] = torch.stack(sums).cumsum(0)[-1]
        return result
