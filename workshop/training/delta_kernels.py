"""Triton kernels of the training delta rule: triangular inverse, recurrence over chunks. No autograd."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _inverse_kernel(strict, inverse, SIZE: tl.constexpr):
    """Invert one matrix per program by forward substitution; the whole inverse stays in registers."""
    start = tl.program_id(0).to(tl.int64) * SIZE * SIZE
    index = tl.arange(0, SIZE)
    result = (index[:, None] == index[None, :]).to(tl.float32)
    for row in range(1, SIZE):
        factors = tl.load(strict + start + row * SIZE + index)
        correction = tl.sum(factors[:, None] * result, 0)
        result = tl.where(index[:, None] == row, result - correction[None, :], result)
    tl.store(inverse + start + index[:, None] * SIZE + index[None, :], result)


@triton.jit
def _recurrence_kernel(
    x,
    erase,
    decay,
    y,
    batch,
    STEPS: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Run one matrix and one band of its columns per program; the carried band stays in registers."""
    unit = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, D)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    band = index[:, None] * D + columns[None, :]
    square = index[None, :] * D + index[:, None] if REVERSE else index[:, None] * D + index[None, :]
    first = unit + ((STEPS - 1) * batch if REVERSE else 0)
    carry = tl.load(x + first * D * D + band).to(tl.float32)
    tl.store(y + first * D * D + band, carry)
    for step in range(1, STEPS):
        at = unit + (STEPS - 1 - step if REVERSE else step) * batch
        link = unit + (STEPS - 1 - step if REVERSE else step - 1) * batch
        matrix = tl.load(erase + link * D * D + square)
        fresh = tl.load(x + at * D * D + band).to(tl.float32)
        removed = tl.dot(matrix, carry.to(matrix.dtype), input_precision="ieee")
        carry = carry * tl.load(decay + link) + fresh - removed
        tl.store(y + at * D * D + band, carry)


def unit_lower_inverse(strict: Tensor) -> Tensor:
    """Return (I + strict)^-1 for [N, C, C], strictly lower triangular, float32."""
    count, size = strict.shape[:2]
    assert strict.dtype == torch.float32 and strict.is_contiguous(), f"{strict.dtype}, {strict.stride()}"
    assert size & (size - 1) == 0 and strict.shape[2] == size, f"{strict.shape}: C must be a power of two"
    inverse = torch.empty_like(strict)
    # The fewest warps that hold a matrix without spilling: 64 x 64 takes 164 registers per thread with two.
    _inverse_kernel[(count,)](strict, inverse, SIZE=size, num_warps=max(1, size * size // 2048))
    return inverse


def recurrence(x: Tensor, erase: Tensor, decay: Tensor, *, reverse: bool) -> Tensor:
    """Return y[i] = x[i] + decay[i-1] y[i-1] - erase[i-1] y[i-1]; reverse: from the end, erase transposed.

    x [N, X, D, D] and erase [N-1, X, D, D] of one dtype, decay [N-1, X] float32; accumulated in float32.
    """
    steps, batch, size = x.shape[:3]
    assert x.is_contiguous() and erase.is_contiguous() and decay.is_contiguous()
    assert x.dtype == erase.dtype and decay.dtype == torch.float32, f"{x.dtype}, {erase.dtype}, {decay.dtype}"
    assert size >= 16 and size & (size - 1) == 0, f"D is {size}, needed: a power of two, at least 16"
    y = torch.empty_like(x)
    columns = min(64, size)
    grid = (batch, size // columns)
    _recurrence_kernel[grid](
        x,
        erase,
        decay,
        y,
        batch,
        STEPS=steps,
        D=size,
        COLUMNS=columns,
        REVERSE=reverse,
        num_warps=8,
        num_stages=2,
    )
    return y
