"""Triton kernel that writes K and V of committed positions to a draft layer's KV ring."""

import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.norm_rope.triton_kernels import flat_heads, normed_rope


@triton.jit(do_not_specialize=["T"])
def _ring_kernel(
    k, v, norm, cos, sin, keys, values, slots, positions, count, k_stride, k_head_stride, v_stride,
    v_head_stride, T, ring, eps,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One head of one row a program: its key, normed and rotated, and its value, if the row is committed."""
    row, head = tl.program_id(1).to(tl.int64), tl.program_id(0)
    item, number = row // T, row % T
    slot = tl.load(slots + item)
    dims = tl.arange(0, BLOCK)
    inside = dims < tl.where(number < tl.load(count + item), D, 0)
    index = tl.load(positions + row) % ring
    at = ((slot * ring + index) * HEADS + head) * D + dims
    source = k + row * k_stride + head * k_head_stride
    cos, sin = cos + row * HALF, sin + row * HALF
    key = normed_rope(source, norm, cos, sin, eps, D, HALF, BLOCK, True, INTERLEAVED)
    tl.store(keys + at, key.to(keys.dtype.element_ty), mask=inside)
    value = tl.load(v + row * v_stride + head * v_head_stride + dims, mask=inside)
    tl.store(values + at, value.to(values.dtype.element_ty), mask=inside)


def ring_heads(
    k: Tensor,
    v: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    count: Tensor,
) -> None:
    rows, heads, dim = k.shape[1:]
    assert rows <= keys.shape[1], f"{rows} rows, a ring of {keys.shape[1]}"
    k, v = flat_heads(k), flat_heads(v)
    assert keys.is_contiguous() and values.is_contiguous(), f"{keys.stride()}, {values.stride()}"
    assert positions.is_contiguous(), f"{positions.stride()}"
    assert cos.is_contiguous() and sin.is_contiguous(), f"{cos.stride()}, {sin.stride()}"
    _ring_kernel[(heads, len(k))](
        k, v, norm, cos, sin, keys, values, slots, positions, count,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), rows, keys.shape[1], eps,
        HEADS=heads, D=dim, HALF=cos.shape[-1], BLOCK=triton.next_power_of_2(dim), INTERLEAVED=False,
        num_warps=1,
    )  # fmt: skip
