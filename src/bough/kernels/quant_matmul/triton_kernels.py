"""The matmuls with tiles in Triton, for GPUs without the CUDA C++ kernels; slower, same layout."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.quant_matmul.layout import Layout, PackedWeight
from bough.kernels.quant_matmul.rows import PackedRows, empty_rows
from bough.kernels.runtime.dry_run import cache_tensor

_ROWS = 64  # of a matrix in one program; with two warps one instruction serves every number of tokens
_WARPS = 2
_PROGRAMS = 1024  # columns are split until there are this many


@triton.jit
def _word(at):
    return tl.load(at.to(tl.pointer_type(tl.int32)))


@triton.jit
def _half(words, upper):
    """The lower or upper float16 of each word, as float32."""
    return ((words >> (16 * upper)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _number(code, offset: tl.constexpr):
    """An integer below 2^23, minus an offset, as float32. 2^23 + code has the code in its lowest bits: an
    addition is faster than a conversion."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + offset)


@triton.jit
def _low(tile, g, r, c, LOW: tl.constexpr):
    """Words of codes [R, C]; see `_weights` for their order."""
    if LOW == 16:
        return _word(tile + (c >> 4) * 1024 + r * 512 + g * 64 + (c & 15) * 4)
    return _word(tile + (c >> 3) * 512 + g * 64 + ((c >> 1) & 3) * 16 + r * 8 + (c & 1) * 4)


@triton.jit
def _high(tile, g, c, H: tl.constexpr, HIGH: tl.constexpr, UNIT: tl.constexpr, LOW: tl.constexpr):
    at = tile + 2 * UNIT * LOW + (4 * g + ((c >> 1) & 3)) * (UNIT * HIGH // 16)
    if HIGH == 1:
        return _word(at + (c >> 3) * 4)
    return _word(at + ((c >> 3) * 2 + H) * 4)


@triton.jit
def _scales(
    tile, g, r, c, H: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALES: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """The factor of codes, and the offset: float32 [R, C]."""
    SMALLEST: tl.constexpr = 5.9604644775390625e-08  # 2^-24, the value of a code of 1
    at = tile + 2 * UNIT * (LOW + HIGH)
    if SCALES == "six":
        pair = _word(at + (g + 8 * r) * 16 + (c >> 3) * 4) >> (16 * H)
        block = _word(at + 256 + (g + 8 * r) * 4)
        scale = _half(block, 0) * (_number(pair & 255, 0) * SMALLEST)
        return scale, _half(block, 1) * (_number((pair >> 8) & 255, 0) * SMALLEST)
    if SCALES == "byte":
        bytes = _word(at + (g + 8 * r) * (UNIT // 16) + (c >> 3) * 4)
        signed = _number((bytes >> (16 * H + 8 * ((c >> 2) & 1))) & 255, 128)
        scale = _half(_word(at + UNIT + g * 4), r) * (signed * SMALLEST)
        return scale, tl.zeros_like(scale)
    group = (c >> 3) * (2 if LOW == 4 else 1) + H
    pair = at + (g * (UNIT // 32) + group) * 4
    scale = _half(_word(pair), r) * SMALLEST
    if SCALES == "affine":
        return scale, _half(_word(pair + UNIT), r) * 6.103515625e-05  # stored times 2^14
    return scale, tl.zeros_like(scale)


@triton.jit
def _fields(
    tile, low, g, r, c, H: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALES: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """The high bits, scales and minima of half H of words [R, C], as far as the layout has them."""
    high, scale, minimum = low, 0.0, 0.0
    if HIGH:
        high = _high(tile, g, c, H, HIGH, UNIT, LOW)
    if LOW < 16:
        scale, minimum = _scales(tile, g, r, c, H, LOW, HIGH, SCALES, UNIT)
    return high, scale, minimum


@triton.jit
def _weights(
    low, high, scale, minimum, table, r, c, H: tl.constexpr, Q: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Weights of one column in PER from words [R, C]: float32 [R, C], without row scales.

    A word of a row holds PER neighbouring columns, or where codes are nibbles those of both halves H = 0, 1
    of 64 columns; c counts words in the order of columns, Q is the column among PER. So everything from a
    word to the matmul is elementwise, and need not move between lanes.
    """
    if LOW == 16:
        return _half(low, Q)
    P: tl.constexpr = Q // 2
    E: tl.constexpr = Q % 2
    if TABLE:
        return tl.load(table + ((low >> (8 * (2 * H + P) + 4 * E)) & 15)) * scale
    SHIFT: tl.constexpr = 8 * Q if LOW == 8 else 8 * (2 * E + P) + 4 * H
    code = (low >> SHIFT) & (255 if LOW == 8 else 15)
    if HIGH == 1:
        code |= ((high >> (8 * (2 * E + H) + 2 * P + 4 * (c & 1) + r)) & 1) << 4
    if HIGH == 2:
        code |= ((high >> (16 * E + 4 * P + 8 * (c & 1) + 2 * r)) & 3) << 4
    return _number(code, OFFSET) * scale + minimum


@triton.jit
def _matmul_kernel(
    data, table, row_scale, x, x_scale, y, depth, rows, all_tiles, tokens, y_stride, split_stride,
    BUCKET: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    SCALES: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr,
    TILE_BYTES: tl.constexpr,
):  # fmt: skip
    """y [splits, tokens, rows]; a program's columns depend on the matrix alone, so sums have one order."""
    PER: tl.constexpr = 2 if LOW == 16 else 4
    HALVES: tl.constexpr = 2 if LOW == 4 else 1
    WORDS: tl.constexpr = UNIT // (PER * HALVES)
    x_type: tl.constexpr = tl.int32 if LOW == 16 else tl.int64
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    g, r = (n & 7)[:, None], ((n >> 3) & 1)[:, None]
    c, k = tl.arange(0, WORDS)[None, :], tl.arange(0, WORDS)[:, None]
    m = tl.arange(0, COLUMNS)[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    x_words = x.to(tl.pointer_type(x_type)) + (k // (32 // PER)) * (HALVES * BUCKET * 32 // PER)
    x_words += m * (32 // PER) + k % (32 // PER)
    splits = tl.num_programs(1)
    first, last = tl.program_id(1) * depth // splits, (tl.program_id(1) + 1) * depth // splits
    for step in range(first, last):
        tile = data + ((step * all_tiles + n // 16).to(tl.int64) * TILE_BYTES)[:, None]
        low = _low(tile, g, r, c, LOW)
        for h in tl.static_range(HALVES):
            high, scale, minimum = _fields(tile, low, g, r, c, h, LOW, HIGH, SCALES, UNIT)
            at = x_words + (step * (UNIT // 32) + h) * (BUCKET * 32 // PER)
            several = tl.load(at, mask=m < tokens, other=0)
            for q in tl.static_range(PER):
                weight = _weights(low, high, scale, minimum, table, r, c, h, q, LOW, HIGH, OFFSET, TABLE)
                part = (several >> (16 * q)).to(tl.int16).to(tl.float16, bitcast=True)
                sums = tl.dot(weight.to(tl.float16), part, sums)
    sums = sums * tl.load(row_scale + n)[:, None] * tl.load(x_scale + m, mask=m < tokens, other=0.0)
    target = y + tl.program_id(1).to(tl.int64) * split_stride + m.to(tl.int64) * y_stride + n[:, None]
    tl.store(target, sums, mask=(n[:, None] < rows) & (m < tokens))


@triton.jit
def _add_kernel(parts, y, rows, splits, y_stride, split_stride, WIDTH: tl.constexpr):
    """Reduce split-K partial sums parts [splits, tokens, rows] to y [tokens, rows], in order."""
    n = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    m = tl.program_id(1).to(tl.int64)
    sums = tl.zeros((WIDTH,), tl.float32)
    for split in range(splits):
        sums += tl.load(parts + split * split_stride + m * rows + n, mask=n < rows, other=0.0)
    tl.store(y + m * y_stride + n, sums, mask=n < rows)


@triton.jit
def _expand_kernel(
    data, table, factor, out, first, all_tiles, padded, ROWS: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, SCALES: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr,
    TILE_BYTES: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = 2 if LOW == 16 else 4
    HALVES: tl.constexpr = 2 if LOW == 4 else 1
    WORDS: tl.constexpr = UNIT // (PER * HALVES)
    local = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = first + local
    step = tl.program_id(1)
    g, r = (n & 7)[:, None], ((n >> 3) & 1)[:, None]
    c = tl.arange(0, WORDS)[None, :]
    times = tl.load(factor + n)[:, None]
    tile = data + ((step * all_tiles + n // 16).to(tl.int64) * TILE_BYTES)[:, None]
    low = _low(tile, g, r, c, LOW)
    for h in tl.static_range(HALVES):
        high, scale, minimum = _fields(tile, low, g, r, c, h, LOW, HIGH, SCALES, UNIT)
        several = tl.zeros((ROWS, WORDS), tl.int64)
        for q in tl.static_range(PER):
            weight = _weights(low, high, scale, minimum, table, r, c, h, q, LOW, HIGH, OFFSET, TABLE)
            bits = (weight * times).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
            several |= bits << (16 * q)
        # PER columns are adjacent.
        column = step * UNIT + (c // (32 // PER) * HALVES + h) * 32 + c % (32 // PER) * PER
        target = out + local[:, None].to(tl.int64) * padded + column
        if LOW == 16:
            tl.store(target.to(tl.pointer_type(tl.int32)), several.to(tl.int32))
        else:
            tl.store(target.to(tl.pointer_type(tl.int64)), several)


@triton.jit
def row_factor(peak):
    """The power of two that scales a row's largest magnitude into [2^14, 2^15), and its inverse."""
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


@triton.jit
def _scale_rows_kernel(out, scale, out_stride, columns, WIDTH: tl.constexpr):
    """Multiply WIDTH columns of one row by its scale, in place."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at = out + row * out_stride + column
    value = tl.load(at, mask=column < columns, other=0.0)
    tl.store(at, value * tl.load(scale + row), mask=column < columns)


def constants(layout: Layout) -> dict[str, object]:
    """Return the constexpr arguments of a layout."""
    return {
        "LOW": layout.low,
        "HIGH": layout.high,
        "SCALES": layout.scales,
        "OFFSET": layout.offset,
        "TABLE": bool(layout.table),
        "UNIT": layout.unit,
        "TILE_BYTES": layout.tile_bytes,
    }


@cache_tensor
def table_of(layout: Layout, device: torch.device) -> Tensor:
    return torch.tensor(layout.table or (0,), dtype=torch.float32, device=device) - layout.offset


def pack_rows(x: Tensor) -> PackedRows:
    rows, columns = x.shape
    packed = empty_rows(rows, columns, x.device)
    padded = -(-columns // 256) * 256
    _pack_rows_kernel[(rows,)](
        x, packed.data, packed.scale, x.stride(0), columns, padded, *packed.strides, WIDTH=1024
    )
    return packed


def scale_rows(out: Tensor, scale: Tensor) -> None:
    """Multiply each row of out [M, N] float32 by its scale [M], in place."""
    rows, columns = out.shape
    assert out.stride(1) == 1, f"{out.shape}, strides {out.stride()}"
    grid = (rows, -(-columns // 2048))
    _scale_rows_kernel[grid](out, scale, out.stride(0), columns, WIDTH=2048, num_warps=4)


def matmul(x: PackedRows, weight: PackedWeight, out: Tensor) -> None:
    assert x.bucket is not None and not x.grouped
    blocks, depth = weight.padded_rows // _ROWS, weight.data.shape[0]
    splits = min(depth, max(1, _PROGRAMS // blocks))
    parts = out if splits == 1 else torch.empty(splits, x.rows, weight.rows, device=out.device)
    _matmul_kernel[(blocks, splits)](
        weight.data, table_of(weight.layout, out.device), weight.row_scale, x.data, x.scale, parts, depth,
        weight.rows, weight.data.shape[1], x.rows, parts.stride(-2), 0 if splits == 1 else parts.stride(0),
        BUCKET=x.bucket, COLUMNS=max(16, 1 << (x.bucket - 1).bit_length()), ROWS=_ROWS,
        **constants(weight.layout), num_warps=_WARPS, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        grid = (-(-weight.rows // 1024), x.rows)
        _add_kernel[grid](parts, out, weight.rows, splits, out.stride(0), parts.stride(0), WIDTH=1024)


def expand(weight: PackedWeight, first: int, out: Tensor) -> None:
    """Write rows from `first` on as float16 to out [rows, padded columns], times weight.expand_factor."""
    _expand_kernel[(len(out) // _ROWS, weight.data.shape[0])](
        weight.data, table_of(weight.layout, out.device), weight.expand_factor, out, first,
        weight.data.shape[1], weight.padded_columns, ROWS=_ROWS, **constants(weight.layout), num_warps=4,
    )  # fmt: skip
