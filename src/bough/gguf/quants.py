"""Dequantises every tensor type to floats, in plain torch.

The arithmetic order is part of the format: scales are multiplied together first, then by the integer, then
the minimum is subtracted, all in float32. Kernels are tested against this module.
"""

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor

from bough.errors import UnsupportedQuant
from bough.gguf.types import QuantType

# Weights handled at a time: enough to hide torch's cost per call, few enough that intermediates stay in a
# CPU's cache, and below 1 GiB on a GPU.
_SLICE_CPU = 1 << 19
_SLICE_DEVICE = 1 << 25

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# E2M1 values doubled; code 8 is a positive zero, as in the reference table
_FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def dequantise(data: Tensor, type: QuantType, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode whole rows: uint8 [..., row_bytes] on any device -> `dtype` [..., elements] on the same one."""
    assert data.dtype == torch.uint8, data.dtype
    assert data.shape[-1] % type.block_bytes == 0, (type.name, tuple(data.shape))
    blocks = data.reshape(-1, type.block_bytes)
    shape = (*data.shape[:-1], data.shape[-1] // type.block_bytes * type.block_elements)
    if type in _FLOATS:
        return _aligned(blocks).view(_FLOATS[type]).to(dtype).reshape(shape)
    decode = _DECODERS.get(type)
    if decode is None:
        raise UnsupportedQuant(f"{type.name} holds whole numbers, needed weights")
    out = torch.empty((blocks.shape[0], type.block_elements), dtype=dtype, device=data.device)
    step = (_SLICE_CPU if data.device.type == "cpu" else _SLICE_DEVICE) // type.block_elements
    for start in range(0, blocks.shape[0], step):
        part = blocks[start : start + step]
        out[start : start + step] = decode(part).view(part.shape[0], type.block_elements)
    return out.reshape(shape)


def to_q4_0(data: Tensor, type: QuantType) -> Tensor:
    """Return rows of a type of 1 or 2 bits as those of Q4_0 with the same values: uint8 [..., row bytes]."""
    codes_of, scale = _TWO_BITS[type]
    blocks = data.reshape(-1, type.block_bytes)
    step = (_SLICE_CPU if data.device.type == "cpu" else _SLICE_DEVICE) // type.block_elements
    parts = []
    for part in blocks.split(step):
        codes = (codes_of(part) + 7).view(len(part), -1, 2, 16)  # a code stands for itself less 8, not less 1
        scales = part[:, None, scale : scale + 2].expand(-1, codes.shape[1], -1)
        parts.append(torch.cat((scales, codes[:, :, 0] | (codes[:, :, 1] << 4)), -1).flatten())
    return torch.cat(parts).view(*data.shape[:-1], -1)


def _aligned(data: Tensor) -> Tensor:
    """Return a contiguous copy: viewing bytes as wider words needs an aligned start."""
    return data.clone(memory_format=torch.contiguous_format)


def _half(blocks: Tensor, offset: int) -> Tensor:
    """Return the float16 field at a byte offset: [blocks, bytes] -> float32 [blocks, 1]."""
    return _aligned(blocks[:, offset : offset + 2]).view(torch.float16).float()


def _shifts(count: int, bits: int, like: Tensor) -> Tensor:
    """0, bits, 2 bits, ... as a uint8 column [count, 1] that shifts a whole row of bytes at a time."""
    return torch.arange(0, count * bits, bits, dtype=torch.uint8, device=like.device).unsqueeze(1)


def _spread(fields: Tensor, *, count: int, bits: int, span: int) -> Tensor:
    """Cut each byte into `count` fields, all first fields of a span of bytes before all second ones.

    uint8 [blocks, bytes] -> uint8 [blocks, bytes / span, count, span]
    """
    spans = fields.unflatten(1, (-1, 1, span))
    return (spans >> _shifts(count, bits, fields)) & ((1 << bits) - 1)


def _pairs(fields: Tensor) -> Tensor:
    """Return both nibbles of each byte side by side, low first: uint8 [blocks, n] -> [blocks, 2 n]."""
    return torch.stack((fields & 15, fields >> 4), dim=2).flatten(1)


def _lookup(table: tuple[int, ...], index: Tensor) -> Tensor:
    return _values(table, index.device).index_select(0, index.flatten().int()).view(index.shape)


@cache
def _values(table: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a cached table: a CUDA graph that decodes rows of an embedding may not copy from the host."""
    return torch.tensor(table, dtype=torch.float32, device=device)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _nibbles_32(fields: Tensor) -> Tensor:
    """Return the 32 nibbles of a small block: uint8 [blocks, 16] -> [blocks, 32], low nibbles first."""
    return torch.cat((fields & 15, fields >> 4), dim=1)


def _fives_32(high: Tensor, low: Tensor) -> Tensor:
    """5-bit integers of a small block: the fifth bits [blocks, 4] in element order, nibbles [blocks, 16]."""
    fifth = _spread(high, count=8, bits=1, span=1).flatten(1)
    return _nibbles_32(low).add_(fifth << 4)


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles_32(blocks[:, 2:]).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles_32(blocks[:, 4:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    return _fives_32(blocks[:, 2:6], blocks[:, 6:]).float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    return _fives_32(blocks[:, 4:8], blocks[:, 8:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _lookup(_IQ4_VALUES, _nibbles_32(blocks[:, 2:])).mul_(_half(blocks, 0))


def _mxfp4(blocks: Tensor) -> Tensor:
    exponent = blocks[:, :1].int()
    # 2^(exponent - 128) from its bits; the two smallest are subnormal
    bits = torch.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    return _lookup(_FP4_VALUES, _nibbles_32(blocks[:, 1:])).mul_(bits.view(torch.float32))


def _nvfp4(blocks: Tensor) -> Tensor:
    field = blocks[:, :4].int()
    exponent, mantissa = (field >> 3) & 15, (field & 7).float()
    normal = (mantissa + 8).ldexp(exponent - 11)  # halved, as the values are doubled
    scale = torch.where(exponent == 0, mantissa * 2**-10, normal)
    scale = scale.masked_fill((field == 0) | (field == 0x7F), 0.0).unsqueeze(2)
    q = _spread(blocks[:, 4:], count=2, bits=4, span=8).view(-1, 4, 16)
    return _lookup(_FP4_VALUES, q).mul_(scale)


def _q2_k(blocks: Tensor) -> Tensor:
    scale = (_half(blocks, 80) * (blocks[:, :16] & 15).float()).unsqueeze(2)
    minimum = (_half(blocks, 82) * (blocks[:, :16] >> 4).float()).unsqueeze(2)
    q = _spread(blocks[:, 16:80], count=4, bits=2, span=32).view(-1, 16, 16)
    return q.float().mul_(scale).sub_(minimum)


def _q3_k(blocks: Tensor) -> Tensor:
    low = _spread(blocks[:, 96:104], count=2, bits=4, span=8).flatten(1)
    high = _spread(blocks[:, 104:108], count=4, bits=2, span=4).flatten(1)
    scale = (_half(blocks, 108) * (low + (high << 4)).float().sub_(32)).unsqueeze(2)
    # a set mask bit means "no 4 to take away"
    q = _spread(blocks[:, 32:96], count=4, bits=2, span=32).view(-1, 256)
    q += _spread(blocks[:, :32], count=8, bits=1, span=32).view(-1, 256) << 2
    return q.view(-1, 16, 16).float().sub_(4).mul_(scale)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sub-block scales and minima of Q4_K and Q5_K in float32, each [blocks, 8, 1]."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat((first & 63, (rest & 15) | ((first >> 6) << 4)), dim=1)
    minimum = torch.cat((second & 63, (rest >> 4) | ((second >> 6) << 4)), dim=1)
    return (
        (_half(blocks, 0) * scale.float()).unsqueeze(2),
        (_half(blocks, 2) * minimum.float()).unsqueeze(2),
    )


def _q4_k(blocks: Tensor) -> Tensor:
    scale, minimum = _scales_and_minima(blocks)
    q = _spread(blocks[:, 16:], count=2, bits=4, span=32).view(-1, 8, 32)
    return q.float().mul_(scale).sub_(minimum)


def _q5_k(blocks: Tensor) -> Tensor:
    scale, minimum = _scales_and_minima(blocks)
    q = _spread(blocks[:, 48:], count=2, bits=4, span=32).view(-1, 8, 32)
    q += _spread(blocks[:, 16:48], count=8, bits=1, span=32).view(-1, 8, 32) << 4
    return q.float().mul_(scale).sub_(minimum)


def _q6_k(blocks: Tensor) -> Tensor:
    scale = (_half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()).unsqueeze(2)
    q = _spread(blocks[:, :128], count=2, bits=4, span=64).view(-1, 256)
    q += _spread(blocks[:, 128:192], count=4, bits=2, span=32).view(-1, 256) << 4
    return q.view(-1, 16, 16).float().sub_(32).mul_(scale)


def _iq4_xs(blocks: Tensor) -> Tensor:
    low = _pairs(blocks[:, 4:8])
    high = _spread(blocks[:, 2:4], count=4, bits=2, span=1).flatten(1)
    scale = (_half(blocks, 0) * (low + (high << 4)).float().sub_(32)).unsqueeze(2)
    q = _spread(blocks[:, 8:], count=2, bits=4, span=16).view(-1, 8, 32)
    return _lookup(_IQ4_VALUES, q).mul_(scale)


def _q1_0_codes(blocks: Tensor) -> Tensor:
    return _spread(blocks[:, 2:], count=8, bits=1, span=1).flatten(1) << 1


def _q2_0_codes(blocks: Tensor) -> Tensor:
    return _spread(blocks[:, 2:], count=4, bits=2, span=1).flatten(1)


def _q1_0(blocks: Tensor) -> Tensor:
    return _q1_0_codes(blocks).float().sub_(1).mul_(_half(blocks, 0))


def _q2_0(blocks: Tensor) -> Tensor:
    return _q2_0_codes(blocks).float().sub_(1).mul_(_half(blocks, 0))


def _digits(blocks: Tensor, *spans: tuple[int, int, int]) -> Tensor:
    """Return the ternary digits 0 to 2 of spans of bytes, the highest of each first; a byte is a fraction.

    A span is its first byte, the one after its last, and the digits of each.
    """
    parts = []
    for start, stop, digits in spans:
        powers = 3 ** torch.arange(digits, dtype=torch.int32, device=blocks.device)
        shifted = (blocks[:, None, start:stop].int() * powers[:, None]) & 255
        parts.append((shifted * 3 >> 8).flatten(1))
    return torch.cat(parts, 1)


def _tq1_0(blocks: Tensor) -> Tensor:
    return _digits(blocks, (0, 32, 5), (32, 48, 5), (48, 52, 4)).float().sub_(1).mul_(_half(blocks, 52))


def _ptq1_0_codes(blocks: Tensor) -> Tensor:
    return _digits(blocks, (0, 16, 5), (16, 24, 5), (24, 26, 4)).to(torch.uint8)


def _ptq1_0(blocks: Tensor) -> Tensor:
    return _ptq1_0_codes(blocks).float().sub_(1).mul_(_half(blocks, 26))


def _tq2_0(blocks: Tensor) -> Tensor:
    q = _spread(blocks[:, :64], count=4, bits=2, span=32).view(-1, 256)
    return q.float().sub_(1).mul_(_half(blocks, 64))


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
    scale = _half(blocks, 0) * (_pairs(blocks[:, 66:]).float() + 0.5) * 0.25
    values = _from_grid(QuantType.IQ2_XS, words & 511).mul_(scale.repeat_interleave(2, 1).unsqueeze(2))
    return values.mul_(_even_signs(words >> 9))


def _iq2_s(blocks: Tensor) -> Tensor:
    index = blocks[:, 2:34].int() + (_fields(blocks[:, 66:74].int(), count=4, bits=2).flatten(1) << 8)
    scale = _half(blocks, 0) * (_pairs(blocks[:, 74:]).float() + 0.5) * 0.25
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
    high, words = _pairs(blocks[:, 32:48]).int(), _words(blocks, 48, 56, torch.int16)
    # The float16 scale is cut into the highest nibbles of four words.
    nibbles = _fields(words >> 12, count=1, bits=4).squeeze(-1) << _shifts(4, 4, words).int().view(1, 4)
    d = nibbles.sum(1, keepdim=True, dtype=torch.int32).short().view(torch.float16).float()
    scale = d * (_fields(words, count=4, bits=3).flatten(1) * 2 + 1).float()
    shift = (high >> 3).float().mul_(-0.25).add_(0.125)
    values = _from_grid(QuantType.IQ1_M, blocks[:, :32].int() + ((high & 7) << 8))
    return values.add_(shift.unsqueeze(2)).mul_(scale.repeat_interleave(2, 1).unsqueeze(2))


def _iq3_s(blocks: Tensor) -> Tensor:
    scale = _half(blocks, 0) * (_pairs(blocks[:, 106:110]).float() * 2 + 1)
    index = blocks[:, 2:66].int() + (_spread(blocks[:, 66:74], count=8, bits=1, span=1).flatten(1).int() << 8)
    sign = _spread(blocks[:, 74:106], count=8, bits=1, span=1).view(-1, 8, 32).float().mul_(-2).add_(1)
    values = _from_grid(QuantType.IQ3_S, index).view(-1, 8, 32)
    return values.mul_(scale.unsqueeze(2)).mul_(sign)


# Types with a code book, which only the gguf package has.
_CODE_BOOKS = frozenset(
    {
        *(QuantType.IQ1_S, QuantType.IQ1_M, QuantType.IQ2_XXS, QuantType.IQ2_XS, QuantType.IQ2_S),
        *(QuantType.IQ3_XXS, QuantType.IQ3_S),
    }
)


def check_decodable(types: Iterable[QuantType]) -> None:
    """Raise for types that are no weights, or whose code book is not on this machine.

    To be called before weights are read.
    """
    kinds = set(types)
    if QuantType.I64 in kinds:
        raise UnsupportedQuant("a tensor of the model is of type I64, which holds whole numbers, no weights")
    for type in sorted(_CODE_BOOKS & kinds):
        _grid(type, torch.device("cpu"))


@cache
def _grid(type: QuantType, device: torch.device) -> Tensor:
    """Return a code book [entries, 8 or 4], float32."""
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

_DECODERS: dict[QuantType, Callable[[Tensor], Tensor]] = {
    QuantType.Q8_0: _q8_0,
    QuantType.Q4_0: _q4_0,
    QuantType.Q4_1: _q4_1,
    QuantType.Q5_0: _q5_0,
    QuantType.Q5_1: _q5_1,
    QuantType.Q2_K: _q2_k,
    QuantType.Q3_K: _q3_k,
    QuantType.Q4_K: _q4_k,
    QuantType.Q5_K: _q5_k,
    QuantType.Q6_K: _q6_k,
    QuantType.IQ4_NL: _iq4_nl,
    QuantType.IQ4_XS: _iq4_xs,
    QuantType.IQ3_S: _iq3_s,
    QuantType.IQ3_XXS: _iq3_xxs,
    QuantType.IQ2_S: _iq2_s,
    QuantType.IQ2_XS: _iq2_xs,
    QuantType.IQ2_XXS: _iq2_xxs,
    QuantType.IQ1_S: _iq1_s,
    QuantType.IQ1_M: _iq1_m,
    QuantType.TQ1_0: _tq1_0,
    QuantType.TQ2_0: _tq2_0,
    QuantType.MXFP4: _mxfp4,
    QuantType.NVFP4: _nvfp4,
    QuantType.Q1_0: _q1_0,
    QuantType.Q2_0: _q2_0,
    QuantType.PQ2_0: _q2_0,
    QuantType.PTQ1_0: _ptq1_0,
}
# Of blocks whose values are d times -1, 0, 1 or 2: the values plus 1, and where d stands.
_TWO_BITS: dict[QuantType, tuple[Callable[[Tensor], Tensor], int]] = {
    QuantType.Q1_0: (_q1_0_codes, 0),
    QuantType.Q2_0: (_q2_0_codes, 0),
    QuantType.PQ2_0: (_q2_0_codes, 0),
    QuantType.PTQ1_0: (_ptq1_0_codes, 26),
}
