"""Triton kernel of the short convolution over a prompt chunk: the delta rule's inputs, and the new windows.

Queries and keys have unit length and are stored as float16, the precision of the matmuls that read them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.causal_conv.records import ConvRows, ConvWeights, DeltaBuffers, DeltaHeads
from bough.kernels.causal_conv.reference import L2_EPS
from bough.kernels.causal_conv.triton_kernels import takes_tree_conv

ROWS = 16  # of a program; more than a window, so only the first program reads the window


@triton.jit
def _before(
    at, needed, taken, item, slot, channels, window, stash, path, PATH, SAVED,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Inputs of path and window before the chunk, the newest at -1; zero if not wanted."""
    from_path = taken + at
    on_path = needed & (from_path >= 0)
    saved = tl.load(path + item * PATH + from_path, mask=on_path, other=0)
    new = stash + ((slot * SAVED + saved) * CHANNELS)[:, None] + channels[None, :]
    old = window + ((slot * (WIDTH - 1) + from_path + WIDTH - 1) * CHANNELS)[:, None] + channels[None, :]
    x = tl.load(new, mask=on_path[:, None], other=0.0).to(tl.float32)
    return x + tl.load(old, mask=(needed & (from_path < 0))[:, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T", "PATH", "SAVED"])
def _chunk_conv_kernel(
    inputs, alpha, beta, weight, decay, bias, window, stash, slots, path, count,
    q, k, v, g_out, beta_out, input_stride, alpha_stride, beta_stride, T, PATH, SAVED, eps, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One head's channels of some rows a program."""
    block, head, item = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    CHANNELS: tl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * D
    slot = tl.load(slots + item).to(tl.int64)
    taken = tl.load(count + item).to(tl.int64)
    dims = tl.arange(0, D)
    channels = head * D + dims
    rows = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
    live = rows < T
    mixed = tl.zeros((ROWS, D), tl.float32)
    for tap in tl.static_range(WIDTH):
        at = rows + tap - (WIDTH - 1)
        x = tl.load(
            inputs + ((item * T + at) * input_stride)[:, None] + channels[None, :],
            mask=(live & (at >= 0))[:, None], other=0.0,
        )  # fmt: skip
        x = x.to(window.dtype.element_ty).to(tl.float32)
        if block == 0:
            x += _before(
                at, live & (at < 0), taken, item, slot, channels, window, stash, path, PATH, SAVED,
                CHANNELS, WIDTH,
            )  # fmt: skip
        mixed += x * tl.load(weight + channels * WIDTH + tap)[None, :]
    mixed *= tl.sigmoid(mixed)
    row = item * T + rows
    if head >= 2 * KEY_HEADS:
        value_head = head - 2 * KEY_HEADS
        unit = row * VALUE_HEADS + value_head
        tl.store(v + unit[:, None] * D + dims[None, :], mixed, mask=live[:, None])
        a = tl.load(alpha + row * alpha_stride + value_head, mask=live, other=0.0)
        a = a.to(tl.float32) + tl.load(bias + value_head)
        # log1p(e) = log(u) e / (u - 1) with u = 1 + e as rounded: accurate for small e.
        e = tl.exp(tl.minimum(a, 20.0))
        u = 1.0 + e
        log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
        tl.store(g_out + unit, tl.load(decay + value_head) * tl.where(a > 20.0, a, log1p), mask=live)
        b = tl.load(beta + row * beta_stride + value_head, mask=live, other=0.0)
        tl.store(beta_out + unit, tl.sigmoid(b.to(tl.float32)), mask=live)
    else:
        mixed *= tl.rsqrt(tl.sum(mixed * mixed, 1) + eps)[:, None]
        target = (row * KEY_HEADS + head % KEY_HEADS)[:, None] * D + dims[None, :]
        if head < KEY_HEADS:
            tl.store(q + target, (mixed * scale).to(tl.float16), mask=live[:, None])
        else:
            tl.store(k + target, mixed.to(tl.float16), mask=live[:, None])

    if block == 0:
        entry = tl.arange(0, WINDOW).to(tl.int64)
        inside = entry < WIDTH - 1
        newest = T - (WIDTH - 1) + entry
        newest_inputs = tl.load(
            inputs + ((item * T + newest) * input_stride)[:, None] + channels[None, :],
            mask=(inside & (newest >= 0))[:, None], other=0.0,
        ).to(window.dtype.element_ty).to(tl.float32)  # fmt: skip
        newest_inputs += _before(
            newest, inside & (newest < 0), taken, item, slot, channels, window, stash, path, PATH, SAVED,
            CHANNELS, WIDTH,
        )  # fmt: skip
        tl.debug_barrier()  # all reads of the old window are done
        target = ((slot * (WIDTH - 1) + entry) * CHANNELS)[:, None] + channels[None, :]
        tl.store(window + target, newest_inputs.to(window.dtype.element_ty), mask=inside[:, None])


takes_chunk_heads = takes_tree_conv


def chunk_heads(
    inputs: Tensor, alpha: Tensor, beta: Tensor, weights: ConvWeights, buffers: DeltaBuffers, rows: ConvRows
) -> DeltaHeads:
    """See reference.chunk_heads; q and k are float16."""
    batch, count, _ = inputs.shape
    key_heads, value_heads, dim = weights.key_heads, len(weights.decay), weights.head_dim
    parameters, width = (weights.taps, weights.decay, weights.bias), weights.taps.shape[1]
    window, saved, tables = buffers.window, buffers.tree_inputs, (rows.slots, rows.path, rows.count)
    assert width <= ROWS, f"a convolution over {width} rows, at most {ROWS}"
    for part in (*parameters, window, saved, *tables):
        assert part.is_contiguous(), f"{part.shape}, strides {part.stride()}"
    assert window.dtype == saved.dtype, f"{window.dtype}, {saved.dtype}"
    # One row stride each: they may be slices of one matmul output.
    inputs, alpha, beta = (x if x.stride(-1) == 1 else x.contiguous() for x in (inputs, alpha, beta))
    inputs, alpha, beta = (x.flatten(0, 1) for x in (inputs, alpha, beta))

    def new(heads: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(batch, count, heads, *shape, dtype=dtype, device=inputs.device)

    q, k = (new(key_heads, dim, dtype=torch.float16) for _ in range(2))
    heads = DeltaHeads(q, k, new(value_heads, dim), new(value_heads), new(value_heads))
    _chunk_conv_kernel[(triton.cdiv(count, ROWS), 2 * key_heads + value_heads, batch)](
        inputs, alpha, beta, *parameters, window, saved, *tables,
        *heads, inputs.stride(0), alpha.stride(0), beta.stride(0), count, rows.path.shape[1],
        saved.shape[1], L2_EPS, dim**-0.5,
        KEY_HEADS=key_heads, VALUE_HEADS=value_heads, D=dim, WIDTH=width, ROWS=ROWS,
        WINDOW=triton.next_power_of_2(max(1, width - 1)), num_warps=4,
    )  # fmt: skip
    return heads
