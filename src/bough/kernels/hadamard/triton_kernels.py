"""Triton kernel of the Walsh-Hadamard transform: a program computes one block of one row."""

from math import sqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST = 4096  # a block's values are in the registers of one program


@triton.jit
def _transform_kernel(
    x, signs, order, out, width, scale,
    ORDERED: tl.constexpr, RESTORE: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + place
    source = tl.load(order + column) if ORDERED else column
    values = tl.load(x + row * width + source)
    sign = tl.load(signs + column)
    if not RESTORE:
        values = values * sign
    for level in tl.static_range(LEVELS):
        other = tl.gather(values, place ^ (1 << level), 0)
        values = tl.where(((place >> level) & 1) == 1, other - values, values + other)
    values = values * scale
    if RESTORE:
        values = values * sign
    tl.store(out + row * width + column, values)


def rotate(x: Tensor, signs: Tensor, order: Tensor | None, block: int) -> Tensor:
    return _transformed(x, signs, order, block, restore=False)


def takes_rotate(x: Tensor, signs: Tensor, order: Tensor | None, block: int) -> bool:
    return block <= _LARGEST


def restore(z: Tensor, signs: Tensor, block: int) -> Tensor:
    return _transformed(z, signs, None, block, restore=True)


def takes_restore(z: Tensor, signs: Tensor, block: int) -> bool:
    return block <= _LARGEST


def _transformed(x: Tensor, signs: Tensor, order: Tensor | None, block: int, *, restore: bool) -> Tensor:
    x, width = x.float().contiguous(), x.shape[-1]
    assert width % block == 0 and signs.shape == (width,), f"{width} columns in blocks of {block}"
    out = torch.empty_like(x)
    if x.numel():
        _transform_kernel[(x.numel() // width, width // block)](
            x, signs, signs if order is None else order, out, width, 1 / sqrt(block),
            ORDERED=order is not None, RESTORE=restore, BLOCK=block, LEVELS=block.bit_length() - 1,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
