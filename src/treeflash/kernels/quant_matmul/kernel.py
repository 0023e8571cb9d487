"""The products with tiles in Triton, for GPUs the CUDA kernels were not made for; slower, same layout."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from treeflash.kernels.quant_matmul.layout import Layout, PackedWeight
from treeflash.kernels.quant_matmul.rows import PackedRows, empty_rows

_ROWS = 32  # of a matrix in one program; below 64, so that one instruction serves every number of tokens


@triton.jit
def _weights(
    data,
    table,
    n,
    step,
    inside,
    all_tiles,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SCALES: tl.constexpr,
    OFFSET: tl.constexpr,
    TABLE: tl.constexpr,
    UNIT: tl.constexpr,
    TILE_BYTES: tl.constexpr,
):
    """Rows n [R] of 32 columns, number `inside` of tile column `step`: float32 [R, 32] without row scales."""
    GROUPS: tl.constexpr = UNIT // 32
    LOW_BYTES: tl.constexpr = 2 * UNIT * LOW
    SCALE_AT: tl.constexpr = LOW_BYTES + 2 * UNIT * HIGH
    tile = data + (step * all_tiles + n.to(tl.int64) // 16) * TILE_BYTES
    k = tl.arange(0, 32)[None, :]
    i, p, e = (k >> 2) & 1, (k >> 1) & 1, k & 1
    g, r = (n & 7)[:, None], ((n >> 3) & 1)[:, None]
    lane = 4 * g + (k >> 3)
    j, h = inside // 2, inside % 2
    if LOW == 16:
        at = tile[:, None] + inside * 1024 + r * 512 + lane * 16 + (i * 4 + p * 2 + e) * 2
        return tl.load(at.to(tl.pointer_type(tl.float16))).to(tl.float32)
    if LOW == 8:
        code = tl.load(tile[:, None] + inside * 512 + lane * 16 + r * 8 + i * 4 + p * 2 + e).to(tl.int32)
    elif TABLE:
        code = tl.load(tile[:, None] + j * 512 + lane * 16 + r * 8 + i * 4 + h * 2 + p).to(tl.int32)
        code = tl.load(table + ((code >> (4 * e)) & 15)).to(tl.int32)
    else:
        code = tl.load(tile[:, None] + j * 512 + lane * 16 + r * 8 + i * 4 + e * 2 + p).to(tl.int32)
        code = (code >> (4 * h)) & 15
    if HIGH == 1:
        bits = tl.load(tile[:, None] + LOW_BYTES + lane * (UNIT // 16) + j * 4 + e * 2 + h).to(tl.int32)
        code += ((bits >> (i * 4 + p * 2 + r)) & 1) << 4
    if HIGH == 2:
        bits = tl.load(tile[:, None] + LOW_BYTES + lane * (UNIT // 8) + inside * 4 + e * 2 + i).to(tl.int32)
        code += ((bits >> (2 * (2 * p + r))) & 3) << 4
    value = (code - OFFSET).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    scales = tile + SCALE_AT
    row, half = n & 15, n & 7
    if SCALES == "six":
        pair = scales + row * 16 + inside * 2
        block = (scales + 256 + row * 4).to(tl.pointer_type(tl.float16))
        scale = tl.load(block).to(tl.float32) * tl.load(pair).to(tl.float32)
        minimum = tl.load(block + 1).to(tl.float32) * (
            tl.load(pair + 1).to(tl.float32) * 5.9604644775390625e-08
        )
        return value * scale[:, None] + minimum[:, None]
    if SCALES == "byte":
        signed = (
            tl.load(scales[:, None] + (row * (UNIT // 16) + inside * 2)[:, None] + (k >> 4)).to(tl.float32)
            - 128
        )
        block = tl.load((scales + UNIT + half * 4 + ((n >> 3) & 1) * 2).to(tl.pointer_type(tl.float16)))
        return value * (block.to(tl.float32)[:, None] * signed)
    pair = (scales + (half * GROUPS + inside) * 4 + ((n >> 3) & 1) * 2).to(tl.pointer_type(tl.float16))
    scaled = value * tl.load(pair).to(tl.float32)[:, None]
    if SCALES == "affine":
        # stored times 2^14
        scaled += (tl.load(pair + UNIT // 2).to(tl.float32) * 6.103515625e-05)[:, None]
    return scaled


@triton.jit
def _matmul_kernel(
    data,
    table,
    row_scale,
    x,
    x_scale,
    y,
    depth,
    rows,
    all_tiles,
    tokens,
    y_stride,
    BUCKET: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SCALES: tl.constexpr,
    OFFSET: tl.constexpr,
    TABLE: tl.constexpr,
    UNIT: tl.constexpr,
    TILE_BYTES: tl.constexpr,
):
    """y [tokens, rows]; one program a block of ROWS rows, over all columns, so that sums have one order."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.arange(0, COLUMNS)
    k = tl.arange(0, 32)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    GROUPS: tl.constexpr = UNIT // 32
    for step in range(depth):
        for inside in range(GROUPS):
            weight = _weights(
                data, table, n, step, inside, all_tiles, LOW, HIGH, SCALES, OFFSET, TABLE, UNIT, TILE_BYTES
            )
            at = x + (step * GROUPS + inside) * (BUCKET * 32) + m[None, :] * 32 + k[:, None]
            part = tl.load(at, mask=m[None, :] < tokens, other=0.0)
            sums = tl.dot(weight.to(tl.float16), part, sums)
    sums = sums * tl.load(row_scale + n)[:, None] * tl.load(x_scale + m, mask=m < tokens, other=0.0)[None, :]
    inside_y = (n[:, None] < rows) & (m[None, :] < tokens)
    tl.store(y + m[None, :].to(tl.int64) * y_stride + n[:, None], sums, mask=inside_y)


@triton.jit
def _expand_kernel(
    data,
    table,
    factor,
    out,
    first,
    all_tiles,
    padded,
    ROWS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SCALES: tl.constexpr,
    OFFSET: tl.constexpr,
    TABLE: tl.constexpr,
    UNIT: tl.constexpr,
    TILE_BYTES: tl.constexpr,
):
    local = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = first + local
    step = tl.program_id(1)
    scale = tl.load(factor + n)[:, None]
    GROUPS: tl.constexpr = UNIT // 32
    for inside in range(GROUPS):
        weight = _weights(
            data, table, n, step, inside, all_tiles, LOW, HIGH, SCALES, OFFSET, TABLE, UNIT, TILE_BYTES
        )
        column = step * UNIT + inside * 32 + tl.arange(0, 32)
        at = out + local[:, None].to(tl.int64) * padded + column[None, :]
        tl.store(at, (weight * scale).to(tl.float16))


@triton.jit
def row_factor(peak):
    """The power of two that takes a row's largest magnitude into [2^14, 2^15), and its inverse."""
    exponent = tl.minimum(tl.maximum(peak.to(tl.int32, bitcast=True) >> 23, 16), 254)
    times = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return times, ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _pack_rows_kernel(
    x, out, scale, x_stride, columns, padded, group_stride, row_stride, WIDTH: tl.constexpr
):
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDTH)
    peak = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, columns, WIDTH):
        part = tl.load(x + m * x_stride + start + k, mask=start + k < columns, other=0.0)
        peak = tl.maximum(peak, tl.abs(part))
    times, inverse = row_factor(tl.max(peak, 0))
    tl.store(scale + m, inverse)
    for start in range(0, padded, WIDTH):
        column = start + k
        part = tl.load(x + m * x_stride + column, mask=column < columns, other=0.0)
        at = out + (column // 32) * group_stride + m * row_stride + column % 32
        tl.store(at, (part * times).to(tl.float16), mask=column < padded)


def constants(layout: Layout) -> dict[str, object]:
    """What a layout fixes at compile time."""
    return {
        "LOW": layout.low,
        "HIGH": layout.high,
        "SCALES": layout.scales,
        "OFFSET": layout.offset,
        "TABLE": bool(layout.table),
        "UNIT": layout.unit,
        "TILE_BYTES": layout.tile_bytes,
    }


@cache
def _table(layout: Layout, device: torch.device) -> Tensor:
    return torch.tensor(layout.table or (0,), dtype=torch.uint8, device=device)


def pack_rows(x: Tensor) -> PackedRows:
    rows, columns = x.shape
    packed = empty_rows(rows, columns, x.device)
    padded = -(-columns // 256) * 256
    _pack_rows_kernel[(rows,)](
        x, packed.data, packed.scale, x.stride(0), columns, padded, *packed.strides, WIDTH=1024
    )
    return packed


def matmul(x: PackedRows, weight: PackedWeight, out: Tensor) -> None:
    assert x.bucket is not None
    _matmul_kernel[(weight.padded_rows // _ROWS,)](
        weight.data,
        _table(weight.layout, out.device),
        weight.row_scale,
        x.data,
        x.scale,
        out,
        weight.data.shape[0],
        weight.rows,
        weight.data.shape[1],
        x.rows,
        out.stride(0),
        BUCKET=x.bucket,
        COLUMNS=max(16, 1 << (x.bucket - 1).bit_length()),
        ROWS=_ROWS,
        **constants(weight.layout),
        num_warps=2,
    )


def expand(weight: PackedWeight, first: int, out: Tensor) -> None:
    """Rows from `first` on as float16 into out [rows, padded columns], times weight.expand_factor."""
    _expand_kernel[(len(out) // _ROWS, weight.data.shape[0])](
        weight.data,
        _table(weight.layout, out.device),
        weight.expand_factor,
        out,
        first,
        weight.data.shape[1],
        weight.padded_columns,
        ROWS=_ROWS,
        **constants(weight.layout),
        num_warps=4,
    )
