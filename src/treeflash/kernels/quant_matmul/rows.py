"""Rows of activations in the form the kernels read; knows no weights.

`pack_rows` makes it from floats with a launch of its own. A kernel that makes the floats (a norm, an
activation) can write it directly, and save that launch:

    packed = empty_rows(rows, columns, device)
    group_stride, row_stride = packed.strides

and for each row m, in Triton, with `row_factor` of kernel.py:

    times, inverse = row_factor(largest magnitude of the row)
    scale[m] = inverse
    data[(k // 32) * group_stride + m * row_stride + k % 32] = float16(x[m, k] * times)    for k < columns
    and zero there for columns <= k < packed.padded_columns

The same call serves any number of rows. `packed_matmul`, `packed_products`, `Matrix` and `Projections` take
the result in the place of x. Nothing needs to be written for the rows of a bucket beyond `rows`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Rows a product is compiled for. One row costs what eight do.
BUCKETS = (8, 16, 24, 32, 48, 64)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows x [rows, columns] as float16, each times a power of two that keeps it clear of overflow.

    Up to 64 rows are stored as [columns / 32, bucket, 32], more as [rows, columns]; columns are filled up
    with zeroes to a multiple of 256. What stands in the rows of a bucket beyond `rows` does not matter.
    """

    data: Tensor
    scale: Tensor  # float32 [rows]: what takes the power of two out again
    rows: int
    columns: int
    bucket: int | None  # None: more rows than the largest bucket

    @property
    def padded_columns(self) -> int:
        return -(-self.columns // 256) * 256

    @property
    def strides(self) -> tuple[int, int]:
        """Elements from one group of 32 columns to the next, and from one row to the next."""
        return (32, self.data.shape[1]) if self.bucket is None else (self.bucket * 32, 32)


def empty_rows(rows: int, columns: int, device: torch.device) -> PackedRows:
    """Space for a kernel that writes packed rows itself."""
    bucket, padded = bucket_of(rows), -(-columns // 256) * 256
    shape = (rows, padded) if bucket is None else (padded // 32, bucket, 32)
    data = torch.empty(shape, dtype=torch.float16, device=device)
    return PackedRows(data, torch.empty(rows, device=device), rows, columns, bucket)


def bucket_of(rows: int) -> int | None:
    """The smallest bucket that holds so many rows."""
    return next((bucket for bucket in BUCKETS if rows <= bucket), None)
