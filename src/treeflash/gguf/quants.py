"""Dequantises every tensor type to floats, in plain torch.

The arithmetic order is part of the format: scales are multiplied together first, then by the integer, then
the minimum is subtracted, all in float32. Kernels are tested against this module.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from treeflash.errors import UnsupportedQuant
from treeflash.gguf.types import QuantType

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
    decode = _DECODERS[type]
    out = torch.empty((blocks.shape[0], type.block_elements), dtype=dtype, device=data.device)
    step = (_SLICE_CPU if data.device.type == "cpu" else _SLICE_DEVICE) // type.block_elements
    for start in range(0, blocks.shape[0], step):
        part = blocks[start : start + step]
        out[start : start + step] = decode(part).view(part.shape[0], type.block_elements)
    return out.reshape(shape)


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


def _iq3_s(blocks: Tensor) -> Tensor:
    grid = _iq3_s_grid(blocks.device)
    scale = _half(blocks, 0) * (_pairs(blocks[:, 106:110]).float() * 2 + 1)
    index = blocks[:, 2:66].int() + (_spread(blocks[:, 66:74], count=8, bits=1, span=1).flatten(1).int() << 8)
    sign = _spread(blocks[:, 74:106], count=8, bits=1, span=1).view(-1, 8, 32).float().mul_(-2).add_(1)
    values = grid.index_select(0, index.flatten()).view(-1, 8, 32)
    return values.mul_(scale.unsqueeze(2)).mul_(sign)


@cache
def _iq3_s_grid(device: torch.device) -> Tensor:
    """Return the 512 x 4 code book of IQ3_S, which only the gguf package has."""
    try:
        from gguf.quants import IQ3_S
    except ImportError as error:
        raise UnsupportedQuant(
            "IQ3_S weights need the code book of the gguf package, which is not installed",
            hint="pip install 'treeflash[iq3]'",
        ) from error
    IQ3_S.init_grid()
    return torch.tensor(IQ3_S.grid, device=device).reshape(512, 4)


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
    QuantType.MXFP4: _mxfp4,
}
