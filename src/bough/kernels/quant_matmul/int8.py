"""Matmuls in int8 with a scale for each group of 128 columns, for prompt chunks: in plain torch.

This is the specification of int8_kernels.py. x [M, K] and a weight [N, K] are rounded to x = a sa and
w = b sb with integers a and b of -127 to 127, and a scale for each row and group. The sums of a b over a
group are integers below 2^21, exact in int32; times sa sb they are added in float32, group by group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from bough.kernels.quant_matmul.layout import COLUMN_BLOCK, PackedWeight, unpack

GROUP = 128  # columns of a scale
ROW_TILE = 256  # rows are filled up to a multiple: a program loads whole tiles


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """Rows [rows, K]: codes[row, k] * scales[k // 128, row]. Rows beyond `rows` may hold anything."""

    codes: Tensor  # int8 [padded rows, K]
    scales: Tensor  # float32 [K / 128, padded rows]
    rows: int

    @property
    def columns(self) -> int:
        return self.codes.shape[1]


def empty_int8(rows: int, columns: int, device: torch.device) -> Int8Matrix:
    """Return an uninitialised matrix; columns: a multiple of 128."""
    assert columns % GROUP == 0, f"{columns} columns, needed a multiple of {GROUP}"
    padded = -(-rows // ROW_TILE) * ROW_TILE
    codes = torch.empty(padded, columns, dtype=torch.int8, device=device)
    return Int8Matrix(codes, torch.empty(columns // GROUP, padded, device=device), rows)


def quantise(x: Tensor, out: Int8Matrix | None = None) -> Int8Matrix:
    """Return x [rows, K] float32 in int8: the largest magnitude of a group becomes 127, or all are 0."""
    out = empty_int8(len(x), x.shape[1], x.device) if out is None else out
    groups = x.float().unflatten(1, (-1, GROUP))
    peak = groups.abs().amax(2)
    inverse = (127 / peak).masked_fill(peak == 0, 0.0)
    out.codes[: len(x)] = (groups * inverse[..., None]).round().flatten(1).char()
    out.scales[:, : len(x)] = (peak * (1 / 127)).T
    return out


def quantise_rows(x: Tensor) -> Int8Matrix:
    """Return rows of activations in int8."""
    return quantise(pad(x.float(), (0, -x.shape[1] % COLUMN_BLOCK)))


def requantise(weight: PackedWeight, first: int, out: Int8Matrix) -> None:
    """Write out.rows rows of a matrix in tiles, from row `first` on, to `out`."""
    values = unpack(weight)[first : first + out.rows]
    quantise(pad(values, (0, out.columns - values.shape[1])), out)


def dequantise(x: Int8Matrix) -> Tensor:
    """Return float32 [rows, K]."""
    scales = x.scales[:, : x.rows].T[..., None]
    return (x.codes[: x.rows].float().unflatten(1, (-1, GROUP)) * scales).flatten(1)


def matmul(x: Int8Matrix, weight: Int8Matrix, out: Tensor) -> Tensor:
    """Write x [M, K] times weight [N, K], transposed, to out [M, N] float32."""
    out.zero_()
    for group in range(x.columns // GROUP):
        columns = slice(group * GROUP, (group + 1) * GROUP)
        # Integers below 2^24 are exact in float32, in any order.
        sums = x.codes[: x.rows, columns].float() @ weight.codes[: weight.rows, columns].float().T
        out += sums * (x.scales[group, : x.rows, None] * weight.scales[group, : weight.rows])
    return out
