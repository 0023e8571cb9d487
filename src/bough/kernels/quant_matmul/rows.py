"""Rows of activations in the form the matmul kernels read.

`pack_rows` makes it from floats with a launch of its own. A kernel that computes the floats (a norm, an
activation) writes it directly to `empty_rows`, and saves that launch. For each row m, in Triton:

    times, inverse = row_factor(largest magnitude of the row)
    scale[m] = inverse
    data[(k // 32) * group_stride + m * row_stride + k % 32] = float16(x[m, k] * times)    for k < columns
    and zero there for columns <= k < packed.padded_columns

Warp-group mma read groups of eight columns: with `grouped`, up to 64 rows have the pair of columns k, k + 1
at (k // 32) * group_stride + k % 8 // 2 * group_stride // 4 + m * row_stride + k % 32 // 8 * 2, so that the
thread that has eight columns of a weight's row in its registers has a pair of each of four groups.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Numbers of rows that a matmul is compiled for. One row costs what eight do.
BUCKETS = (8, 16, 24, 32, 48, 64)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows x [rows, columns] as float16, each times a power of two that keeps it clear of overflow.

    Up to 64 rows are stored as [columns / 32, bucket, 32], or `grouped` as [columns / 8, bucket, 8], more as
    [rows, columns]; columns are filled up with zeroes to a multiple of 256. The rows of a bucket beyond
    `rows` may hold anything.
    """

    data: Tensor
    scale: Tensor  # float32 [rows]: the inverse of the power of two
    rows: int
    columns: int
    bucket: int | None  # None: more rows than the largest bucket
    grouped: bool = False  # for warp-group mma

    @property
    def padded_columns(self) -> int:
        return -(-self.columns // 256) * 256

    @property
    def strides(self) -> tuple[int, int]:
        """Return the strides, in elements, of a group of 32 columns and of a row."""
        if self.bucket is None:
            return 32, self.data.shape[1]
        return self.bucket * 32, self.data.shape[2]

    def halves(self) -> Tensor:
        """Return the rows as float16 [rows, padded columns], without their scales."""
        if self.bucket is None:
            return self.data
        if not self.grouped:
            return self.data.transpose(0, 1).flatten(1)[: self.rows]
        # 32 columns: four groups of each row, a pair of each thread in each.
        groups = self.data.view(-1, 4, self.bucket, 4, 2)
        return groups.permute(2, 0, 3, 1, 4).flatten(1)[: self.rows]

    def split(self, most: int) -> list["PackedRows"]:
        """Return the rows of a bucket in parts of at most `most` rows, which is a smaller bucket."""
        assert self.bucket is not None and most in BUCKETS, (self.bucket, most)
        parts = []
        for first in range(0, self.rows, most):
            rows = min(most, self.rows - first)
            bucket = bucket_of(rows)
            assert bucket is not None
            data = self.data[:, first : first + bucket].contiguous()
            scale = self.scale[first : first + rows]
            parts.append(PackedRows(data, scale, rows, self.columns, bucket, self.grouped))
        return parts


def empty_rows(rows: int, columns: int, device: torch.device, *, grouped: bool = False) -> PackedRows:
    """Return space for a kernel that writes packed rows itself; `grouped`: those of a bucket."""
    bucket, padded = bucket_of(rows), -(-columns // 256) * 256
    width = 8 if grouped else 32
    shape = (rows, padded) if bucket is None else (padded // width, bucket, width)
    data = torch.empty(shape, dtype=torch.float16, device=device)
    scale = torch.empty(rows, device=device)
    return PackedRows(data, scale, rows, columns, bucket, grouped and bucket is not None)


def bucket_of(rows: int) -> int | None:
    """Return the smallest bucket that holds `rows` rows; None if there is none."""
    return next((bucket for bucket in BUCKETS if rows <= bucket), None)
