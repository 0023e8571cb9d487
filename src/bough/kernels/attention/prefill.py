"""Triton kernel of causal attention over the paged KV cache for a prompt chunk.

The context is gathered from its pages a slice at a time, dequantised if needed, and the rows' running sums
are carried from slice to slice. Reading 16-bit pages directly was a quarter slower on an H200, whose L2 holds
most of a slice.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.attention.records import PagedContext
from bough.kernels.kv_cache.format import HeadPool
from bough.kernels.kv_cache.triton_kernels import expand
from bough.kernels.runtime import dry_run
from bough.kernels.runtime.device import capability_of

LOG2_E = 1.4426950408889634
SLICE_BYTES = 64 << 20  # of expanded K and V at a time
# Whether Hopper reads queries, K and V through tensor descriptors (TMA), queries scaled and rounded before.
# Without addresses in registers 64 keys of 256 dims at a time fit, and mma are not serialised: an H200 takes
# 28% less time at 8,192 tokens and 21% less at 131,072.
DESCRIPTORS = True


@triton.jit
def _accumulate(scores, values, top, weight, sum_, PRECISION: tl.constexpr):
    """Add one block of scores [M, N] and V [N, D] to the running maximum, weight and sum of each row."""
    higher = tl.maximum(top, tl.max(scores, 1))
    shares = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(top - higher)
    weight = weight * fade + tl.sum(shares, 1)
    sum_ = tl.dot(shares.to(values.dtype), values, sum_ * fade[:, None], input_precision=PRECISION)
    return higher, weight, sum_


@triton.jit(do_not_specialize=["T", "first", "last", "window"])
def _chunk_attention_kernel(
    q, keys, values, lengths, gate, out, tops, weights, gate_row, gate_head, scale, T, first, last, window,
    KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BEGIN: tl.constexpr, END: tl.constexpr, GATE: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """One query head of BLOCK_M rows a program, over the visible tokens among `first` to `last` - 1.

    WINDOW: of them the newest `window` of each row.

    DESCRIPTORS: q [T, heads * D], in 16 bits and scaled, keys and values [tokens, KV * D] are descriptors of
    tiles, with zeroes outside; else pointers.
    """
    # The last rows see most tokens and start first.
    tile, query_head = tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(0)
    head = query_head // GROUP
    length = tl.load(lengths).to(tl.int32)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = rows < T
    dims = tl.arange(0, D)
    unit = rows * KV * GROUP + query_head
    at = unit[:, None] * D + dims[None, :]
    if DESCRIPTORS:
        queries = q.load([tile * BLOCK_M, query_head * D])
    else:
        queries = tl.load(q + at, mask=live[:, None], other=0.0).to(tl.float32) * scale
        queries = queries.to(keys.dtype.element_ty)
    if BEGIN:
        top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        sum_ = tl.zeros((BLOCK_M, D), tl.float32)
    else:
        top = tl.load(tops + unit, mask=live, other=0.0)
        weight = tl.load(weights + unit, mask=live, other=1.0)
        sum_ = tl.load(out + at, mask=live[:, None], other=0.0)

    stop = tl.minimum(length + tl.minimum((tile + 1) * BLOCK_M, T), last)
    # All rows see all tokens of the blocks before this one.
    edge = tl.maximum((length + tile * BLOCK_M + 1) // BLOCK_N * BLOCK_N, first)
    edge = tl.minimum(edge, tl.maximum(stop, first) // BLOCK_N * BLOCK_N)
    begin, hidden = first, -float("inf")
    if WINDOW:
        begin = tl.maximum((length + tile * BLOCK_M - window + 1) // BLOCK_N * BLOCK_N, first)
        edge = begin
        # Finite: a row may see nothing of a block. What that adds is multiplied by 0 at the row's first key.
        hidden = -1e30
    tokens = tl.arange(0, BLOCK_N)
    # Constant offsets plus one scalar per block: 64-bit offsets would take too many registers.
    key_offsets = tokens[None, :] * (KV * D) + dims[:, None]
    value_offsets = tokens[:, None] * (KV * D) + dims[None, :]
    for start in range(begin, edge, BLOCK_N):
        block = ((start - first).to(tl.int64) * KV + head) * D
        k = keys.load([start - first, head * D]).T if DESCRIPTORS else tl.load(keys + block + key_offsets)
        scores = tl.dot(queries, k, input_precision=PRECISION)
        v = values.load([start - first, head * D]) if DESCRIPTORS else tl.load(values + block + value_offsets)
        top, weight, sum_ = _accumulate(scores, v, top, weight, sum_, PRECISION)
    for start in tl.range(edge, stop, BLOCK_N, num_stages=1):
        index = start + tokens
        there = index < stop
        block = ((start - first).to(tl.int64) * KV + head) * D
        if DESCRIPTORS:
            k = keys.load([start - first, head * D]).T
        else:
            k = tl.load(keys + block + key_offsets, mask=there[None, :], other=0.0)
        scores = tl.dot(queries, k, input_precision=PRECISION)
        seen = there[None, :] & (index[None, :] <= length + rows[:, None])
        if WINDOW:
            seen = seen & (index[None, :] > length + rows[:, None] - window)
        scores = tl.where(seen, scores, hidden)
        if DESCRIPTORS:
            v = values.load([start - first, head * D])
        else:
            v = tl.load(values + block + value_offsets, mask=there[:, None], other=0.0)
        top, weight, sum_ = _accumulate(scores, v, top, weight, sum_, PRECISION)

    if END:
        sum_ = sum_ / weight[:, None]
        if GATE:
            gate += query_head * gate_head
            gate_at = rows[:, None] * gate_row + dims[None, :]
            sum_ *= tl.sigmoid(tl.load(gate + gate_at, mask=live[:, None], other=0.0).to(tl.float32))
    else:
        tl.store(tops + unit, top, mask=live)
        tl.store(weights + unit, weight, mask=live)
    tl.store(out + at, sum_, mask=live[:, None])


def tiles(dim: int, capability: tuple[int, int] | None) -> dict[str, int]:
    """Return rows and keys at a time, stages, warps; by shared memory and registers.

    dim: of a head in 16 bits, twice as many in 32; capability: of an NVIDIA card; None for others.
    """
    if capability is None or capability < (8, 0):
        return {"BLOCK_M": 32 if dim > 128 else 64, "BLOCK_N": 16, "num_stages": 1, "num_warps": 4}
    warps = 4 if dim <= 128 else 8
    if capability not in ((8, 0), (9, 0), (10, 0)):  # 99 KiB
        keys = 64 if dim <= 128 else 32 if dim <= 256 else 16
        return {"BLOCK_M": 64, "BLOCK_N": keys, "num_stages": 2, "num_warps": warps}
    if dim > 256:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 1, "num_warps": 8}
    if dim > 128 and capability == (8, 0):
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2, "num_warps": 8}
    # With 64 keys of 256 dims a warp group runs out of registers, and its mma are serialised.
    keys = 32 if dim > 128 and capability == (9, 0) else 64
    stages = 2 if dim > 128 and keys == 64 else 3
    return {"BLOCK_M": 128, "BLOCK_N": keys, "num_stages": stages, "num_warps": 8}


def reads_tiles(dim: int, width: int, device: torch.device) -> bool:
    """Return whether heads of `dim` values of `width` bytes are read through descriptors."""
    return DESCRIPTORS and (dim, width) == (256, 2) and capability_of(device) == (9, 0)


def descriptor_tiles() -> dict[str, int]:
    """Return the same as `tiles` for heads that are read through descriptors."""
    return {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 2, "num_warps": 8}


def takes(pool: HeadPool) -> bool:
    return 16 <= pool.dim <= 256 and pool.dim & (pool.dim - 1) == 0


def takes_chunk_attention(q: Tensor, context: PagedContext, **options: object) -> bool:
    return takes(context.keys) and (context.window is None or not context.sinks)


def chunk_attention(q: Tensor, context: PagedContext, *, span: int, gate: Tensor | None = None) -> Tensor:
    keys, page_table, lengths = context.keys, context.page_table, context.lengths
    q = q.contiguous()
    batch, rows, heads, dim = q.shape
    kv_heads, page = keys.codes.shape[1:3]
    sides = (keys, context.values)
    for side in sides:
        assert takes(side) and side.dim == dim, f"heads of {side.dim}, queries of {dim}"
        assert side.codes.is_contiguous() and side.page == page, f"{side.codes.shape}"
    widths = [2 if side.format.quantised else side.codes.element_size() for side in sides]
    tiled = reads_tiles(dim, max(widths), q.device)
    sizes = descriptor_tiles() if tiled else tiles(dim * max(widths) // 2, capability_of(q.device))
    out = torch.empty(batch, rows, heads, dim, device=q.device)
    gates = out if gate is None else gate
    if gates.stride(-1) != 1 or gates.stride(0) != rows * gates.stride(1):
        gates = gates.contiguous()

    whole = max(page, sizes["BLOCK_N"])
    assert whole % page == 0 and whole % sizes["BLOCK_N"] == 0, f"pages of {page}, {sizes}"
    step = max(whole, SLICE_BYTES // (sum(widths) * kv_heads * dim) // whole * whole)
    carried = [torch.empty(rows, heads, device=q.device) for _ in range(2)]
    spans = [span]
    if dry_run.current() is not None:
        spans.append(page_table.shape[1] * page)  # the first, middle and last slices of the longest context
    window = context.window
    # The shorter sequences of a batch see tokens before.
    unseen = 0 if window is None or batch > 1 else rows + window - 1
    slices = [
        (first, begin, end)
        for end in spans
        for begin in [max(0, end - unseen) // whole * whole if unseen else 0]
        for first in range(begin, end, step)
    ]
    for item in range(batch):
        queries = _scaled(q[item], keys) if tiled else q[item]
        for first, begin, end in slices:
            count = min(step, end - first)
            sources = [_slice(side, page_table[item], first, count) for side in sides]
            read = _descriptors(queries, *sources, sizes) if tiled else (queries, *sources)
            _chunk_attention_kernel[(heads, triton.cdiv(rows, sizes["BLOCK_M"]))](
                *read, lengths[item:], gates[item], out[item], *carried,
                gates.stride(1), gates.stride(2), dim**-0.5 * LOG2_E, rows, first, first + count, window or 0,
                KV=kv_heads, GROUP=heads // kv_heads, D=dim, BEGIN=first == begin, END=first + count >= end,
                GATE=gate is not None, WINDOW=window is not None, PRECISION="ieee", DESCRIPTORS=tiled,
                **sizes,
            )  # fmt: skip
    return out


def _scaled(q: Tensor, keys: HeadPool) -> Tensor:
    """Return queries scaled, in the type of the keys that `_slice` returns."""
    stored = torch.float16 if keys.format.quantised else keys.codes.dtype
    scaled = torch.empty(q.shape, dtype=stored, device=q.device)
    return torch.mul(q, q.shape[-1] ** -0.5 * LOG2_E, out=scaled)


def _descriptors(q: Tensor, keys: Tensor, values: Tensor, sizes: dict[str, int]) -> list[Any]:
    """Return descriptors of the tiles of queries, of keys and of values."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    assert q.dtype == keys.dtype, f"queries in {q.dtype}, keys in {keys.dtype}"
    sides = ((q, sizes["BLOCK_M"]), (keys, sizes["BLOCK_N"]), (values, sizes["BLOCK_N"]))
    return [TensorDescriptor.from_tensor(part.flatten(1), [rows, part.shape[-1]]) for part, rows in sides]


def _slice(side: HeadPool, table: Tensor, first: int, count: int) -> Tensor:
    """Return tokens first (a page's first) to first + count - 1 of a sequence: floats [count, KV, D]."""
    if side.format.quantised:
        return expand(side, table.contiguous(), first, count)
    pages = table[first // side.page : -(-(first + count) // side.page)]
    return side.codes[pages].transpose(1, 2).contiguous().flatten(0, 1)[:count]
