"""Triton kernels of matmuls in int8 with scales for groups of 128 columns; one source for every card.

`tl.dot` of int8 gives int32: mma.m16n8k32 from Ampere on, warp-group mma on Hopper.
"""

import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.quant_matmul.int8 import GROUP, ROW_TILE, Int8Matrix, empty_int8
from bough.kernels.quant_matmul.layout import ROW_BLOCK, PackedWeight
from bough.kernels.quant_matmul.rows import PackedRows
from bough.kernels.quant_matmul.triton_kernels import _fields, _low, _weights, constants, table_of
from bough.kernels.runtime.device import capability_of

_REQUANTISED_ROWS = 64  # of a program
_QUANTISED_GROUPS = 8  # of a program


@triton.jit
def _rounded(value):
    """The nearest integer of a value within +-127, as int32; 1.5 * 2^23 has it in its lowest bits."""
    return (value + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def _inverse(peak):
    return tl.where(peak > 0.0, 127.0 / tl.where(peak > 0.0, peak, 1.0), 0.0)


@triton.jit
def _quantise_kernel(x, row_scale, codes, scales, columns, padded, GROUPS: tl.constexpr):
    """GROUPS groups of one row a program: float16 with a scale for each row to int8."""
    row = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = group < columns // 128
    value = tl.load(x + row.to(tl.int64) * columns + column, mask=inside[:, None], other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(value), 1)
    code = _rounded(value * _inverse(peak)[:, None])
    at = codes + row.to(tl.int64) * columns + column
    tl.store(at, code.to(tl.int8), mask=inside[:, None])
    scale = peak * (1 / 127) * tl.load(row_scale + row)
    tl.store(scales + group * padded + row, scale, mask=inside)


@triton.jit
def _requantise_kernel(
    data, table, row_scale, codes, scales, first, all_tiles, columns, padded,
    ROWS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALES: tl.constexpr, OFFSET: tl.constexpr,
    TABLE: tl.constexpr, UNIT: tl.constexpr, TILE_BYTES: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one unit of columns a program, from tiles to int8; see `_weights` for their order."""
    PER: tl.constexpr = 2 if LOW == 16 else 4
    HALVES: tl.constexpr = 2 if LOW == 4 else 1
    WORDS: tl.constexpr = UNIT // (PER * HALVES)
    GROUPS: tl.constexpr = UNIT // 128
    local = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = first + local
    step = tl.program_id(1)
    g, r = (n & 7)[:, None], ((n >> 3) & 1)[:, None]
    c = tl.arange(0, WORDS)[None, :]
    tile = data + ((step * all_tiles + n // 16).to(tl.int64) * TILE_BYTES)[:, None]
    low = _low(tile, g, r, c, LOW)
    peak = tl.zeros((ROWS, WORDS), tl.float32)
    for h in tl.static_range(HALVES):
        high, scale, minimum = _fields(tile, low, g, r, c, h, LOW, HIGH, SCALES, UNIT)
        for q in tl.static_range(PER):
            weight = _weights(low, high, scale, minimum, table, r, c, h, q, LOW, HIGH, OFFSET, TABLE)
            peak = tl.maximum(peak, tl.abs(weight))
    # The words of a group are adjacent.
    most = tl.max(tl.reshape(peak, (ROWS, GROUPS, WORDS // GROUPS)), 2)
    group = step * GROUPS + tl.arange(0, GROUPS)
    factor = tl.load(row_scale + n) * (1 / 127)
    tl.store(scales + group[None, :] * padded + local[:, None], most * factor[:, None])
    times = tl.broadcast_to(_inverse(most)[:, :, None], (ROWS, GROUPS, WORDS // GROUPS))
    times = tl.reshape(times, (ROWS, WORDS))
    for h in tl.static_range(HALVES):
        high, scale, minimum = _fields(tile, low, g, r, c, h, LOW, HIGH, SCALES, UNIT)
        several = tl.zeros((ROWS, WORDS), tl.int32)
        for q in tl.static_range(PER):
            weight = _weights(low, high, scale, minimum, table, r, c, h, q, LOW, HIGH, OFFSET, TABLE)
            several |= (_rounded(weight * times) & 255) << (8 * q)
        # PER columns are adjacent.
        column = step * UNIT + (c // (32 // PER) * HALVES + h) * 32 + c % (32 // PER) * PER
        target = codes + local[:, None].to(tl.int64) * columns + column
        if LOW == 16:
            tl.store(target.to(tl.pointer_type(tl.int16)), several.to(tl.int16))
        else:
            tl.store(target.to(tl.pointer_type(tl.int32)), several)


@triton.jit(do_not_specialize=["rows", "columns"])
def _matmul_kernel(
    x, x_scales, weight, weight_scales, out, rows, columns, x_padded, weight_padded, out_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows and BLOCK_N columns of the output a program."""
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    # Programs that run together share the tiles of BAND blocks of rows, so that the L2 cache serves them.
    band = tl.program_id(0) // (BAND * across)
    within = tl.program_id(0) % (BAND * across)
    high = tl.minimum(down - band * BAND, BAND)
    first_m, first_n = (band * BAND + within % high) * BLOCK_M, within // high * BLOCK_N
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, 128)
    # Constant offsets plus one scalar a step: 64-bit offsets would take too many registers.
    x_at, weight_at = m[:, None] * K + k[None, :], n[None, :] * K + k[:, None]
    x += first_m.to(tl.int64) * K
    weight += first_n.to(tl.int64) * K
    x_scales += first_m
    weight_scales += first_n
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(K // 128):
        a = tl.load(x + group * 128 + x_at)
        b = tl.load(weight + group * 128 + weight_at)
        a_scale = tl.load(x_scales + group * x_padded + m)
        b_scale = tl.load(weight_scales + group * weight_padded + n)
        part = tl.dot(a, b, out_dtype=tl.int32).to(tl.float32)
        sums += part * (a_scale[:, None] * b_scale[None, :])
    m += first_m
    n += first_n
    at = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(at, sums, mask=(m < rows)[:, None] & (n < columns)[None, :])


def tiles(capability: tuple[int, int] | None) -> dict[str, int]:
    """Return rows and columns of a program, blocks of rows in a band, stages, warps.

    Int32 and float32 sums of 128 x 128 are 128 registers of a thread with eight warps; 128 x 256 spills.
    """
    sizes = {"BLOCK_M": 128, "BLOCK_N": 128, "BAND": 16, "num_stages": 3, "num_warps": 8}
    if capability is None:  # not of NVIDIA
        return sizes | {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 1, "num_warps": 4}
    return sizes


def quantise_rows(x: PackedRows) -> Int8Matrix:
    """Return packed rows in float16 in int8."""
    assert x.bucket is None and x.data.is_contiguous(), f"{x.rows} rows"
    out = empty_int8(x.rows, x.padded_columns, x.data.device)
    grid = (x.rows, triton.cdiv(out.columns // GROUP, _QUANTISED_GROUPS))
    _quantise_kernel[grid](
        x.data, x.scale, out.codes, out.scales, out.columns, out.scales.shape[1],
        GROUPS=_QUANTISED_GROUPS, num_warps=4,
    )  # fmt: skip
    return out


def requantise(weight: PackedWeight, first: int, out: Int8Matrix) -> None:
    assert first % ROW_BLOCK == 0 and out.columns == weight.padded_columns, (first, out.codes.shape)
    blocks = -(-out.rows // _REQUANTISED_ROWS)
    assert first + blocks * _REQUANTISED_ROWS <= weight.padded_rows, (first, out.rows, weight.padded_rows)
    _requantise_kernel[(blocks, weight.data.shape[0])](
        weight.data, table_of(weight.layout, weight.data.device), weight.row_scale, out.codes, out.scales,
        first, weight.data.shape[1], out.columns, out.scales.shape[1],
        ROWS=_REQUANTISED_ROWS, **constants(weight.layout), num_warps=4,
    )  # fmt: skip


def matmul(x: Int8Matrix, weight: Int8Matrix, out: Tensor) -> None:
    sizes = tiles(capability_of(out.device))
    assert ROW_TILE % sizes["BLOCK_M"] == 0 and ROW_TILE % sizes["BLOCK_N"] == 0, sizes
    blocks = triton.cdiv(x.rows, sizes["BLOCK_M"]) * triton.cdiv(weight.rows, sizes["BLOCK_N"])
    _matmul_kernel[(blocks,)](
        x.codes, x.scales, weight.codes, weight.scales, out, x.rows, weight.rows,
        x.scales.shape[1], weight.scales.shape[1], out.stride(0), K=x.columns, **sizes,
    )  # fmt: skip
