"""The tile layout in which kernels read quantised weights, and packing and unpacking in torch.

A matrix [N, K] is cut into tiles of 16 rows and `unit` columns, stored as [K/unit][N/16]: the share of a
block of rows in one step along K is one contiguous copy. Inside a tile come the low bits of the codes, the
high bits, and the scales, all in the order in which the lanes of a warp read them for mma.m16n8k16: lane
4g + t holds rows g and g + 8 (r = 0, 1) of columns 64 j + 32 h + 8 t + 4 i + 2 p + e. Rows are filled up to
128, columns to 256.

Scales are multiplied by a power of two for each row, so that the kernels' float16 arithmetic neither
overflows nor loses small scales; `row_scale` is its inverse.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from bough.gguf.quants import FP4_VALUES, IQ4_VALUES, Fields, dequantise, fields
from bough.gguf.types import QuantType

ROW_BLOCK = 128
COLUMN_BLOCK = 256
_SLICE = 1 << 25  # weights repacked at a time


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tile stores weights. `offset` is subtracted from a code; `table` maps codes to values + 128."""

    low: Literal[4, 8, 16]
    high: Literal[0, 1, 2]
    scales: Literal["six", "byte", "half", "affine", "none"]
    unit: Literal[128, 256]
    offset: int = 0
    table: tuple[int, ...] = ()

    @property
    def low_bytes(self) -> int:
        return 2 * self.unit * self.low

    @property
    def high_bytes(self) -> int:
        return 2 * self.unit * self.high

    @property
    def tile_bytes(self) -> int:
        scales = {
            "six": self.unit + 64,
            "byte": self.unit + 32,
            "half": self.unit,
            "affine": 2 * self.unit,
            "none": 0,
        }[self.scales]
        return self.low_bytes + self.high_bytes + scales


LAYOUTS: dict[QuantType, Layout] = {
    QuantType.Q4_K: Layout(4, 0, "six", 256),
    QuantType.Q5_K: Layout(4, 1, "six", 256),
    QuantType.Q6_K: Layout(4, 2, "byte", 128, offset=32),
    QuantType.Q3_K: Layout(4, 0, "byte", 128, offset=4),
    QuantType.IQ4_XS: Layout(4, 0, "byte", 128, offset=128, table=tuple(v + 128 for v in IQ4_VALUES)),
    QuantType.Q8_0: Layout(8, 0, "half", 128, offset=128),
    QuantType.Q4_0: Layout(4, 0, "half", 256, offset=8),
    QuantType.Q5_0: Layout(4, 1, "half", 256, offset=16),
    QuantType.IQ4_NL: Layout(4, 0, "half", 256, offset=128, table=tuple(v + 128 for v in IQ4_VALUES)),
    QuantType.MXFP4: Layout(4, 0, "half", 256, offset=128, table=tuple(v + 128 for v in FP4_VALUES)),
    QuantType.Q4_1: Layout(4, 0, "affine", 256),
    QuantType.Q5_1: Layout(4, 1, "affine", 256),
}
DENSE = Layout(16, 0, "none", 128)

# The factor of a tile's weights, 2 at most, when they are expanded to float16. The larger it is, the smaller
# a row may be, relative to the largest one, before its weights lose bits.
_EXPANSION = 8192.0


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [rows, columns] in tiles."""

    data: Tensor  # uint8 [K/unit, N/16, tile bytes]
    row_scale: Tensor  # float32 [N]: scale of a tile's weights
    expand_factor: Tensor  # float32 [N]: applied when they are expanded to float16
    expand_scale: Tensor  # float32 []: scale of expanded weights
    layout: Layout
    rows: int
    columns: int
    int8_rows: int = 0  # how many of the first rows are multiplied in int8 where x has more than 64 rows

    @property
    def padded_rows(self) -> int:
        return self.data.shape[1] * 16

    @property
    def padded_columns(self) -> int:
        return self.data.shape[0] * self.layout.unit

    @property
    def nbytes(self) -> int:
        return self.data.numel()


def with_int8(weight: PackedWeight, rows: int) -> PackedWeight:
    """Return the matrix with its first `rows` rows multiplied in int8 for prompts, whole blocks of them."""
    return replace(weight, int8_rows=rows // ROW_BLOCK * ROW_BLOCK)


def has_layout(type: QuantType) -> bool:
    """Return whether tiles of this type are as small as its blocks; other types are held as float16."""
    return type in LAYOUTS


def layout_of(type: QuantType) -> Layout:
    return LAYOUTS.get(type, DENSE)


def empty_packed(
    type: QuantType, rows: int, columns: int, device: torch.device, space: Tensor | None = None
) -> PackedWeight:
    """Return an uninitialised matrix in tiles, at the start of `space`, uint8, where that is given."""
    layout = layout_of(type)
    padded, width = -(-rows // ROW_BLOCK) * ROW_BLOCK, -(-columns // COLUMN_BLOCK) * COLUMN_BLOCK
    shape = (width // layout.unit, padded // 16, layout.tile_bytes)
    if space is None:
        tiles = torch.empty(shape, dtype=torch.uint8, device=device)
    else:
        tiles = space[: prod(shape)].view(shape)
    scales = (torch.empty(padded, device=device), torch.empty(padded, device=device))
    return PackedWeight(tiles, *scales, torch.empty((), device=device), layout, rows, columns)


def pack(data: Tensor, type: QuantType, space: Tensor | None = None) -> PackedWeight:
    """Return packed rows, uint8 [N, row bytes], as tiles on the same device, a slice of rows at a time.

    At the start of `space` where that is given; tiles of a matrix are a multiple of 256 bytes.
    """
    rows, columns = len(data), data.shape[1] // type.block_bytes * type.block_elements
    packed = empty_packed(type, rows, columns, data.device, space)
    layout, padded, width = packed.layout, packed.padded_rows, packed.padded_columns
    step = max(ROW_BLOCK, _SLICE // width // ROW_BLOCK * ROW_BLOCK)
    for start in range(0, padded, step):
        stop = min(start + step, padded)
        part = data[start : min(stop, rows)]
        if layout.scales == "none":
            slice_tiles, scale = _pack_dense(part, type, stop - start, width)
        else:
            slice_tiles, scale = _pack_fields(fields(part, type), layout, stop - start, width)
        packed.data[:, start // 16 : stop // 16] = slice_tiles
        packed.row_scale[start:stop] = scale
    largest = packed.row_scale.amax()
    gain = _EXPANSION if layout.scales != "none" else 1.0
    return replace(packed, expand_factor=packed.row_scale / largest * gain, expand_scale=largest / gain)


def first_rows(weight: PackedWeight, rows: int) -> PackedWeight:
    """Return a copy of the first rows, whole blocks of them, in tiles."""
    assert rows % ROW_BLOCK == 0 and rows <= weight.rows, f"{rows} rows of {weight.rows}"
    data = weight.data[:, : rows // 16].contiguous()
    scales = weight.row_scale[:rows].clone(), weight.expand_factor[:rows].clone()
    return PackedWeight(data, *scales, weight.expand_scale, weight.layout, rows, weight.columns)


def _pack_dense(data: Tensor, type: QuantType, rows: int, width: int) -> tuple[Tensor, Tensor]:
    values = dequantise(data, type)
    values = pad(values, (0, width - values.shape[1], 0, rows - len(values)))
    factor = torch.ones(rows, device=data.device)
    if type != QuantType.F16:
        factor = _power(15 - _exponent(values.abs().amax(1)))
    parts = _fragments((values * factor[:, None]).half(), DENSE.unit)
    ordered = parts.permute(0, 1, 2, 3, 8, 4, 5, 6, 7, 9).contiguous()
    return ordered.view(*ordered.shape[:2], -1).view(torch.uint8), 1 / factor


def _pack_fields(source: Fields, layout: Layout, rows: int, width: int) -> tuple[Tensor, Tensor]:
    codes, unit = _grown(source.codes, rows, width), layout.unit
    span = source.codes.shape[1] // source.scale.shape[1]
    scale = _grown(source.scale, rows, width // span)
    exponent = _exponent(scale.abs().amax(1))
    parts = [_pack_low(codes, layout)]
    if layout.high:
        parts.append(_pack_high(codes, layout))
    tiles, depth = rows // 16, width // unit
    if layout.scales == "six":
        assert source.minimum is not None and source.scales is not None and source.minima is not None
        minimum = _grown(source.minimum, rows, width // span)
        factor = _power(torch.minimum(6 - exponent, 15 - _exponent(minimum.abs().amax(1))))
        pairs = torch.stack([_grown(part, rows, width // 32) for part in (source.scales, source.minima)], -1)
        parts.append(pairs.view(tiles, 16, depth, 16).permute(2, 0, 1, 3).reshape(depth, tiles, 256))
        halves = torch.stack([scale, -minimum], -1) * factor[:, None, None]
        halves = halves.half().view(tiles, 16, depth, 2).permute(2, 0, 1, 3)
        parts.append(_bytes(halves))
    elif layout.scales == "byte":
        assert source.scales is not None
        # a scale of 16 columns times that of its block stays below 2^15
        scales = _grown(source.scales, rows, width // 16)
        factor = _power(15 - exponent - _exponent(scales.float().abs().amax(1)))
        signed = scales.view(torch.uint8) ^ 128
        parts.append(signed.view(tiles, 16, depth, -1).permute(2, 0, 1, 3).reshape(depth, tiles, unit))
        halves = (scale * factor[:, None]).half().repeat_interleave(span // unit, 1)
        # [depth, tile, g, r]
        parts.append(_bytes(halves.view(tiles, 2, 8, depth).permute(3, 0, 2, 1)))
    else:
        factor = _power(15 - exponent)
        columns = [scale]
        if layout.scales == "affine":
            assert source.minimum is not None
            minimum = _grown(source.minimum, rows, width // span)
            factor = torch.minimum(factor, _power(25 - _exponent(minimum.abs().amax(1))))
            columns.append(minimum * 2.0**-10)
        for column in columns:
            halves = (column * factor[:, None]).half()
            # [depth, tile, g, group, r]
            halves = halves.view(tiles, 2, 8, depth, unit // 32).permute(3, 0, 2, 4, 1)
            parts.append(_bytes(halves))
    # A code means code * 2^-24, the float16 with the same bits.
    return torch.cat(parts, -1), 2.0**24 / factor


def unpack(weight: PackedWeight) -> Tensor:
    """Return float32 [rows, columns], bit-identical to the dequantised blocks unless a scale underflowed."""
    layout, tiles, depth = weight.layout, weight.data.shape[1], weight.data.shape[0]
    low, high, scales = weight.data.split(
        [layout.low_bytes, layout.high_bytes, layout.tile_bytes - layout.low_bytes - layout.high_bytes], -1
    )
    scale = weight.row_scale[:, None]
    if layout.scales == "none":
        parts = low.contiguous().view(torch.float16).view(depth, tiles, -1, 2, 2, 8, 4, 2, 2, 2)
        values = _from_fragments(parts.permute(0, 1, 2, 3, 5, 6, 7, 8, 4, 9)).float() * scale
        return values[: weight.rows, : weight.columns]
    codes = _unpack_low(low, layout)
    if layout.high:
        codes |= _unpack_high(high, layout) << 4
    if layout.table:
        codes = torch.tensor(layout.table, dtype=torch.uint8, device=codes.device)[codes.int()]
    values = codes.float() - layout.offset
    scale = scale * 2.0**-24
    if layout.scales == "six":
        pairs, halves = scales.split([256, 64], -1)
        sub, minima = (
            pairs.reshape(depth, tiles, 16, 8, 2).permute(1, 2, 0, 3, 4).flatten(0, 1).float().unbind(-1)
        )
        block, minimum = _halves(halves, depth, tiles, 16, 2).permute(1, 2, 0, 3).flatten(0, 1).unbind(-1)
        step = (block * scale)[..., None] * sub
        below = (-minimum * scale)[..., None] * minima
        values = values.unflatten(1, (depth, 8, 32)) * step[..., None] - below[..., None]
    elif layout.scales == "byte":
        signed, halves = scales.split([layout.unit, 32], -1)
        sub = signed.reshape(depth, tiles, 16, -1).permute(1, 2, 0, 3).flatten(0, 1).float() - 128
        block = _halves(halves, depth, tiles, 8, 2).permute(1, 3, 2, 0).reshape(-1, depth)
        values = values.unflatten(1, (depth, -1, 16)) * ((block * scale)[..., None] * sub)[..., None]
    else:
        columns = _halves(scales, depth, tiles, -1, 8, layout.unit // 32, 2).permute(2, 1, 5, 3, 0, 4)
        columns = columns.reshape(columns.shape[0], len(values), -1)
        values = values.unflatten(1, (-1, 32)) * (columns[0] * scale)[..., None]
        if layout.scales == "affine":
            values += (columns[1] * (scale * 2.0**10))[..., None]
    return values.flatten(1)[: weight.rows, : weight.columns]


def _grown(part: Tensor, rows: int, columns: int) -> Tensor:
    return pad(part, (0, columns - part.shape[1], 0, rows - len(part)))


def _exponent(values: Tensor) -> Tensor:
    """The n for which 2^(n-1) <= value < 2^n; 0 for 0."""
    return torch.frexp(values).exponent


def _power(exponent: Tensor) -> Tensor:
    """2^exponent as float32, exactly."""
    return ((exponent.int() + 127) << 23).view(torch.float32)


def _bytes(halves: Tensor) -> Tensor:
    """float16 [depth, tiles, ...] to its bytes, uint8 [depth, tiles, n]."""
    return halves.contiguous().flatten(2).view(torch.uint8)


def _halves(data: Tensor, *shape: int) -> Tensor:
    return data.contiguous().view(torch.float16).float().reshape(shape)


def _fragments(codes: Tensor, unit: int) -> Tensor:
    """[N, K] to [depth, tile, j, h, g, t, i, p, r, e]; see the module's first lines."""
    rows, columns = codes.shape
    parts = codes.view(rows // 16, 2, 8, columns // unit, unit // 64, 2, 4, 2, 2, 2)
    return parts.permute(3, 0, 4, 5, 2, 6, 7, 8, 1, 9)


def _from_fragments(parts: Tensor) -> Tensor:
    depth, tiles, spans = parts.shape[:3]
    return parts.permute(1, 8, 4, 0, 2, 3, 5, 6, 7, 9).reshape(tiles * 16, depth * spans * 64)


def _pack_low(codes: Tensor, layout: Layout) -> Tensor:
    parts = _fragments(codes, layout.unit)
    depth, tiles = parts.shape[:2]
    if layout.low == 8:  # [j, h, g, t, r, i, p, e]
        ordered = parts.permute(0, 1, 2, 3, 4, 5, 8, 6, 7, 9)
    elif layout.table:  # the nibbles of a half word select four values: [j, g, t, r, i, h, p], e in one byte
        parts = parts & 15
        nibbles = parts[..., 0] | (parts[..., 1] << 4)
        ordered = nibbles.permute(0, 1, 2, 4, 5, 8, 6, 3, 7)
    else:  # a mask over a word gives columns e = 0 and 1: [j, g, t, r, i, e, p], h in one byte
        parts = parts & 15
        nibbles = parts[:, :, :, 0] | (parts[:, :, :, 1] << 4)
        ordered = nibbles.permute(0, 1, 2, 3, 4, 7, 5, 8, 6)
    return ordered.reshape(depth, tiles, layout.low_bytes)


def _unpack_low(low: Tensor, layout: Layout) -> Tensor:
    depth, tiles = low.shape[:2]
    if layout.low == 8:
        parts = low.reshape(depth, tiles, -1, 2, 8, 4, 2, 2, 2, 2).permute(0, 1, 2, 3, 4, 5, 7, 8, 6, 9)
    elif layout.table:
        nibbles = low.reshape(depth, tiles, -1, 8, 4, 2, 2, 2, 2).permute(0, 1, 2, 7, 3, 4, 6, 8, 5)
        parts = torch.stack((nibbles & 15, nibbles >> 4), -1)
    else:
        nibbles = low.reshape(depth, tiles, -1, 8, 4, 2, 2, 2, 2).permute(0, 1, 2, 3, 4, 6, 8, 5, 7)
        parts = torch.stack((nibbles & 15, nibbles >> 4), 3)
    return _from_fragments(parts)


def _pack_high(codes: Tensor, layout: Layout) -> Tensor:
    """A lane's high bits as words of 16 pairs: pair number 4 i + 2 p + r, halves e = 0 and 1."""
    parts = _fragments(codes, layout.unit) >> 4
    depth, tiles = parts.shape[:2]
    if layout.high == 1:  # bytes [g, t, j, e, h], bits [i, p, r]
        parts = parts.permute(0, 1, 4, 5, 2, 9, 3, 6, 7, 8).flatten(-3)
        shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)
    else:  # bytes [g, t, j, h, e, i], pairs of bits [p, r]
        parts = parts.permute(0, 1, 4, 5, 2, 3, 9, 6, 7, 8).flatten(-2)
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)
    return (parts << shifts).sum(-1, dtype=torch.uint8).reshape(depth, tiles, layout.high_bytes)


def _unpack_high(high: Tensor, layout: Layout) -> Tensor:
    depth, tiles = high.shape[:2]
    if layout.high == 1:
        shifts = torch.arange(8, dtype=torch.uint8, device=high.device)
        parts = ((high.reshape(depth, tiles, 8, 4, -1, 2, 2, 1) >> shifts) & 1).unflatten(-1, (2, 2, 2))
        parts = parts.permute(0, 1, 4, 6, 2, 3, 7, 8, 9, 5)
    else:
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=high.device)
        parts = ((high.reshape(depth, tiles, 8, 4, -1, 2, 2, 2, 1) >> shifts) & 3).unflatten(-1, (2, 2))
        parts = parts.permute(0, 1, 4, 5, 2, 3, 7, 8, 9, 6)
    return _from_fragments(parts)
