"""Triton kernels of norms, rotary embedding and gates: a row or a head a program, float32 inside.

Those with OVERLAP use programmatic dependent launch, see runtime/triton_pdl.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.kv_cache.format import KVRing
from bough.kernels.quant_matmul.partial_sums import RowScaled
from bough.kernels.quant_matmul.rows import PackedRows, empty_rows
from bough.kernels.quant_matmul.triton_kernels import row_factor
from bough.kernels.runtime.triton_pdl import launch_options, wait_for_inputs


@triton.jit
def _norm_kernel(
    x, add, add_scale, weight, total, normed, x_stride, add_stride, scale_out, group_stride, row_stride, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PACK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row a program: total = x + add, normed = its rms norm, as floats or packed for a matmul.

    ADD: 0: nothing is added; 2: a row of `add` has still to be multiplied by its scale.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    factor = tl.load(weight + columns, mask=inside, other=0.0)
    wait_for_inputs(OVERLAP)
    value = tl.load(x + row * x_stride + columns, inside, 0.0, cache_modifier=".cg").to(tl.float32)
    if ADD:
        more = tl.load(add + row * add_stride + columns, inside, 0.0, cache_modifier=".cg").to(tl.float32)
        if ADD == 2:
            more *= tl.load(add_scale + row)
        value += more
        tl.store(total + row * WIDTH + columns, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    result = value * scale * factor
    if PACK:
        times, inverse = row_factor(tl.max(tl.abs(result), 0))
        tl.store(scale_out + row, inverse)
        at = columns // 32 * group_stride + row * row_stride + columns % 32
        tl.store(normed + at, (result * times).to(tl.float16), mask=columns < PADDED)
    else:
        tl.store(normed + row * WIDTH + columns, result, mask=inside)


@triton.jit(do_not_specialize=["units"])
def _gated_norm_kernel(
    x, gate, weight, out, gate_stride, units, eps, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """Several heads a program: rms norm of each, times silu of the gate."""
    unit = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    dims = tl.arange(0, BLOCK)
    inside = (unit < units)[:, None] & (dims < D)[None, :]
    at = unit[:, None] * D + dims[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    gate_at = (unit // HEADS * gate_stride + unit % HEADS * D)[:, None] + dims[None, :]
    open_ = tl.load(gate + gate_at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)
    factor = tl.load(weight + dims, mask=dims < D, other=0.0)
    tl.store(out + at, value * scale[:, None] * factor[None, :] * open_ * tl.sigmoid(open_), mask=inside)


@triton.jit
def _gated_norm_rows_kernel(
    x, gate, weight, out, scale_out, gate_stride, group_stride, row_stride, eps,
    HEADS: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row a program, all of its heads, packed for a matmul."""
    row = tl.program_id(0).to(tl.int64)
    head, dims = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK)
    inside = (head < HEADS)[:, None] & (dims < D)[None, :]
    column = head[:, None] * D + dims[None, :]
    factor = tl.load(weight + dims, mask=dims < D, other=0.0)
    wait_for_inputs(OVERLAP)
    value = tl.load(x + row * HEADS * D + column, inside, 0.0, cache_modifier=".cg").to(tl.float32)
    open_ = tl.load(gate + row * gate_stride + column, inside, 0.0, cache_modifier=".cg").to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)
    result = value * scale[:, None] * factor[None, :] * open_ * tl.sigmoid(open_)
    times, inverse = row_factor(tl.max(tl.max(tl.abs(result), 1), 0))
    tl.store(scale_out + row, inverse)
    at = column // 32 * group_stride + row * row_stride + column % 32
    tl.store(out + at, (result * times).to(tl.float16), mask=inside)
    if HEADS * D < PADDED:
        rest = HEADS * D + tl.arange(0, 256)
        at = rest // 32 * group_stride + row * row_stride + rest % 32
        tl.store(out + at, tl.zeros((256,), tl.float16), mask=rest < PADDED)


@triton.jit
def _silu_mul(gate, up, scale, columns, WIDTH: tl.constexpr, SCALED: tl.constexpr):
    inside = columns < WIDTH
    value = tl.load(gate + columns, inside, 0.0, cache_modifier=".cg").to(tl.float32)
    times = tl.load(up + columns, inside, 0.0, cache_modifier=".cg").to(tl.float32)
    if SCALED:
        value *= scale
        times *= scale
    return value * tl.sigmoid(value) * times


@triton.jit
def _silu_rows_kernel(
    gate, up, scales, out, scale_out, gate_stride, up_stride, group_stride, row_stride,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    SCALED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row a program, packed for a matmul; in two parts, whose sizes must be powers of two.

    SCALED: a row of gate and up has still to be multiplied by its scale.
    """
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(OVERLAP)
    scale = 1.0
    if SCALED:
        scale = tl.load(scales + row)
    gate += row * gate_stride
    up += row * up_stride
    out += row * row_stride
    columns, others = tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
    first = _silu_mul(gate, up, scale, columns, WIDTH, SCALED)
    rest = _silu_mul(gate, up, scale, others, WIDTH, SCALED)
    times, inverse = row_factor(tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(rest), 0)))
    tl.store(scale_out + row, inverse)
    tl.store(out + columns // 32 * group_stride + columns % 32, (first * times).to(tl.float16))
    at = others // 32 * group_stride + others % 32
    tl.store(out + at, (rest * times).to(tl.float16), mask=others < PADDED)


@triton.jit
def _silu_mul_kernel(gate, up, out, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    times = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, value * tl.sigmoid(value) * times, mask=inside)


@triton.jit
def normed_rope(
    x, norm, cos, sin, eps, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The head at x, normed and rotated; cos and sin point at its row's HALF angles."""
    dims = tl.arange(0, BLOCK)
    inside = dims < D
    rotated = dims < 2 * HALF
    if INTERLEAVED:
        partner, angle, first = dims ^ 1, dims // 2, dims % 2 == 0
    else:
        first = dims < HALF
        partner, angle = tl.where(first, dims + HALF, dims - HALF), tl.where(first, dims, dims - HALF)
    value = tl.load(x + dims, inside, 0.0, cache_modifier=".cg").to(tl.float32)
    other = tl.load(x + partner, rotated, 0.0, cache_modifier=".cg").to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
        value *= scale * tl.load(norm + dims, mask=inside, other=0.0)
        other *= scale * tl.load(norm + partner, mask=rotated, other=0.0)
    c = tl.load(cos + angle, rotated, 1.0, cache_modifier=".cg")
    s = tl.load(sin + angle, rotated, 0.0, cache_modifier=".cg")
    return value * c + tl.where(first, -other, other) * s


@triton.jit
def _head_kernel(
    x, norm, cos, sin, out, row_stride, head_stride, eps,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One head of one row a program: normed and rotated into out [rows, HEADS, D]."""
    row, head = tl.program_id(1).to(tl.int64), tl.program_id(0)
    wait_for_inputs(OVERLAP)
    source = x + row * row_stride + head * head_stride
    cos, sin = cos + row * HALF, sin + row * HALF
    rotated = normed_rope(source, norm, cos, sin, eps, D, HALF, BLOCK, NORM, INTERLEAVED)
    dims = tl.arange(0, BLOCK)
    tl.store(out + (row * HEADS + head) * D + dims, rotated, mask=dims < D)


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


def _rows(x: Tensor) -> Tensor:
    """Return [..., N] as rows of one stride; a slice of a wider matmul output is not copied."""
    flat = x.flatten(0, -2)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def flat_heads(x: Tensor) -> Tensor:
    """Return [B, T, H, D] as [B * T, H, D] with contiguous heads."""
    flat = x.flatten(0, 1)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = add_rms_norm(x, None, weight, eps)[1]
    assert isinstance(normed, Tensor)
    return normed


def add_rms_norm(
    x: Tensor, add: Tensor | RowScaled | None, weight: Tensor, eps: float, *, pack: bool = False
) -> tuple[Tensor, Tensor | PackedRows]:
    width = x.shape[-1]
    assert weight.shape == (width,) and weight.dtype == torch.float32, f"{weight.shape}, {weight.dtype}"
    flat = _rows(x)
    more, scale = (add.out, add.scale) if isinstance(add, RowScaled) else (add, weight)
    more = flat if more is None else _rows(more)
    total = x if add is None else torch.empty(x.shape, dtype=torch.float32, device=x.device)
    normed = torch.empty(x.shape, device=x.device) if not pack else empty_rows(len(flat), width, x.device)
    block = max(256, triton.next_power_of_2(width))
    _norm_kernel[(len(flat),)](
        flat, more, scale, weight, total, *_target(normed, flat.stride(0), more.stride(0)), eps,
        WIDTH=width, PADDED=_padded(width), BLOCK=block, PACK=pack,
        ADD=0 if add is None else 1 + isinstance(add, RowScaled),
        num_warps=min(16, max(1, block // 512)), **launch_options(x.device),
    )  # fmt: skip
    return total, normed


def _padded(columns: int) -> int:
    return -(-columns // 256) * 256


def _target(out: Tensor | PackedRows, *strides: int) -> tuple:
    """Return a kernel's output arguments: data, the given strides, row scales, strides of packed rows."""
    if isinstance(out, PackedRows):
        return out.data, *strides, out.scale, *out.strides
    return out, *strides, out, 0, 0


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, pack: bool = False
) -> Tensor | PackedRows:
    heads, dim = x.shape[-2:]
    x, flat = x.contiguous(), _rows(gate)
    block = triton.next_power_of_2(dim)
    if pack:
        packed = empty_rows(len(flat), heads * dim, x.device)
        _gated_norm_rows_kernel[(len(flat),)](
            x, flat, weight, packed.data, packed.scale, flat.stride(0), *packed.strides, eps,
            HEADS=heads, D=dim, PADDED=_padded(heads * dim), BLOCK_HEADS=triton.next_power_of_2(heads),
            BLOCK=block, num_warps=16, **launch_options(x.device),
        )  # fmt: skip
        return packed
    out = torch.empty(gate.shape, dtype=torch.float32, device=x.device)
    units = x.numel() // dim
    _gated_norm_kernel[(triton.cdiv(units, 4),)](
        x, flat, weight, out, flat.stride(0), units, eps,
        HEADS=heads, D=dim, BLOCK=block, UNITS=4, num_warps=4,
    )  # fmt: skip
    return out


def silu_parts(columns: int) -> tuple[int, int]:
    """Return two powers of two that together hold a packed row."""
    padded = _padded(columns)
    first = 1 << ((padded - 1).bit_length() - 1)
    return first, triton.next_power_of_2(padded - first)


def silu_mul(gate: Tensor | RowScaled, up: Tensor | RowScaled, *, pack: bool = False) -> Tensor | PackedRows:
    scale = gate.scale if isinstance(gate, RowScaled) else None
    assert not isinstance(up, RowScaled) or up.scale is scale, "row scales of two matmuls"
    gate, up = (part.out if isinstance(part, RowScaled) else part for part in (gate, up))
    width, block = gate.shape[-1], 1024
    gates, ups = _rows(gate), _rows(up)
    if pack:
        packed = empty_rows(len(gates), width, gate.device)
        first, rest = silu_parts(width)
        _silu_rows_kernel[(len(gates),)](
            gates, ups, packed.scale if scale is None else scale, packed.data, packed.scale,
            gates.stride(0), ups.stride(0), *packed.strides,
            WIDTH=width, PADDED=_padded(width), FIRST=first, REST=rest, SCALED=scale is not None,
            num_warps=triton.next_power_of_2(max(1, min(16, first // 1024))), **launch_options(gate.device),
        )  # fmt: skip
        return packed
    out = torch.empty(gate.shape, dtype=torch.float32, device=gate.device)
    _silu_mul_kernel[(triton.cdiv(width, block), len(gates))](
        gates, ups, out, gates.stride(0), ups.stride(0), width, BLOCK=block, num_warps=4
    )
    return out


def head_rope(
    x: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> Tensor:
    heads, dim = x.shape[-2:]
    flat = flat_heads(x)
    assert cos.is_contiguous() and sin.is_contiguous(), f"{cos.stride()}, {sin.stride()}"
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _head_kernel[(heads, len(flat))](
        flat, flat if norm is None else norm, cos, sin, out, flat.stride(0), flat.stride(1), eps,
        HEADS=heads, D=dim, HALF=cos.shape[-1], BLOCK=triton.next_power_of_2(dim), NORM=norm is not None,
        INTERLEAVED=interleaved, num_warps=1, **launch_options(x.device),
    )  # fmt: skip
    return out


def ring_heads(
    k: Tensor,
    v: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    ring: KVRing,
    positions: Tensor,
    count: Tensor,
) -> None:
    (rows, heads, dim), keys, values = k.shape[1:], ring.keys, ring.values
    assert rows <= keys.shape[1], f"{rows} rows, a ring of {keys.shape[1]}"
    k, v = flat_heads(k), flat_heads(v)
    assert keys.is_contiguous() and values.is_contiguous(), f"{keys.stride()}, {values.stride()}"
    assert positions.is_contiguous(), f"{positions.stride()}"
    assert cos.is_contiguous() and sin.is_contiguous(), f"{cos.stride()}, {sin.stride()}"
    _ring_kernel[(heads, len(k))](
        k, v, norm, cos, sin, keys, values, ring.slots, positions, count,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), rows, keys.shape[1], eps,
        HEADS=heads, D=dim, HALF=cos.shape[-1], BLOCK=triton.next_power_of_2(dim), INTERLEAVED=False,
        num_warps=1,
    )  # fmt: skip
