"""Tree attention with the sums in the order in which GPUs add them: the specification, in plain torch."""

import torch
from torch import Tensor

from bough.kernels.kv_cache.format import HeadPool
from bough.kernels.kv_cache.reference import decode
from bough.kernels.kv_cache.rotation import rotate, rotate_back

SINKS = 64  # attention sinks: first tokens that a window never hides
BLOCK = 64  # positions of a block
SPLITS = 62  # of the context, at most: with a row's last two blocks 64 partial results
# Rows up to a block have fewer splits, since a split's sums are written and read again, and since on an H200
# the tiles of 24 rows and 4 KV heads should leave some SMs to the rows' last blocks. Longer contexts keep two
# programs on each of its 132 SMs with one row.
TIERS = ((66, 22), (128, 30))


def ordered_attention(
    q: Tensor,
    keys: HeadPool,
    values: HeadPool,
    page_table: Tensor,
    lengths: Tensor,
    ancestors: Tensor,
    *,
    window: int | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Return what cpu.paged_attention does, with the sums in the order in which GPUs add them, row by row.

    A row's bits depend on its path alone: K and V at positions 0 to its own, not on which are committed.
    """
    group = q.shape[2] // keys.codes.shape[1]
    queries = rotate(q).to(q.dtype) if keys.format.quantised else q
    rows, span = q.shape[1], int(lengths.max()) + q.shape[1]
    k, v = (gathered(pool, page_table, span).to(q.dtype) for pool in (keys, values))
    out = torch.empty_like(q)
    for b, length in enumerate(lengths.tolist()):
        for row, bits in enumerate(ancestors[b].tolist()):
            path = [*range(length), *(length + other for other in range(rows) if bits >> other & 1)]
            heads = queries[b, row].unflatten(0, (-1, group)) * q.shape[3] ** -0.5
            out[b, row] = _path_attention(heads, k[b][:, path], v[b][:, path], window).flatten(0, 1)
    if values.format.quantised:
        out = rotate_back(out).to(q.dtype)
    return out if gate is None else out * gate.sigmoid()


def _path_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Return [KV, group, D] of scaled q [KV, group, D] at the last position of k, v [KV, positions, D]."""
    position = k.shape[1] - 1
    newest = position // BLOCK
    splits = next((splits for last, splits in TIERS if newest <= last), SPLITS)
    # Blocks before the last two by splits; the last two each by itself.
    parts = [list(range(n, newest - 1, splits)) for n in range(min(splits, newest - 1))]
    parts += [[n] for n in (newest - 1, newest) if n >= 0]
    at = torch.arange(BLOCK * (newest + 1), device=q.device)
    seen = at <= position
    if window is not None:
        seen &= (at < SINKS) | (at > position - window)
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, len(at) - x.shape[1])) for x in (k, v))

    def added(blocks: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        top, weight, sum_ = q.new_full(q.shape[:2], -torch.inf), q.new_zeros(q.shape[:2]), torch.zeros_like(q)
        for n in blocks:
            keys, values, visible = (
                x.narrow(-2 if x.dim() > 1 else 0, n * BLOCK, BLOCK) for x in (k, v, seen)
            )
            scores = (q @ keys.mT).masked_fill(~visible, -torch.inf)
            higher = top.maximum(scores.amax(2))
            level = higher.masked_fill(higher == -torch.inf, 0)
            shares, fade = (scores - level[..., None]).exp(), (top - level).exp()
            weight = weight * fade + shares.sum(2)
            top, sum_ = higher, sum_ * fade[..., None] + shares @ values
        return top, weight, sum_

    tops, weights, sums = zip(*map(added, parts), strict=True)
    level = torch.stack(tops).amax(0)
    weight, sum_ = torch.zeros_like(level), torch.zeros_like(q)
    for top, part_weight, part_sum in zip(tops, weights, sums, strict=True):
        share = (top - level).exp()
        weight, sum_ = weight + part_weight * share, sum_ + part_sum * share[..., None]
    return sum_ / weight[..., None]


def gathered(pool: HeadPool, page_table: Tensor, span: int) -> Tensor:
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
