"""Triton kernels of the short convolution over a path and a tree, up to the delta rule's inputs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.causal_conv.records import ConvRows, ConvWeights, DeltaBuffers, DeltaHeads, empty_heads
from bough.kernels.causal_conv.reference import L2_EPS

ROWS = 16  # rows at a time


@triton.jit
def _rows_of(first, item, T, RAGGED: tl.constexpr):
    """The first row of a sequence, and how many it has."""
    begin, rows = item * T, T
    if RAGGED:
        begin = tl.load(first + item)
        rows = (tl.load(first + item + 1) - begin).to(tl.int32)
    return begin, rows


@triton.jit(do_not_specialize=["T", "PATH"])
def _index_kernel(
    parents, count, first, index, T, PATH, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RAGGED: tl.constexpr
):
    """conv_index: each row follows its own parents."""
    item = tl.program_id(1).to(tl.int64)
    begin, rows = _rows_of(first, item, T, RAGGED)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < PATH + rows
    row = item * PATH + begin + at
    last = tl.load(count + item) - 1
    for tap in tl.static_range(WIDTH):
        tl.store(index + row * WIDTH + WIDTH - 1 - tap, at + WIDTH - 1, mask=inside)
        in_tree = at >= PATH
        parent = tl.load(parents + begin + at - PATH, mask=inside & in_tree, other=-1)
        at = tl.where(in_tree, tl.where(parent < 0, last, parent + PATH), at - 1)


@triton.jit
def _convolved(
    rows, live, item, begin, slot, channels, inputs, weight, window, stash, path, index,
    input_stride, PATH, SAVED,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows [ROWS] of [path, tree] through convolution and SiLU: [ROWS, D]."""
    sum_ = tl.zeros((ROWS, D), tl.float32)
    for tap in tl.static_range(WIDTH):
        at = tl.load(index + (item * PATH + begin + rows) * WIDTH + tap, mask=live, other=0)
        old = at < WIDTH - 1
        new = at >= WIDTH - 1 + PATH
        on_path = (at >= WIDTH - 1) & (at < WIDTH - 1 + PATH)
        saved = tl.load(path + item * PATH + at - (WIDTH - 1), mask=live & on_path, other=0)
        x = tl.load(
            window + ((slot * (WIDTH - 1) + at) * CHANNELS)[:, None] + channels[None, :],
            mask=(live & old)[:, None], other=0.0,
        ).to(tl.float32)  # fmt: skip
        x += tl.load(
            stash + ((slot * SAVED + saved) * CHANNELS)[:, None] + channels[None, :],
            mask=(live & on_path)[:, None], other=0.0,
        ).to(tl.float32)  # fmt: skip
        step_inputs = tl.load(
            inputs + ((begin + at - (WIDTH - 1) - PATH) * input_stride)[:, None] + channels[None, :],
            mask=(live & new)[:, None], other=0.0,
        )  # fmt: skip
        x += step_inputs.to(stash.dtype.element_ty).to(tl.float32)
        factor = tl.load(weight + channels * WIDTH + tap)
        sum_ += x * factor[None, :]
    return sum_ * tl.sigmoid(sum_)


@triton.jit(do_not_specialize=["T", "PATH", "SAVED"])
def _conv_kernel(
    inputs, alpha, beta, weight, decay, bias, window, stash, gates, slots, path, count, index, begins,
    q, k, v, g_out, beta_out, input_stride, alpha_stride, beta_stride, T, PATH, SAVED, eps, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, WINDOW: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """One head's channels a program, all rows: no other program uses them, so old rows may be overwritten."""
    head, item = tl.program_id(0), tl.program_id(1).to(tl.int64)
    CHANNELS: tl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * D
    slot = tl.load(slots + item).to(tl.int64)
    taken = tl.load(count + item).to(tl.int64)
    dims = tl.arange(0, D)
    channels = head * D + dims
    is_query, is_value = head < KEY_HEADS, head >= 2 * KEY_HEADS
    value_head = head - 2 * KEY_HEADS
    begin, tree_rows = _rows_of(begins, item, T, RAGGED)
    first = item * PATH + begin

    # A query is not needed after its step.
    for start in range(0, tl.where(is_query, 0, taken), ROWS):
        rows = start + tl.arange(0, ROWS)
        live = rows < taken
        mixed = _convolved(
            rows, live, item, begin, slot, channels, inputs, weight, window, stash, path, index,
            input_stride, PATH, SAVED, CHANNELS, WIDTH, D, ROWS,
        )  # fmt: skip
        if is_value:
            at = ((first + rows) * VALUE_HEADS + value_head)[:, None] * D + dims[None, :]
            tl.store(v + at, mixed, mask=live[:, None])
            saved = tl.load(path + item * PATH + rows, mask=live, other=0)
            source = (slot * SAVED + saved) * 2 * VALUE_HEADS + value_head
            unit = (first + rows) * VALUE_HEADS + value_head
            tl.store(g_out + unit, tl.load(gates + source, mask=live, other=0.0), mask=live)
            tl.store(beta_out + unit, tl.load(gates + source + VALUE_HEADS, mask=live, other=0.0), mask=live)
        else:
            mixed *= tl.rsqrt(tl.sum(mixed * mixed, 1) + eps)[:, None]
            at = ((first + rows) * KEY_HEADS + head - KEY_HEADS)[:, None] * D + dims[None, :]
            tl.store(k + at, mixed, mask=live[:, None])

    for start in range(0, tree_rows, ROWS):
        tree = start + tl.arange(0, ROWS)
        live = tree < tree_rows
        mixed = _convolved(
            PATH + tree, live, item, begin, slot, channels, inputs, weight, window, stash, path, index,
            input_stride, PATH, SAVED, CHANNELS, WIDTH, D, ROWS,
        )  # fmt: skip
        rows = first + PATH + tree
        if is_value:
            at = (rows * VALUE_HEADS + value_head)[:, None] * D + dims[None, :]
            tl.store(v + at, mixed, mask=live[:, None])
            x = tl.load(alpha + (begin + tree) * alpha_stride + value_head, mask=live, other=0.0)
            x = x.to(tl.float32) + tl.load(bias + value_head)
            # log1p(e) = log(u) e / (u - 1) with u = 1 + e as rounded: accurate for small e.
            e = tl.exp(tl.minimum(x, 20.0))
            u = 1.0 + e
            log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
            g = tl.load(decay + value_head) * tl.where(x > 20.0, x, log1p)
            b = tl.load(beta + (begin + tree) * beta_stride + value_head, mask=live, other=0.0)
            unit = rows * VALUE_HEADS + value_head
            tl.store(g_out + unit, g, mask=live)
            tl.store(beta_out + unit, tl.sigmoid(b.to(tl.float32)), mask=live)
        else:
            mixed *= tl.rsqrt(tl.sum(mixed * mixed, 1) + eps)[:, None]
            if is_query:
                at = ((begin + tree) * KEY_HEADS + head)[:, None] * D + dims[None, :]
                tl.store(q + at, mixed * scale, mask=live[:, None])
            else:
                at = (rows * KEY_HEADS + head - KEY_HEADS)[:, None] * D + dims[None, :]
                tl.store(k + at, mixed, mask=live[:, None])

    # The new window: the last inputs of [old window, path].
    entry = tl.arange(0, WINDOW)
    inside = entry < WIDTH - 1
    from_ = taken + entry
    was_old = inside & (from_ < WIDTH - 1)
    was_path = inside & (from_ >= WIDTH - 1)
    path_row = tl.load(path + item * PATH + from_ - (WIDTH - 1), mask=was_path, other=0)
    moved = tl.load(
        window + ((slot * (WIDTH - 1) + from_) * CHANNELS)[:, None] + channels[None, :],
        mask=was_old[:, None], other=0.0,
    )  # fmt: skip
    moved += tl.load(
        stash + ((slot * SAVED + path_row) * CHANNELS)[:, None] + channels[None, :],
        mask=was_path[:, None], other=0.0,
    )  # fmt: skip

    tl.debug_barrier()  # all reads of old rows are done
    target = ((slot * (WIDTH - 1) + entry) * CHANNELS)[:, None] + channels[None, :]
    if tree_rows > 0:
        tl.store(window + target, moved, mask=inside[:, None])
    for start in range(0, tree_rows, ROWS):
        tree = start + tl.arange(0, ROWS)
        live = tree < tree_rows
        x = tl.load(
            inputs + ((begin + tree) * input_stride)[:, None] + channels[None, :],
            mask=live[:, None],
            other=0.0,
        )
        stash_at = ((slot * SAVED + tree) * CHANNELS)[:, None] + channels[None, :]
        tl.store(stash + stash_at, x.to(stash.dtype.element_ty), mask=live[:, None])
        if is_value:
            origin = (first + PATH + tree) * VALUE_HEADS + value_head
            gate_at = (slot * SAVED + tree) * 2 * VALUE_HEADS + value_head
            tl.store(gates + gate_at, tl.load(g_out + origin, mask=live, other=0.0), mask=live)
            tl.store(
                gates + gate_at + VALUE_HEADS, tl.load(beta_out + origin, mask=live, other=0.0), mask=live
            )


def takes_tree_conv(
    inputs: Tensor, alpha: Tensor, beta: Tensor, weights: ConvWeights, buffers: DeltaBuffers, rows: ConvRows
) -> bool:
    return weights.head_dim >= 16 and weights.head_dim & (weights.head_dim - 1) == 0


def conv_index(parents: Tensor, width: int, count: Tensor, path: int, first: Tensor | None = None) -> Tensor:
    batch, rows = len(count), parents.shape[-1]
    parents = parents.contiguous()
    shape = (batch, path + rows) if first is None else (batch * path + rows,)
    index = torch.empty(*shape, width, dtype=torch.int64, device=parents.device)
    _index_kernel[(triton.cdiv(path + rows, 128), batch)](
        parents, count, parents if first is None else first, index, rows, path,
        WIDTH=width, BLOCK=128, RAGGED=first is not None, num_warps=4,
    )  # fmt: skip
    return index


def tree_conv(
    inputs: Tensor, alpha: Tensor, beta: Tensor, weights: ConvWeights, buffers: DeltaBuffers, rows: ConvRows
) -> DeltaHeads:
    """See reference.tree_conv; rows after a path, and padding, are not written."""
    batch, (count, _), value_heads = len(rows.slots), inputs.shape[-2:], len(weights.decay)
    dim, length, width, saved = (
        weights.head_dim,
        rows.path.shape[1],
        weights.taps.shape[1],
        buffers.tree_inputs,
    )
    parameters = (weights.taps, weights.decay, weights.bias)
    saves, tables = (
        (buffers.window, saved, buffers.tree_gates),
        (rows.slots, rows.path, rows.count, rows.index),
    )
    assert dim >= 16 and dim & (dim - 1) == 0, f"heads of {dim}, needed: a power of two, at least 16"
    assert rows.first is not None or count <= saved.shape[1], f"{count} rows, room for {saved.shape[1]}"
    for part in (*parameters, *saves, rows.path, rows.index):
        assert part.is_contiguous(), f"{part.shape}, strides {part.stride()}"
    assert buffers.window.dtype == saved.dtype and buffers.tree_gates.dtype == torch.float32
    # One row stride each: they may be slices of one matmul output.
    inputs, alpha, beta = (x if x.stride(-1) == 1 else x.contiguous() for x in (inputs, alpha, beta))
    inputs, alpha, beta = (x.flatten(0, -2) for x in (inputs, alpha, beta))
    heads = empty_heads(inputs, weights, rows, count)
    _conv_kernel[(2 * weights.key_heads + value_heads, batch)](
        inputs, alpha, beta, *parameters, *saves, *tables, rows.slots if rows.first is None else rows.first,
        *heads, inputs.stride(0), alpha.stride(0), beta.stride(0), count, length, saved.shape[1],
        L2_EPS, dim**-0.5, KEY_HEADS=weights.key_heads, VALUE_HEADS=value_heads, D=dim, WIDTH=width,
        ROWS=ROWS, WINDOW=triton.next_power_of_2(max(1, width - 1)), RAGGED=rows.first is not None,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return heads
