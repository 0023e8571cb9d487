"""Attention of new rows over a paged KV cache that already holds their own K and V, on a CPU, in torch."""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bough.kernels.attention.records import PagedContext
from bough.kernels.kv_cache.format import HeadPool, KVRing
from bough.kernels.kv_cache.reference import decode
from bough.kernels.kv_cache.rotation import rotate, rotate_back


def paged_attention(q: Tensor, context: PagedContext, *, gate: Tensor | None = None) -> Tensor:
    """Return the attention [B, T, H, D] of q [B, T, H, D] as `PagedContext` says, with the sums in any order.

    It is multiplied by the sigmoid of gate [B, T, H, D] if given. Ragged rows: q, gate [1, N, H, D], those of
    sequence s from first[s] to first[s + 1]; the output of rows after the last is zero.
    """
    if context.first is not None and context.ancestors is not None:
        return _ragged(q, context, context.first.tolist(), context.ancestors, gate)
    keys, values, lengths = context.keys, context.values, context.lengths
    rows, heads = q.shape[1:3]
    kv_heads = keys.codes.shape[1]
    group = heads // kv_heads
    queries = rotate(q).to(q.dtype) if keys.format.quantised else q
    # The query heads of a KV head become rows of one matmul: [B, KV, group * T, D].
    packed = queries.unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    span = int(lengths.max()) + rows
    k, v = (_gathered(pool, context.page_table, span).to(q.dtype) for pool in (keys, values))
    mask = None
    if rows > 1 or len(q) > 1 or context.window is not None:
        visible = _visible(rows, context.ancestors, lengths)
        mask = _mask(visible, lengths, span)
        if context.window is not None:
            positions = lengths[:, None] + visible.sum(2) - 1
            mask = mask & _within(lengths, positions, span, context.window, sinks=context.sinks)
        if len(q) > 1:
            # Rows after a shorter sequence belong to another one: not even a NaN of it may get through.
            foreign = (torch.arange(span, device=q.device) >= lengths[:, None] + rows)[:, None, :, None]
            k, v = k.masked_fill(foreign, 0), v.masked_fill(foreign, 0)
        mask = mask[:, None].expand(-1, group, -1, -1).flatten(1, 2)[:, None]
    out = scaled_dot_product_attention(packed, k, v, attn_mask=mask)
    out = out.unflatten(2, (group, rows)).permute(0, 3, 1, 2, 4).reshape(q.shape)
    if values.format.quantised:
        out = rotate_back(out).to(q.dtype)
    return out if gate is None else out * gate.sigmoid()


def _ragged(
    q: Tensor, context: PagedContext, first: list[int], ancestors: Tensor, gate: Tensor | None
) -> Tensor:
    out = torch.zeros_like(q)
    for item, (begin, end) in enumerate(pairwise(first)):
        if end > begin:
            tables = {"page_table": context.page_table[item, None], "lengths": context.lengths[item, None]}
            alone = replace(context, **tables, ancestors=ancestors[:, begin:end], first=None)
            opening = None if gate is None else gate[:, begin:end]
            out[:, begin:end] = paged_attention(q[:, begin:end], alone, gate=opening)
    return out


def chunk_attention(q: Tensor, context: PagedContext, *, span: int, gate: Tensor | None = None) -> Tensor:
    """Return the same of prompt text; span: of the longest sequence, its rows included."""
    return paged_attention(q, context, gate=gate)


def _visible(rows: int, ancestors: Tensor | None, lengths: Tensor) -> Tensor:
    """Return [B, T, T] bool: the rows that each row attends to."""
    if ancestors is None:
        chain = torch.ones(rows, rows, dtype=torch.bool, device=lengths.device).tril()
        return chain.expand(len(lengths), -1, -1)
    return ((ancestors[..., None] >> torch.arange(rows, device=lengths.device)) & 1).bool()


def _mask(visible: Tensor, lengths: Tensor, span: int) -> Tensor:
    """Return [B, T, span] bool: the indices that each row attends to."""
    rows = visible.shape[1]
    # The step's row at each index; below 0: committed text.
    row = torch.arange(span, device=lengths.device) - lengths[:, None]
    staged = visible.gather(2, row.clamp(0, rows - 1)[:, None].expand(-1, rows, -1))
    return torch.where((row < rows)[:, None], staged, False) | (row < 0)[:, None]


def _within(lengths: Tensor, positions: Tensor, span: int, window: int, *, sinks: int) -> Tensor:
    """Return [B, T, span] bool: the indices inside each row's window, and the sinks."""
    index = torch.arange(span, device=lengths.device)
    row = index - lengths[:, None]
    staged = positions.gather(1, row.clamp(0, positions.shape[1] - 1))
    at = torch.where(row < 0, index, staged)[:, None]
    return (at < sinks) | (at > positions[..., None] - window)


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, ring: KVRing, *, window: int | None, causal: bool
) -> Tensor:
    """Return the attention of a draft block's rows over the context in a ring and over each other.

    q [B, T, H, D]; k, v [B, T, KV, D] of the block itself; positions [B, T]. With `window`, |key - query| <
    window.
    """
    heads, size = q.shape[2], ring.keys.shape[1]
    group = heads // k.shape[2]
    out = torch.empty_like(q)
    for b, slot in enumerate(ring.slots.tolist()):
        length = int(ring.lengths[slot])
        index = torch.arange(min(length, size), device=q.device)
        # The newest position below `length` that the ring holds at this index.
        held = length - 1 - (length - 1 - index) % size
        at = torch.cat([held, positions[b]])
        seen = (at >= ring.starts[slot]).expand(q.shape[1], -1)
        query = positions[b][:, None]
        if window is not None:
            seen = seen & ((query - at).abs() < window)
        if causal:
            seen = seen & (at <= query)
        keys, values = (
            torch.cat([pool[slot, : len(index)].to(q.dtype), rows[b]])
            .repeat_interleave(group, 1)
            .transpose(0, 1)
            for pool, rows in ((ring.keys, k), (ring.values, v))
        )
        rows = scaled_dot_product_attention(
            q[b].transpose(0, 1)[None], keys[None], values[None], attn_mask=seen
        )
        out[b] = rows[0].transpose(0, 1)
    return out


def _gathered(pool: HeadPool, page_table: Tensor, span: int) -> Tensor:
    """Return [B, KV, span, D], dequantised.

    Floats are a view where a single sequence has contiguous pages and the pool has its heads outermost in
    memory, the common case on a CPU.
    """
    pages = page_table[:, : -(-span // pool.page)]
    places: Tensor | slice = pages
    if len(pages) == 1:
        first, count = int(pages[0, 0]), pages.shape[1]
        if bool((pages[0] == torch.arange(first, first + count, device=pages.device)).all()):
            places = slice(first, first + count)

    def tokens(plane: Tensor) -> Tensor:
        rows = plane[places] if isinstance(places, Tensor) else plane[None, places]
        return rows.transpose(1, 2).flatten(2, 3)[:, :, :span]

    if pool.scales is None:
        return tokens(pool.codes)
    return decode(tokens(pool.codes), tokens(pool.scales), pool.format, pool.dim)
