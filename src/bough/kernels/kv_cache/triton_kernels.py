"""Triton kernels that write K and V to the KV cache in its format, and read rows of it back.

The same launch applies RoPE to queries and keys. `reference` and `rotation` specify the values, `format` the
planes; rows are a power of two.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.kv_cache.format import HeadPool
from bough.kernels.kv_cache.reference import LARGEST_SCALE, SHORTEST, TQ3_BOUNDS, TQ3_DIM, TQ3_LEVELS
from bough.kernels.kv_cache.rotation import FIRST_SIGNS, LAST_SIGNS, group_size
from bough.kernels.norm_rope.triton_kernels import flat_heads, normed_rope
from bough.kernels.runtime.triton_pdl import launch_options, wait_for_inputs


def _words(mask: int) -> list[tl.constexpr]:
    """128 signs as four signed numbers of 32 bits."""
    words = [mask >> shift & 0xFFFFFFFF for shift in (0, 32, 64, 96)]
    return [tl.constexpr(word - (word >> 31 << 32)) for word in words]


_FIRST_0, _FIRST_1, _FIRST_2, _FIRST_3 = _words(FIRST_SIGNS)
_LAST_0, _LAST_1, _LAST_2, _LAST_3 = _words(LAST_SIGNS)
_LEVEL_0, _LEVEL_1, _LEVEL_2, _LEVEL_3 = (tl.constexpr(level) for level in TQ3_LEVELS[4:])
_BOUND_1, _BOUND_2, _BOUND_3 = (tl.constexpr(bound) for bound in TQ3_BOUNDS[4:])
_LARGEST_SCALE, _SHORTEST = tl.constexpr(LARGEST_SCALE), tl.constexpr(SHORTEST)


@triton.jit
def _negative(index, LAST: tl.constexpr):
    """1 where the sign at `index` (below 128) is negative, else 0."""
    if LAST:
        low, high = tl.where(index < 32, _LAST_0, _LAST_1), tl.where(index < 96, _LAST_2, _LAST_3)
    else:
        low, high = tl.where(index < 32, _FIRST_0, _FIRST_1), tl.where(index < 96, _FIRST_2, _FIRST_3)
    return (tl.where(index < 64, low, high) >> (index % 32)) & 1


@triton.jit
def rotation_matrix(SIZE: tl.constexpr, BACK: tl.constexpr):
    """[SIZE, SIZE] of -1 and 1: rows of SIZE values times this and SIZE ** -0.5 are rotated, or back."""
    row, column = tl.arange(0, SIZE), tl.arange(0, SIZE)
    both = row[:, None] & column[None, :]
    both ^= both >> 4
    # Whether the number of common bits is odd, for each value of four bits.
    odd = (0x6996 >> (both & 15)) & 1
    odd ^= _negative(row, BACK)[:, None] ^ _negative(column, not BACK)[None, :]
    return ((odd << 15) | 0x3C00).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def rotate(x, SIZE: tl.constexpr, BACK: tl.constexpr):
    """A vector x [D], rotated in groups of SIZE, or back; by sums and differences in float32."""
    index = tl.arange(0, x.shape[0])
    x = tl.where(_negative(index % SIZE, BACK) != 0, -x, x)
    for power in tl.static_range(7):
        if (1 << power) < SIZE:
            other = tl.gather(x, index ^ (1 << power), 0)
            x = tl.where((index & (1 << power)) != 0, other - x, x + other)
    x *= SIZE**-0.5
    return tl.where(_negative(index % SIZE, not BACK) != 0, -x, x)


@triton.jit
def _half(code, ZERO: tl.constexpr):
    """code - ZERO for codes of at most 10 bits: float16 of 1024 + code has the code in its last bits."""
    return (code.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + ZERO)


@triton.jit
def _scaled(rows, scales, row, present, GROUP: tl.constexpr):
    """rows [N, D] times the scales of their groups; all scales of a row in one load, for pipelining."""
    N: tl.constexpr = rows.shape[0]
    D: tl.constexpr = rows.shape[1]
    COUNT: tl.constexpr = D // GROUP
    source = scales + row[:, None] * COUNT + tl.arange(0, COUNT)[None, :]
    group_scales = tl.load(source, mask=present[:, None], other=0.0)
    return tl.reshape(tl.reshape(rows, (N, COUNT, GROUP)) * group_scales[:, :, None], (N, D))


@triton.jit
def _concat(first, second):
    """Two tiles [N, W] as one [N, 2 * W]."""
    N: tl.constexpr = first.shape[0]
    W: tl.constexpr = first.shape[1]
    return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (N, 2 * W))


@triton.jit
def _tq3_strip(low, top, NUMBER: tl.constexpr):
    """Levels of one of four strips, whose two low bits and top bits share bytes with the others'."""
    code = (((low >> (2 * NUMBER)) << 1) & 6) | (((top >> (2 * NUMBER)) << 3) & 8)
    # -7/8 to 7/8 in steps of 1/4: the last bits of float16 128 are eighths.
    x = (code.to(tl.uint16) | 0x5800).to(tl.float16, bitcast=True) - 128.875
    square = x * x
    # A polynomial through the levels; with these coefficients float16 gives each correctly rounded.
    factor = (square * -0.033782958984375 + 0.0841064453125) * square + 0.0162200927734375
    return x * (factor * square + 0.17138671875)


@triton.jit
def load_rows(
    codes, scales, first, row, present, FORMAT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Rows `first` + `row` [N] of a pool as [N, BLOCK] of TYPE, as they are stored: rotated if quantised.

    `first` (int64) moves the pointer, so that row offsets are small and the same for every block.
    """
    there = present[:, None]
    if FORMAT == "float":
        dims = tl.arange(0, BLOCK)[None, :]
        codes += first * D
        rows = tl.load(codes + row[:, None] * D + dims, mask=there & (dims < D), other=0.0).to(TYPE)
    elif FORMAT == "q8_0":
        codes += first * D
        code = tl.load(codes + row[:, None] * D + tl.arange(0, D)[None, :], mask=there, other=0)
        rows = _scaled(_half(code ^ 128, 128.0), scales + first * (D // 32), row, present, 32)
    elif FORMAT == "tq3_0":
        W: tl.constexpr = D // 4
        GROUP: tl.constexpr = min(D, 128)
        codes += first * (3 * W // 2)
        source = codes + (row * (3 * W // 2))[:, None]
        strip = tl.arange(0, W)[None, :]
        low = tl.load(source + strip, mask=there, other=0)
        # A byte of the top bits serves both halves of a strip.
        top = tl.load(source + W + strip % (W // 2), mask=there, other=0) >> (strip // (W // 2)).to(tl.uint8)
        left = _concat(_tq3_strip(low, top, 0), _tq3_strip(low, top, 1))
        right = _concat(_tq3_strip(low, top, 2), _tq3_strip(low, top, 3))
        rows = _scaled(_concat(left, right), scales + first * (D // GROUP), row, present, GROUP)
    else:
        H: tl.constexpr = D // 2
        half = tl.arange(0, H)[None, :]
        if FORMAT == "q4_0":
            codes += first * H
            code = tl.load(codes + row[:, None] * H + half, mask=there, other=0)
            left, right = _half(code & 15, 8.0), _half(code >> 4, 8.0)
        else:
            tl.static_assert(FORMAT == "q5_0")
            codes += first * (H + D // 8)
            source = codes + (row * (H + D // 8))[:, None]
            code = tl.load(source + half, mask=there, other=0)
            # A byte of the fifth bits serves four quarters of each half.
            fifth = tl.load(source + H + half % (D // 8), mask=there, other=0)
            fifth >>= (half // (D // 8)).to(tl.uint8)
            left = _half((code & 15) | ((fifth & 1) << 4), 16.0)
            right = _half((code >> 4) | (fifth & 16), 16.0)
        rows = _scaled(_concat(left, right), scales + first * (D // 32), row, present, 32)
    return rows


@triton.jit
def _pack(target, code, DONE: tl.constexpr, BITS: tl.constexpr):
    """Store BITS of each code [D], those after the first DONE, as a plane at `target`."""
    COUNT: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = code.shape[0] // COUNT
    part = tl.reshape((code >> DONE) & ((1 << BITS) - 1), (COUNT, BYTES))
    packed = tl.sum(part << (tl.arange(0, COUNT) * BITS)[:, None], 0)
    tl.store(target + tl.arange(0, BYTES), packed.to(tl.uint8))


@triton.jit
def _inverse(scale):
    """1 / scale, 0 where float32 overflows."""
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return tl.where(tl.abs(inverse) == float("inf"), 0.0, inverse)


@triton.jit
def _store_blocks(x, codes, scales, FORMAT: tl.constexpr):
    """q8_0, q5_0 and q4_0: groups of 32 by their value of largest magnitude."""
    D: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = D // 32
    blocks, index = tl.reshape(x, (GROUPS, 32)), tl.arange(0, 32)[None, :]
    size = tl.abs(blocks)
    largest = tl.max(size, 1)
    if FORMAT == "q8_0":
        scale = tl.div_rn(largest, tl.full((GROUPS,), 127.0, tl.float32))
        exact = blocks * _inverse(scale)[:, None]
        # Halves away from zero; |x| + 0.5 would be rounded itself.
        whole = tl.floor(tl.abs(exact))
        whole += tl.where(tl.abs(exact) - whole >= 0.5, 1.0, 0.0)
        code = tl.where(exact < 0, -whole, whole).to(tl.int32) & 255
    else:
        HALF: tl.constexpr = 16 if FORMAT == "q5_0" else 8
        first = tl.min(tl.where(size == largest[:, None], index, 32), 1)
        signed = tl.sum(tl.where(index == first[:, None], blocks, 0.0), 1)
        scale = signed * (-1.0 / HALF)
        exact = blocks * _inverse(scale)[:, None] + (HALF + 0.5)
        code = tl.minimum(tl.maximum(exact, 0.0), 2.0 * HALF - 1).to(tl.int32)
    code = tl.reshape(code, (D,))
    if FORMAT == "q8_0":
        _pack(codes, code, 0, 8)
    else:
        _pack(codes, code, 0, 4)
        if FORMAT == "q5_0":
            _pack(codes + D // 2, code, 4, 1)
    scale = tl.minimum(tl.maximum(scale, -_LARGEST_SCALE), _LARGEST_SCALE)
    tl.store(scales + tl.arange(0, GROUPS), scale.to(tl.float16))


@triton.jit
def _store_tq3(x, codes, scales, STRETCH: tl.constexpr):
    """Groups of 128 (or one of D) by their norm, each value to the nearest of eight levels."""
    D: tl.constexpr = x.shape[0]
    GROUP: tl.constexpr = min(D, 128)
    groups = tl.reshape(x, (D // GROUP, GROUP))
    length = tl.sqrt_rn(tl.sum(groups * groups, 1))
    some = length > _SHORTEST
    unit = tl.div_rn(groups, tl.where(some, length, 1.0)[:, None] + tl.zeros_like(groups)) * STRETCH
    unit = tl.where(some[:, None], unit, 0.0)
    low = (unit >= -_BOUND_1).to(tl.int32) + (unit >= -_BOUND_2).to(tl.int32)
    high = (unit >= _BOUND_1).to(tl.int32) + (unit >= _BOUND_2).to(tl.int32) + (unit >= _BOUND_3).to(tl.int32)
    code = low + (unit >= -_BOUND_3).to(tl.int32) + (unit >= 0.0).to(tl.int32) + high
    apart = tl.where(code < 4, 3 - code, code - 4)
    level = tl.where(apart < 2, tl.where(apart == 0, _LEVEL_0, _LEVEL_1), 0.0)
    level += tl.where(apart >= 2, tl.where(apart == 2, _LEVEL_2, _LEVEL_3), 0.0)
    scale = tl.div_rn(length, tl.sqrt_rn(tl.sum(level * level, 1)))
    scale = tl.minimum(tl.where(some, scale, 0.0), _LARGEST_SCALE)
    code = tl.reshape(code, (D,))
    _pack(codes, code, 0, 2)
    _pack(codes + D // 4, code, 2, 1)
    tl.store(scales + tl.arange(0, D // GROUP), scale.to(tl.float16))


@triton.jit
def _store_row(
    x, codes, scales, row, FORMAT: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, STRETCH: tl.constexpr
):
    """Store a head x [BLOCK] as row `row` (int64) of a pool."""
    if FORMAT == "float":
        dims = tl.arange(0, x.shape[0])
        tl.store(codes + row * D + dims, x.to(codes.dtype.element_ty), mask=dims < D)
    else:
        tl.static_assert(x.shape[0] == D)
        x = rotate(x, SIZE, False)
        if FORMAT == "tq3_0":
            _store_tq3(x, codes + row * (3 * D // 8), scales + row * ((D + 127) // 128), STRETCH)
        else:
            bits: tl.constexpr = 8 if FORMAT == "q8_0" else 5 if FORMAT == "q5_0" else 4
            _store_blocks(x, codes + row * (D * bits // 8), scales + row * (D // 32), FORMAT)


@triton.jit
def _cache_kernel(
    q, k, v, query_norm, key_norm, cos, sin, out, key_codes, key_scales, value_codes, value_scales, pages,
    offsets, q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, STRETCH: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    NORM: tl.constexpr, INTERLEAVED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One head of one row a program: a key, normed and rotated by position, a value, or a query."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    cos += row * HALF
    sin += row * HALF
    wait_for_inputs(OVERLAP)
    if head < 2 * KV:  # first, since quantising takes longest
        page = tl.load(pages + row, cache_modifier=".cg").to(tl.int64)
        offset = tl.load(offsets + row, cache_modifier=".cg").to(tl.int64)
        pool_row = (page * KV + head % KV) * PAGE + offset
        if head < KV:
            source = k + row * k_stride + head * k_head_stride
            key = normed_rope(source, key_norm, cos, sin, eps, D, HALF, BLOCK, NORM, INTERLEAVED)
            _store_row(key, key_codes, key_scales, pool_row, KEYS, D, SIZE, STRETCH)
        else:
            source = v + row * v_stride + (head - KV) * v_head_stride
            value = tl.load(source + dims, dims < D, 0.0, cache_modifier=".cg").to(tl.float32)
            _store_row(value, value_codes, value_scales, pool_row, VALUES, D, SIZE, STRETCH)
    else:
        source = q + row * q_stride + (head - 2 * KV) * q_head_stride
        query = normed_rope(source, query_norm, cos, sin, eps, D, HALF, BLOCK, NORM, INTERLEAVED)
        tl.store(out + (row * HEADS + head - 2 * KV) * D + dims, query, mask=dims < D)


@triton.jit(do_not_specialize=["first", "count"])
def _expand_kernel(
    codes, scales, table, out, first, count,
    KV: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One head of BLOCK_N tokens a program, rotated back."""
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    present = token < count
    index = first + token
    page = tl.load(table + index // PAGE, mask=present, other=0).to(tl.int64)
    pool_row = (page * KV + head) * PAGE + index % PAGE
    rows = load_rows(codes, scales, 0, pool_row, present, FORMAT, D, D, tl.float16)
    groups = tl.reshape(rows, (BLOCK_N * (D // SIZE), SIZE))
    back = tl.dot(groups, rotation_matrix(SIZE, True)) * (SIZE**-0.5)
    at = (token.to(tl.int64) * KV + head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out + at, tl.reshape(back, (BLOCK_N, D)).to(tl.float16), mask=present[:, None])


def takes(pool: HeadPool) -> bool:
    dim = pool.dim
    return dim >= 16 and (not pool.format.quantised or (dim >= 32 and dim & (dim - 1) == 0))


def form(pool: HeadPool) -> str:
    """Return the kernels' name of a pool's format."""
    return pool.format.name if pool.format.quantised else "float"


def tensors(pool: HeadPool) -> tuple[Tensor, Tensor]:
    """Return codes and scales; without scales, any pointer will do."""
    assert pool.codes.is_contiguous(), f"{pool.codes.stride()}"
    return pool.codes, pool.codes if pool.scales is None else pool.scales


def takes_cache_heads(*heads: object, keys: HeadPool, values: HeadPool, **rest: object) -> bool:
    return takes(keys) and takes(values)


def cache_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms: Sequence[Tensor | None],
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    keys: HeadPool,
    values: HeadPool,
    pages: Tensor,
    offsets: Tensor,
    interleaved: bool,
) -> Tensor:
    """Write heads k, normed and rotated by position, and v [B, T, KV, D] to (page, offset) [B * T] each.

    Return the heads q [B, T, H, D], normed and rotated.
    """
    heads, (kv_heads, dim) = q.shape[-2], k.shape[-2:]
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    q, k, v = flat_heads(q), flat_heads(k), flat_heads(v)
    query_norm, key_norm = norms
    assert (query_norm is None) == (key_norm is None), "one norm of two"
    assert cos.is_contiguous() and sin.is_contiguous(), f"{cos.stride()}, {sin.stride()}"
    assert keys.codes.shape[:3] == values.codes.shape[:3] and keys.codes.shape[1] == kv_heads, (
        f"{keys.codes.shape}, {values.codes.shape}, {kv_heads} heads"
    )
    _cache_kernel[(2 * kv_heads + heads, len(k))](
        q, k, v, q if query_norm is None else query_norm, k if key_norm is None else key_norm, cos, sin, out,
        *tensors(keys), *tensors(values), pages, offsets, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        eps, HEADS=heads, KV=kv_heads, PAGE=keys.page, D=dim, HALF=cos.shape[-1],
        BLOCK=triton.next_power_of_2(dim), SIZE=group_size(dim), STRETCH=(min(dim, TQ3_DIM) / TQ3_DIM) ** 0.5,
        KEYS=form(keys), VALUES=form(values), NORM=key_norm is not None, INTERLEAVED=interleaved,
        # A fused multiply-add rounds once and would give other codes than two separate roundings.
        num_warps=1, enable_fp_fusion=False, **launch_options(k.device),
    )  # fmt: skip
    return out


def expand(pool: HeadPool, page_table: Tensor, first: int, count: int) -> Tensor:
    """Return tokens first to first + count - 1 of a sequence, float16 [count, KV, D]; page_table [P].

    Rotated back, so that prefill uses the same queries and outputs for all formats: the matmul costs about a
    hundredth of the attention of 2048 rows over these tokens.
    """
    assert pool.format.quantised and takes(pool), f"{pool.format.name}, rows of {pool.dim}"
    assert page_table.dim() == 1 and page_table.is_contiguous(), f"{page_table.shape}"
    kv_heads, page = pool.codes.shape[1:3]
    out = torch.empty(count, kv_heads, pool.dim, dtype=torch.float16, device=pool.codes.device)
    block = 32
    _expand_kernel[(triton.cdiv(count, block), kv_heads)](
        *tensors(pool), page_table, out, first, count,
        KV=kv_heads, PAGE=page, D=pool.dim, SIZE=group_size(pool.dim), FORMAT=form(pool), BLOCK_N=block,
        num_warps=4,
    )  # fmt: skip
    return out
