"""What the blocks of every tensor type hold, and their weights as floats, in plain torch.

The arithmetic order is part of the format: scales are multiplied together first, then by the integer, then
the minimum is subtracted, all in float32. Kernels are tested against this module.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from bough.errors import UnsupportedQuant
from bough.gguf.types import QuantType

# Weights handled at a time: enough to hide torch's cost per call, few enough that intermediates stay in a
# CPU's cache, and below 1 GiB on a GPU.
_SLICE_CPU = 1 << 19
_SLICE_DEVICE = 1 << 25

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# E2M1 values doubled; code 8 is a positive zero, as in the reference table
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True, slots=True)
class Fields:
    """Rows [N, K] as integers `codes`, and the scales that make them weights.

    scale * scales * value(code) - minimum * minima, or without minima + minimum. A value is the code less an
    offset, or comes from a table. Each belongs to a span of adjacent columns, as many as it has columns.
    """

    codes: Tensor  # uint8 [N, K]
    scale: Tensor  # float32
    minimum: Tensor | None = None
    scales: Tensor | None = None  # uint8 or int8
    minima: Tensor | None = None  # uint8


@dataclass(frozen=True, slots=True)
class _Format:
    """How the fields of blocks [N, blocks, bytes] are read, and which values the codes stand for."""

    read: Callable[[Tensor], Fields]
    offset: int = 0  # that is subtracted from a code
    table: tuple[int, ...] = ()


def fields(data: Tensor, type: QuantType) -> Fields:
    """Return the fields of rows, uint8 [N, row bytes], of a type without a code book."""
    return _FIELDS[type].read(data.reshape(len(data), -1, type.block_bytes))


def dequantise(data: Tensor, type: QuantType, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode whole rows: uint8 [..., row_bytes] on any device -> `dtype` [..., elements] on the same one."""
    assert data.dtype == torch.uint8, data.dtype
    assert data.shape[-1] % type.block_bytes == 0, (type.name, tuple(data.shape))
    blocks = data.reshape(-1, type.block_bytes)
    shape = (*data.shape[:-1], data.shape[-1] // type.block_bytes * type.block_elements)
    if type in _FLOATS:
        return _aligned(blocks).view(_FLOATS[type]).to(dtype).reshape(shape)
    if type is QuantType.I64:
        raise UnsupportedQuant(f"{type.name} holds whole numbers, needed weights")
    decode = _DECODERS.get(type) or partial(_weights, type)
    out = torch.empty((blocks.shape[0], type.block_elements), dtype=dtype, device=data.device)
    step = (_SLICE_CPU if data.device.type == "cpu" else _SLICE_DEVICE) // type.block_elements
    for start in range(0, blocks.shape[0], step):
        part = blocks[start : start + step]
        out[start : start + step] = decode(part).view(part.shape[0], type.block_elements)
    return out.reshape(shape)


def to_q4_0(data: Tensor, type: QuantType) -> Tensor:
    """Return rows of a type of 1 or 2 bits as those of Q4_0 with the same values: uint8 [..., row bytes]."""
    step = (_SLICE_CPU if data.device.type == "cpu" else _SLICE_DEVICE) // type.block_elements
    parts = []
    for part in data.reshape(-1, type.block_bytes).split(step):
        read = fields(part, type)
        # A code stands for itself less 8, not less 1.
        codes = (read.codes + (8 - _FIELDS[type].offset)).view(len(part), -1, 2, 16)
        scales = read.scale.half().view(torch.uint8)[:, None].expand(-1, codes.shape[1], -1)
        parts.append(torch.cat((scales, codes[:, :, 0] | (codes[:, :, 1] << 4)), -1).flatten())
    return torch.cat(parts).view(*data.shape[:-1], -1)


def _weights(type: QuantType, blocks: Tensor) -> Tensor:
    """Return the weights of blocks [blocks, bytes]: [blocks, elements] float32."""
    kind, read = _FIELDS[type], fields(blocks, type)
    values = _lookup(kind.table, read.codes) if kind.table else read.codes - float(kind.offset)
    step, below = read.scale, read.minimum
    step = step if read.scales is None else step * read.scales.float()
    spans = values.view(len(blocks), step.shape[1], -1)
    spans.mul_(step[..., None])
    if below is not None:
        spans.sub_((-below if read.minima is None else below * read.minima.float())[..., None])
    return values


def _aligned(data: Tensor) -> Tensor:
    """Return a contiguous copy: viewing bytes as wider words needs an aligned start."""
    return data.clone(memory_format=torch.contiguous_format)


def _half(blocks: Tensor, offset: int) -> Tensor:
    """Return the float16 at a byte offset of each block: [N, blocks, bytes] -> float32 [N, blocks]."""
    return _aligned(blocks[..., offset : offset + 2]).view(torch.float16).flatten(1).float()


def _spread(part: Tensor, *, count: int, bits: int, span: int) -> Tensor:
    """Cut each byte into `count` integers, all first ones of a span of bytes before all second ones."""
    shifts = torch.arange(0, count * bits, bits, dtype=torch.uint8, device=part.device)[:, None]
    spans = part.unflatten(-1, (-1, 1, span))
    return ((spans >> shifts) & ((1 << bits) - 1)).flatten(-3)


def _nibbles(part: Tensor, span: int = 16) -> Tensor:
    """Cut each byte into two, faster than `_spread`."""
    spans = part.unflatten(-1, (-1, span))
    return torch.cat((spans & 15, spans >> 4), -1).flatten(-2)


def _lookup(table: tuple[int, ...], index: Tensor) -> Tensor:
    return _values(table, index.device).index_select(0, index.flatten().int()).view(index.shape)


@cache
def _values(table: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a cached table: a CUDA graph that decodes rows of an embedding may not copy from the host."""
    return torch.tensor(table, dtype=torch.float32, device=device)


def _fives(high: Tensor, low: Tensor) -> Tensor:
    return (_nibbles(low) | (_spread(high, count=8, bits=1, span=1) << 4)).flatten(1)


def _q4_0(blocks: Tensor) -> Fields:
    return Fields(_nibbles(blocks[..., 2:]).flatten(1), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Fields:
    return Fields(_nibbles(blocks[..., 4:]).flatten(1), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Fields:
    return Fields(_fives(blocks[..., 2:6], blocks[..., 6:]), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Fields:
    return Fields(_fives(blocks[..., 4:8], blocks[..., 8:]), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Fields:
    return Fields((blocks[..., 2:] ^ 128).flatten(1), _half(blocks, 0))


def _mxfp4(blocks: Tensor) -> Fields:
    exponent = blocks[..., 0].int()
    # 2^(exponent - 128) from its bits; the two smallest are subnormal
    bits = torch.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    return Fields(_nibbles(blocks[..., 1:]).flatten(1), bits.view(torch.float32))


def _nvfp4(blocks: Tensor) -> Fields:
    field = blocks[..., :4].int()
    exponent, mantissa = (field >> 3) & 15, (field & 7).float()
    normal = (mantissa + 8).ldexp(exponent - 11)  # halved, as the values are doubled
    scale = torch.where(exponent == 0, mantissa * 2**-10, normal)
    scale = scale.masked_fill((field == 0) | (field == 0x7F), 0.0)
    return Fields(_nibbles(blocks[..., 4:], 8).flatten(1), scale.flatten(1))


def _q2_k(blocks: Tensor) -> Fields:
    scales, minima = (part.flatten(1) for part in (blocks[..., :16] & 15, blocks[..., :16] >> 4))
    codes = _spread(blocks[..., 16:80], count=4, bits=2, span=32).flatten(1)
    return Fields(codes, _half(blocks, 80), _half(blocks, 82), scales, minima)


def _q3_k(blocks: Tensor) -> Fields:
    high = _spread(blocks[..., 104:108], count=4, bits=2, span=4)
    scales = (_nibbles(blocks[..., 96:104], 8) | (high << 4)).to(torch.int8) - 32
    codes = _spread(blocks[..., 32:96], count=4, bits=2, span=32)
    # a set mask bit means "no 4 to take away"
    codes |= _spread(blocks[..., :32], count=8, bits=1, span=32) << 2
    return Fields(codes.flatten(1), _half(blocks, 108), scales=scales.flatten(1))


def _six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scale, minimum, scales and minima of Q4_K and Q5_K."""
    first, second, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (rest & 15) | ((first >> 6) << 4)), -1)
    minima = torch.cat((second & 63, (rest >> 4) | ((second >> 6) << 4)), -1)
    return _half(blocks, 0), _half(blocks, 2), scales.flatten(1), minima.flatten(1)


def _q4_k(blocks: Tensor) -> Fields:
    return Fields(_nibbles(blocks[..., 16:], 32).flatten(1), *_six_bit_scales(blocks))


def _q5_k(blocks: Tensor) -> Fields:
    codes = _nibbles(blocks[..., 48:], 32) | (_spread(blocks[..., 16:48], count=8, bits=1, span=32) << 4)
    return Fields(codes.flatten(1), *_six_bit_scales(blocks))


def _q6_k(blocks: Tensor) -> Fields:
    codes = _nibbles(blocks[..., :128], 64)
    codes |= _spread(blocks[..., 128:192], count=4, bits=2, span=32) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return Fields(codes.flatten(1), _half(blocks, 208), scales=scales)


def _iq4_xs(blocks: Tensor) -> Fields:
    high = _spread(blocks[..., 2:4], count=4, bits=2, span=1)
    scales = (_nibbles(blocks[..., 4:8], 1) | (high << 4)).to(torch.int8) - 32
    scales = scales.flatten(1).repeat_interleave(2, 1)  # of 16 columns, as in other types of 256
    return Fields(_nibbles(blocks[..., 8:]).flatten(1), _half(blocks, 0), scales=scales)


def _q1_0(blocks: Tensor) -> Fields:
    codes = _spread(blocks[..., 2:], count=8, bits=1, span=1) << 1
    return Fields(codes.flatten(1), _half(blocks, 0))


def _q2_0(blocks: Tensor) -> Fields:
    return Fields(_spread(blocks[..., 2:], count=4, bits=2, span=1).flatten(1), _half(blocks, 0))


def _ternary(*spans: tuple[int, int, int]) -> Callable[[Tensor], Fields]:
    """Read the ternary digits 0 to 2 of spans of bytes, the highest of each first; a byte is a fraction.

    A span is its first byte, the one after its last, and the digits of each. The scale follows the last.
    """

    def read(blocks: Tensor) -> Fields:
        parts = []
        for start, stop, digits in spans:
            powers = 3 ** torch.arange(digits, dtype=torch.int32, device=blocks.device)
            shifted = (blocks[..., None, start:stop].int() * powers[:, None]) & 255
            parts.append((shifted * 3 >> 8).flatten(-2))
        return Fields(torch.cat(parts, -1).to(torch.uint8).flatten(1), _half(blocks, spans[-1][1]))

    return read


def _tq2_0(blocks: Tensor) -> Fields:
    return Fields(_spread(blocks[..., :64], count=4, bits=2, span=32).flatten(1), _half(blocks, 64))


def _words(blocks: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Return the integers of a field as int32; unsigned 32-bit ones keep their bits."""
    words = _aligned(blocks[:, start:stop]).view(dtype).int()
    return words & 0xFFFF if dtype == torch.int16 else words


def _fields(words: Tensor, *, count: int, bits: int) -> Tensor:
    """Cut each int32 into its lowest `count` fields: [...] -> [..., count]."""
    shifts = torch.arange(0, count * bits, bits, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)


def _even_signs(index: Tensor) -> Tensor:
    """Return eight signs for each 7-bit index, 1 or -1: the eighth makes the count of minus signs even."""
    minus = _fields(index, count=7, bits=1)
    minus = torch.cat((minus, minus.sum(-1, keepdim=True, dtype=torch.int32) & 1), -1)
    return minus.float().mul_(-2).add_(1)


def _plain_signs(fields: Tensor) -> Tensor:
    """Return eight signs for each byte, 1 or -1: uint8 [...] -> [..., 8]."""
    return _fields(fields.int(), count=8, bits=1).float().mul_(-2).add_(1)


def _from_grid(type: QuantType, index: Tensor) -> Tensor:
    """Return the code book's vectors: [...] -> float32 [..., 8 or 4]."""
    grid = _grid(type, index.device)
    return grid.index_select(0, index.flatten().int()).view(*index.shape, -1)


def _iq2_xxs(blocks: Tensor) -> Tensor:
    parts = blocks[:, 2:].unflatten(1, (8, 8))
    words = _words(parts.flatten(0, 1), 4, 8, torch.int32).view(-1, 8)
    scale = _half(blocks, 0) * (_fields(words >> 28, count=1, bits=4).squeeze(-1).float() + 0.5) * 0.25
    values = _from_grid(QuantType.IQ2_XXS, parts[:, :, :4])
    return values.mul_(scale[:, :, None, None]).mul_(_even_signs(_fields(words, count=4, bits=7)))


def _iq2_xs(blocks: Tensor) -> Tensor:
    words = _words(blocks, 2, 66, torch.int16)
    scale = _half(blocks, 0) * (_nibbles(blocks[:, 66:], 1).float() + 0.5) * 0.25
    values = _from_grid(QuantType.IQ2_XS, words & 511).mul_(scale.repeat_interleave(2, 1).unsqueeze(2))
    return values.mul_(_even_signs(words >> 9))


def _iq2_s(blocks: Tensor) -> Tensor:
    index = blocks[:, 2:34].int() + (_fields(blocks[:, 66:74].int(), count=4, bits=2).flatten(1) << 8)
    scale = _half(blocks, 0) * (_nibbles(blocks[:, 74:], 1).float() + 0.5) * 0.25
    values = _from_grid(QuantType.IQ2_S, index).mul_(scale.repeat_interleave(2, 1).unsqueeze(2))
    return values.mul_(_plain_signs(blocks[:, 34:66]))


def _iq3_xxs(blocks: Tensor) -> Tensor:
    words = _words(blocks, 66, 98, torch.int32)
    scale = _half(blocks, 0) * (_fields(words >> 28, count=1, bits=4).squeeze(-1).float() + 0.5) * 0.5
    values = _from_grid(QuantType.IQ3_XXS, blocks[:, 2:66]).view(-1, 8, 4, 8)
    return values.mul_(scale[:, :, None, None]).mul_(_even_signs(_fields(words, count=4, bits=7)))


def _iq1_s(blocks: Tensor) -> Tensor:
    words = _words(blocks, 34, 50, torch.int16)
    index = blocks[:, 2:34].int() + (_fields(words, count=4, bits=3).flatten(1) << 8)
    scale = _half(blocks, 0) * ((words >> 12 & 7) * 2 + 1).float()
    shift = (words >> 15).float().mul_(-0.25).add_(0.125)
    values = _from_grid(QuantType.IQ1_S, index).view(-1, 8, 32)
    return values.add_(shift.unsqueeze(2)).mul_(scale.unsqueeze(2))


def _iq1_m(blocks: Tensor) -> Tensor:
    high, words = _nibbles(blocks[:, 32:48], 1).int(), _words(blocks, 48, 56, torch.int16)
    # The float16 scale is cut into the highest nibbles of four words.
    nibbles = _fields(words >> 12, count=1, bits=4).squeeze(-1) << torch.arange(
        0, 16, 4, dtype=torch.int32, device=words.device
    )
    d = nibbles.sum(1, keepdim=True, dtype=torch.int32).short().view(torch.float16).float()
    scale = d * (_fields(words, count=4, bits=3).flatten(1) * 2 + 1).float()
    shift = (high >> 3).float().mul_(-0.25).add_(0.125)
    values = _from_grid(QuantType.IQ1_M, blocks[:, :32].int() + ((high & 7) << 8))
    return values.add_(shift.unsqueeze(2)).mul_(scale.repeat_interleave(2, 1).unsqueeze(2))


def _iq3_s(blocks: Tensor) -> Tensor:
    scale = _half(blocks, 0) * (_nibbles(blocks[:, 106:110], 1).float() * 2 + 1)
    index = blocks[:, 2:66].int() + (_spread(blocks[:, 66:74], count=8, bits=1, span=1).flatten(1).int() << 8)
    sign = _spread(blocks[:, 74:106], count=8, bits=1, span=1).view(-1, 8, 32).float().mul_(-2).add_(1)
    values = _from_grid(QuantType.IQ3_S, index).view(-1, 8, 32)
    return values.mul_(scale.unsqueeze(2)).mul_(sign)


def check_decodable(types: Iterable[QuantType]) -> None:
    """Raise for types that are no weights, or whose code book is not on this machine.

    To be called before weights are read.
    """
    kinds = set(types)
    if QuantType.I64 in kinds:
        raise UnsupportedQuant("a tensor of the model is of type I64, which holds whole numbers, no weights")
    for type in sorted(kinds & _DECODERS.keys()):
        _grid(type, torch.device("cpu"))


@cache
def _grid(type: QuantType, device: torch.device) -> Tensor:
    """Return a code book [entries, 8 or 4], float32: only the gguf package has it."""
    try:
        from gguf import quants
    except ImportError as error:
        raise UnsupportedQuant(
            f"{type.name} weights need the code book of the gguf package, which is not installed",
            hint="pip install gguf",
        ) from error
    source = getattr(quants, type.name)
    source.init_grid()
    return torch.tensor(source.grid, dtype=torch.float32, device=device).reshape(source.grid_shape)


_FLOATS: dict[QuantType, torch.dtype] = {
    QuantType.F32: torch.float32,
    QuantType.F16: torch.float16,
    QuantType.BF16: torch.bfloat16,
}

_FIELDS: dict[QuantType, _Format] = {
    QuantType.Q8_0: _Format(_q8_0, 128),
    QuantType.Q4_0: _Format(_q4_0, 8),
    QuantType.Q4_1: _Format(_q4_1),
    QuantType.Q5_0: _Format(_q5_0, 16),
    QuantType.Q5_1: _Format(_q5_1),
    QuantType.Q2_K: _Format(_q2_k),
    QuantType.Q3_K: _Format(_q3_k, 4),
    QuantType.Q4_K: _Format(_q4_k),
    QuantType.Q5_K: _Format(_q5_k),
    QuantType.Q6_K: _Format(_q6_k, 32),
    QuantType.IQ4_NL: _Format(_q4_0, table=IQ4_VALUES),
    QuantType.IQ4_XS: _Format(_iq4_xs, table=IQ4_VALUES),
    QuantType.MXFP4: _Format(_mxfp4, table=FP4_VALUES),
    QuantType.NVFP4: _Format(_nvfp4, table=FP4_VALUES),
    QuantType.TQ1_0: _Format(_ternary((0, 32, 5), (32, 48, 5), (48, 52, 4)), 1),
    QuantType.TQ2_0: _Format(_tq2_0, 1),
    QuantType.Q1_0: _Format(_q1_0, 1),
    QuantType.Q2_0: _Format(_q2_0, 1),
    QuantType.PQ2_0: _Format(_q2_0, 1),
    QuantType.PTQ1_0: _Format(_ternary((0, 16, 5), (16, 24, 5), (24, 26, 4)), 1),
}
# Of types with a code book.
_DECODERS: dict[QuantType, Callable[[Tensor], Tensor]] = {
    QuantType.IQ3_S: _iq3_s,
    QuantType.IQ3_XXS: _iq3_xxs,
    QuantType.IQ2_S: _iq2_s,
    QuantType.IQ2_XS: _iq2_xs,
    QuantType.IQ2_XXS: _iq2_xxs,
    QuantType.IQ1_S: _iq1_s,
    QuantType.IQ1_M: _iq1_m,
}
