"""Attention of new rows over a paged cache that already holds their own keys and values, in plain torch."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, lengths: Tensor, visible: Tensor | None
) -> Tensor:
    """q [B, T, H, D]; keys, values [pages, page, KV, D]; page_table [B, P]; lengths [B] committed tokens.

    Row i of sequence b lies at index lengths[b] + i. It sees the committed tokens and the rows that `visible`
    [B, T, T] names; without it the rows before it and itself. Query head h reads KV head h // (H / KV).
    """
    rows, heads, dim = q.shape[1:]
    page, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    out = torch.empty_like(q)
    for b, length in enumerate(lengths.tolist()):
        total = length + rows
        pages = page_table[b, : -(-total // page)]
        k, v = (_gather(pool, pages, total).transpose(0, 1).to(q.dtype) for pool in (keys, values))
        # The query heads of a KV head become rows of one product: [KV, group * T, D].
        packed = (
            q[b].view(rows, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * rows, dim)
        )
        mask = None
        if rows > 1:
            mask = torch.ones(rows, total, dtype=torch.bool, device=q.device)
            mask[:, length:] = mask[:, length:].tril() if visible is None else visible[b]
            mask = mask.expand(group, rows, total).reshape(group * rows, total)
        o = scaled_dot_product_attention(packed[None], k[None], v[None], attn_mask=mask)[0]
        out[b] = o.view(kv_heads, group, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads, dim)
    return out


def _gather(pool: Tensor, pages: Tensor, total: int) -> Tensor:
    """[total, KV, D]: a view where the pages lie in a row, which is the usual case."""
    first = int(pages[0])
    if bool((pages == torch.arange(first, first + len(pages), device=pages.device)).all()):
        return pool[first : first + len(pages)].flatten(0, 1)[:total]
    return pool[pages].flatten(0, 1)[:total]


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    ring_keys: Tensor,
    ring_values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    starts: Tensor,
    *,
    window: int | None,
    causal: bool,
) -> Tensor:
    """Rows of a draft block over the context in a ring and over each other.

    q [B, T, H, D]; k, v [B, T, KV, D] of the block itself; positions [B, T]; ring_keys, ring_values
    [slots, ring, KV, D], position p at p modulo ring; lengths, starts [slots]: positions present are
    starts to lengths - 1, as far as the ring reaches. Within `window`, |key - query| < window.
    """
    heads, ring = q.shape[2], ring_keys.shape[1]
    group = heads // k.shape[2]
    out = torch.empty_like(q)
    for b, slot in enumerate(slots.tolist()):
        length = int(lengths[slot])
        index = torch.arange(min(length, ring), device=q.device)
        # The newest position below `length` that falls on this place of the ring.
        held = length - 1 - (length - 1 - index) % ring
        at = torch.cat([held, positions[b]])
        seen = (at >= starts[slot]).expand(q.shape[1], -1)
        query = positions[b][:, None]
        if window is not None:
            seen = seen & ((query - at).abs() < window)
        if causal:
            seen = seen & (at <= query)
        keys, values = (
            torch.cat([pool[slot, : len(index)].to(q.dtype), rows[b]])
            .repeat_interleave(group, 1)
            .transpose(0, 1)
            for pool, rows in ((ring_keys, k), (ring_values, v))
        )
        rows = scaled_dot_product_attention(
            q[b].transpose(0, 1)[None], keys[None], values[None], attn_mask=seen
        )
        out[b] = rows[0].transpose(0, 1)
    return out
