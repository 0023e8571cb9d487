"""The integers and scales in the blocks of each quantised type."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.gguf.types import QuantType


@dataclass(frozen=True, slots=True)
class Fields:
    """Rows [N, K] as integers `codes`, and the scales that make them weights.

    six:    scale[K/256] * scales[K/32] * code - minimum[K/256] * minima[K/32]
    byte:   scale[K/256] * scales[K/16] * value(code), scales signed
    half:   scale[K/32] * value(code)
    affine: scale[K/32] * code + minimum[K/32]
    A value is the code minus an offset, or comes from a table. Scales and minima of a block are float32.
    """

    codes: Tensor  # uint8 [N, K]
    scale: Tensor
    minimum: Tensor | None = None
    scales: Tensor | None = None  # uint8 or int8
    minima: Tensor | None = None  # uint8


def fields(data: Tensor, type: QuantType) -> Fields:
    """Return the fields of rows, uint8 [N, row bytes], of a type with a tile layout."""
    blocks = data.reshape(len(data), -1, type.block_bytes)
    return _READERS[type](blocks)


def _half(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at a byte offset of each block: [N, blocks, bytes] to float32 [N, blocks]."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16)[..., 0].float()


def _spread(part: Tensor, *, count: int, bits: int, span: int) -> Tensor:
    """Each byte into `count` integers, all first ones of a span of bytes before all second ones."""
    shifts = torch.arange(0, count * bits, bits, dtype=torch.uint8, device=part.device)[:, None]
    spans = part.unflatten(-1, (-1, 1, span))
    return ((spans >> shifts) & ((1 << bits) - 1)).flatten(-3)


def _q4_0(blocks: Tensor) -> Fields:
    return Fields(_spread(blocks[..., 2:], count=2, bits=4, span=16).flatten(1), _half(blocks, 0))


def _fives(high: Tensor, low: Tensor) -> Tensor:
    fifth = _spread(high, count=8, bits=1, span=1)
    return (_spread(low, count=2, bits=4, span=16) | (fifth << 4)).flatten(1)


def _q5_0(blocks: Tensor) -> Fields:
    return Fields(_fives(blocks[..., 2:6], blocks[..., 6:]), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Fields:
    codes = _spread(blocks[..., 4:], count=2, bits=4, span=16).flatten(1)
    return Fields(codes, _half(blocks, 0), minimum=_half(blocks, 2))


def _q5_1(blocks: Tensor) -> Fields:
    return Fields(_fives(blocks[..., 4:8], blocks[..., 8:]), _half(blocks, 0), minimum=_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Fields:
    return Fields((blocks[..., 2:] ^ 128).flatten(1), _half(blocks, 0))


def _six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    first, second, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (rest & 15) | ((first >> 6) << 4)), -1)
    minima = torch.cat((second & 63, (rest >> 4) | ((second >> 6) << 4)), -1)
    return scales.flatten(1), minima.flatten(1)


def _q4_k(blocks: Tensor) -> Fields:
    scales, minima = _six_bit_scales(blocks)
    codes = _spread(blocks[..., 16:], count=2, bits=4, span=32).flatten(1)
    return Fields(codes, _half(blocks, 0), _half(blocks, 2), scales, minima)


def _q5_k(blocks: Tensor) -> Fields:
    scales, minima = _six_bit_scales(blocks)
    codes = _spread(blocks[..., 48:], count=2, bits=4, span=32)
    codes |= _spread(blocks[..., 16:48], count=8, bits=1, span=32) << 4
    return Fields(codes.flatten(1), _half(blocks, 0), _half(blocks, 2), scales, minima)


def _q6_k(blocks: Tensor) -> Fields:
    codes = _spread(blocks[..., :128], count=2, bits=4, span=64)
    codes |= _spread(blocks[..., 128:192], count=4, bits=2, span=32) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return Fields(codes.flatten(1), _half(blocks, 208), scales=scales)


def _q3_k(blocks: Tensor) -> Fields:
    low = _spread(blocks[..., 96:104], count=2, bits=4, span=8)
    high = _spread(blocks[..., 104:108], count=4, bits=2, span=4)
    scales = (low | (high << 4)).to(torch.int8) - 32
    codes = _spread(blocks[..., 32:96], count=4, bits=2, span=32)
    codes |= _spread(blocks[..., :32], count=8, bits=1, span=32) << 2
    return Fields(codes.flatten(1), _half(blocks, 108), scales=scales.flatten(1))


def _iq4_xs(blocks: Tensor) -> Fields:
    low = _spread(blocks[..., 4:8], count=2, bits=4, span=1)
    high = _spread(blocks[..., 2:4], count=4, bits=2, span=1)
    scales = ((low | (high << 4)).to(torch.int8) - 32).flatten(1).repeat_interleave(2, 1)
    codes = _spread(blocks[..., 8:], count=2, bits=4, span=16).flatten(1)
    return Fields(codes, _half(blocks, 0), scales=scales)


def _mxfp4(blocks: Tensor) -> Fields:
    exponent = blocks[..., 0].int()
    # 2^(exponent - 128) from its bits; the two smallest are subnormal
    bits = torch.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    codes = _spread(blocks[..., 1:], count=2, bits=4, span=16).flatten(1)
    return Fields(codes, bits.view(torch.float32))


_READERS: dict[QuantType, Callable[[Tensor], Fields]] = {
    QuantType.Q4_0: _q4_0,
    QuantType.Q4_1: _q4_1,
    QuantType.Q5_0: _q5_0,
    QuantType.Q5_1: _q5_1,
    QuantType.Q8_0: _q8_0,
    QuantType.Q3_K: _q3_k,
    QuantType.Q4_K: _q4_k,
    QuantType.Q5_K: _q5_k,
    QuantType.Q6_K: _q6_k,
    QuantType.IQ4_NL: _q4_0,
    QuantType.IQ4_XS: _iq4_xs,
    QuantType.MXFP4: _mxfp4,
}
