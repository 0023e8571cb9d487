"""Rows of activations in the form the matmul kernels read.

`pack_rows` makes it from floats with a launch of its own. A kernel that computes the floats (a norm, an
activation) can write it directly, and save that launch:

    packed = empty_rows(rows, columns, device)
    group_stride, row_stride = packed.strides

and for each row m, in Triton, with `row_factor` of triton_kernels.py:

    times, inverse = row_factor(largest magnitude of the row)
    scale[m] = inverse
    data[(k // 32) * group_stride + m * row_stride + k % 32] = float16(x[m, k] * times)    for k < columns
    and zero there for columns <= k < packed.padded_columns

The same call serves any number of rows. `packed_matmul`, `packed_matmuls`, `Matrix` and `Projections` take
the result instead of x. The rows of a bucket beyond `rows` need not be written.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Numbers of rows that a matmul is compiled for. One row costs what eight do.
BUCKETS = (8, 16, 24, 32, 48, 64)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows x [rows, columns] as float16, each times a power of two that keeps it clear of overflow.

    Up to 64 rows are stored as [columns / 32, bucket, 32], more as [rows, columns]; columns are filled up
    with zeroes to a multiple of 256. The rows of a bucket beyond `rows` may hold anything.
    """

    data: Tensor
    scale: Tensor  # float32 [rows]: the inverse of the power of two
    rows: int
    columns: int
    bucket: int | None  # None: more rows than the largest bucket

    @property
    def padded_columns(self) -> int:
        return -(-self.columns // 256) * 256

    @property
    def strides(self) -> tuple[int, int]:
        """Return the strides, in elements, of a group of 32 columns and of a row."""
        return (32, self.data.shape[1]) if self.bucket is None else (self.bucket * 32, 32)


def empty_rows(rows: int, columns: int, device: torch.device) -> PackedRows:
    """Return space for a kernel that writes packed rows itself."""
    bucket, padded = bucket_of(rows), -(-columns // 256) * 256
    shape = (rows, padded) if bucket is None else (padded // 32, bucket, 32)
    data = torch.empty(shape, dtype=torch.float16, device=device)
    return PackedRows(data, torch.empty(rows, device=device), rows, columns, bucket)


def bucket_of(rows: int) -> int | None:
    """Return the smallest bucket that holds `rows` rows; None if there is none."""
    return next((bucket for bucket in BUCKETS if rows <= bucket), None)
