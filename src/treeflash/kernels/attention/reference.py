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
