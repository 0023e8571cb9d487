"""Quantisation of KV cache rows to codes and scales and back, in plain torch; the caller rotates.

The numbers are those of ggml's blocks of the same names (tq3_0: of the forks that have it); the bit layout is
our own, see `format`.
"""

from math import gcd

import torch
from torch import Tensor

from bough.kernels.kv_cache.format import BLOCK, KVFormat

LARGEST_SCALE = 65504.0  # of float16
# Levels of a coordinate of a unit vector in 128 dimensions, and the bounds between them.
TQ3_LEVELS = (-0.190685, -0.117832, -0.065717, -0.021460, 0.021460, 0.065717, 0.117832, 0.190685)
TQ3_BOUNDS = (-0.154259, -0.091775, -0.043589, 0.0, 0.043589, 0.091775, 0.154259)
TQ3_DIM = 128
SHORTEST = 1e-10  # a group that is not longer than this is stored as zeros


def encode(x: Tensor, format: KVFormat) -> tuple[Tensor, Tensor]:
    """Return x [..., D] as codes uint8 [..., code_bytes] and scales float16 [..., scale_count].

    A group too large for a float16 scale keeps its codes under the largest scale: it shrinks, and stays
    finite.
    """
    assert format.quantised and x.shape[-1] % BLOCK == 0, f"{format.name}, rows of {x.shape[-1]}"
    x = x.float()
    levels, scales = _tq3(x, format.group) if format.name == "tq3_0" else _blocks(x, format)
    return pack(levels, format), scales.clamp(-LARGEST_SCALE, LARGEST_SCALE).half()


def decode(codes: Tensor, scales: Tensor, format: KVFormat, dim: int) -> Tensor:
    """Return the inverse of `encode`, float32 [..., dim]."""
    levels = unpack(codes, format, dim)
    if format.name == "tq3_0":
        table = torch.tensor(TQ3_LEVELS, device=codes.device)
        values = table.index_select(0, levels.flatten().int()).view(levels.shape)
    elif format.name == "q8_0":
        values = levels.view(torch.int8).float()
    else:
        values = levels.float().sub_(1 << sum(format.planes) - 1)
    # The last group may be incomplete.
    size = gcd(format.group, dim)
    value_scales = scales.float().repeat_interleave(format.group // size, -1)[..., : dim // size]
    values.unflatten(-1, (-1, size)).mul_(value_scales[..., None])
    return values


def pack(levels: Tensor, format: KVFormat) -> Tensor:
    """Pack small numbers uint8 [..., D] into the planes of a row [..., code_bytes]."""
    planes, done = [], 0
    for bits in format.planes:
        part = (levels >> done & (1 << bits) - 1).unflatten(-1, (8 // bits, -1))
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=levels.device)
        planes.append((part << shifts[:, None]).sum(-2, dtype=torch.uint8))
        done += bits
    return torch.cat(planes, -1)


def unpack(codes: Tensor, format: KVFormat, dim: int) -> Tensor:
    """The inverse of `pack`: uint8 [..., dim]."""
    if format.planes == (8,):
        return codes
    levels, done = torch.zeros(*codes.shape[:-1], dim, dtype=torch.uint8, device=codes.device), 0
    for plane, bits in zip(
        codes.split([dim * bits // 8 for bits in format.planes], -1), format.planes, strict=True
    ):
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
        part = plane[..., None, :] >> shifts[:, None] & (1 << bits) - 1
        levels |= part.flatten(-2) << done
        done += bits
    return levels


def _blocks(x: Tensor, format: KVFormat) -> tuple[Tensor, Tensor]:
    """Levels uint8 [..., D] and float32 scales of q8_0, q5_0 and q4_0."""
    blocks = x.unflatten(-1, (-1, format.group))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    if format.name == "q8_0":
        scales = largest.abs() / 127
        levels = _round(blocks * _inverse(scales)).to(torch.int8).view(torch.uint8)
    else:
        half = 1 << sum(format.planes) - 1
        scales = largest / -half
        shifted = blocks * _inverse(scales) + (half + 0.5)
        levels = shifted.clamp(0, 2 * half - 1).to(torch.uint8)
    return levels.flatten(-2), scales[..., 0]


def _round(x: Tensor) -> Tensor:
    """Round to the nearest integer, halves away from zero; |x| + 0.5 would be rounded itself."""
    whole = x.trunc()
    return whole + ((x - whole).abs() >= 0.5) * x.sign()


def _inverse(scales: Tensor) -> Tensor:
    """Return 1 / scales, 0 where float32 overflows: such a scale is 0 in float16, too."""
    inverse = 1 / scales
    return inverse.masked_fill(inverse.isinf(), 0)


def _tq3(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Levels uint8 [..., D] and float32 scales of tq3_0."""
    bounds, values = (torch.tensor(table, device=x.device) for table in (TQ3_BOUNDS, TQ3_LEVELS))
    levels, scales = [], []
    for part in x.split(group, -1):
        length = part.norm(dim=-1, keepdim=True)
        # A shorter group has larger coordinates at the same length.
        unit = part / length * (part.shape[-1] / TQ3_DIM) ** 0.5
        unit = torch.where(length > SHORTEST, unit, 0)
        level = torch.bucketize(unit, bounds, right=True)
        # With this scale the levels have the norm of the group.
        scale = torch.where(length > SHORTEST, length / values[level].norm(dim=-1, keepdim=True), 0)
        levels.append(level.to(torch.uint8))
        scales.append(scale)
    return torch.cat(levels, -1), torch.cat(scales, -1)
