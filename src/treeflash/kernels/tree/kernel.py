"""Triton kernels that build a tree and walk it, each one program of one warp. Knows rows and tokens only."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from treeflash.kernels.tree.reference import Correction

ROWS = 64  # of a tree at most: ancestors are the bits of one word
_ROWS = tl.constexpr(ROWS)
# One compiled kernel serves every shape.
_SHAPES = ["depths", "width", "chain_count", "edge_count", "nodes", "rows", "stop_count"]


@triton.jit
def _order(value):
    """Whole numbers in the order of the values."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _disorder(ordered):
    bits = ordered.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _prepare(
    ids,
    scores,
    chains,
    chain_scores,
    corrected,
    homes,
    gains,
    edges,
    table,
    depth_bins,
    depths,
    width,
    chain_count,
    edge_count,
    CORRECTED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Corrects the scores; finds the column in which each chain's token stands at each depth, -1 for none.

    Behind the last depth comes one where nothing follows.
    """
    column = tl.arange(0, WIDE)
    for depth in range(0, depths):
        inside = column < width
        score = tl.load(scores + depth * width + column, mask=inside, other=float("-inf"))
        if CORRECTED:
            claim = tl.zeros([WIDE], tl.int32)
            for edge in range(0, edge_count):
                claim += (score > tl.load(edges + edge)).to(tl.int32)
            line = tl.load(depth_bins + depth) * (edge_count + 1)
            score = score + tl.load(table + line + claim, mask=inside, other=0.0)
        tl.store(corrected + depth * WIDE + column, tl.minimum(score, 0.0))
        token = _column_tokens(ids, chains, depth, depths, width, chain_count, column)
        for chain in range(0, chain_count):
            own = tl.load(chains + chain * depths + depth)
            home = tl.min(tl.where(token == own, column, WIDE), 0)
            tl.store(homes + depth * chain_count + chain, tl.where(own >= 0, home, -1))
            gain = tl.load(chain_scores + chain * depths + depth)
            tl.store(gains + depth * chain_count + chain, tl.minimum(gain, 0.0))
    tl.store(corrected + depths * WIDE + column, tl.full([WIDE], float("-inf"), tl.float32))
    for chain in range(0, chain_count):
        tl.store(homes + depths * chain_count + chain, -1)
        tl.store(gains + depths * chain_count + chain, float("-inf"))


@triton.jit
def _column_tokens(ids, chains, depth, depths, width, chain_count, column):
    candidate = tl.load(ids + depth * width + column, mask=column < width, other=-1)
    chain = column - width
    in_chain = (chain >= 0) & (chain < chain_count)
    return tl.where(
        column < width, candidate, tl.load(chains + chain * depths + depth, mask=in_chain, other=-1)
    )


@triton.jit
def _best_child(corrected, homes, gains, depth, chain_count, followed, used, WIDE: tl.constexpr):
    """(order of the score << 6 | 63 - column) of the best unused column; of -inf when there is none."""
    column = tl.arange(0, WIDE)
    own = tl.load(corrected + depth * WIDE + column)
    for chain in range(0, chain_count):
        home = tl.load(homes + depth * chain_count + chain)
        gain = tl.load(gains + depth * chain_count + chain)
        there = (column == home) & (((followed >> chain) & 1) != 0)
        own = tl.where(there, tl.maximum(own, gain), own)
    own = tl.where(((used >> column) & 1) != 0, float("-inf"), own)
    return tl.max((_order(own) << 6) | (63 - column), 0)


@triton.jit
def _followed(homes, depth, chain_count, followed, column):
    """The chains that go on with the token in this column."""
    still = followed ^ followed
    for chain in range(0, chain_count):
        home = tl.load(homes + depth * chain_count + chain)
        still |= ((home == column).to(tl.int64) << chain) & followed
    return still


@triton.jit(do_not_specialize=_SHAPES[:-1])
def build_kernel(
    anchor,
    position,
    ids,
    scores,
    chains,
    chain_scores,
    edges,
    table,
    depth_bins,
    corrected,
    homes,
    gains,
    out_tokens,
    out_parents,
    out_weights,
    out_ancestors,
    out_positions,
    depths,
    width,
    chain_count,
    edge_count,
    nodes,
    rows,
    spine,
    CORRECTED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Takes the best child of any row, again and again.

    Every row keeps its best child not yet taken as one number, ordered like (weight, shallower depth, earlier
    row), so that one reduction over the rows finds the next.
    """
    _prepare(
        ids,
        scores,
        chains,
        chain_scores,
        corrected,
        homes,
        gains,
        edges,
        table,
        depth_bins,
        depths,
        width,
        chain_count,
        edge_count,
        CORRECTED,
        WIDE,
    )
    tl.debug_barrier()
    lowest = _order(tl.full((), float("-inf"), tl.float32))
    every = (tl.full((), 1, tl.int64) << chain_count) - 1
    nothing = tl.full((), 0, tl.int64)
    # How many rows the path of best children has.
    forced, line, followed, going = 0, tl.full((), 0.0, tl.float32), every, True
    for depth in range(0, depths):
        best = _best_child(corrected, homes, gains, depth, chain_count, followed, nothing, WIDE)
        line = line + _disorder(best >> 6)
        going = going & (line >= spine) & (line > float("-inf")) & (forced < nodes)
        forced += going.to(tl.int32)
        followed = _followed(homes, depth, chain_count, followed, 63 - (best & 63))

    row = tl.arange(0, _ROWS)
    root, start = tl.load(anchor), tl.load(position)
    token = tl.zeros([_ROWS], tl.int64) + root
    parent = tl.full([_ROWS], -1, tl.int32)
    weight = tl.where(row == 0, 0.0, float("-inf"))
    depth_of = tl.zeros([_ROWS], tl.int32)
    ancestors = tl.full([_ROWS], 1, tl.int64) << row.to(tl.int64)
    used = tl.zeros([_ROWS], tl.int64)
    chains_of = tl.where(row == 0, every, 0)
    best = _best_child(corrected, homes, gains, 0, chain_count, every, nothing, WIDE)
    tail_next = _pending(tl.full((), 0.0, tl.float32), best, 0, 0)
    pending = tl.where(row == 0, tail_next, lowest << 18)
    tail, new, open_ = 0, 1, True
    while (new <= nodes) & open_:
        top = tl.max(pending, 0)
        if (forced > 0) & (nodes - new + 1 == forced):
            top = tail_next
        open_ = (top >> 18) > lowest
        if open_:
            column = 63 - (top & 63)
            above = (63 - ((top >> 6) & 63)).to(tl.int32)
            depth = (63 - ((top >> 12) & 63)).to(tl.int32)
            here = row == above
            above_weight = tl.sum(tl.where(here, weight, 0.0), 0)
            above_used = tl.sum(tl.where(here, used, 0), 0) | (nothing + 1 << column)
            above_chains = tl.sum(tl.where(here, chains_of, 0), 0)
            above_ancestors = tl.sum(tl.where(here, ancestors, 0), 0)
            new_weight = _disorder(top >> 18)
            new_chains = _followed(homes, depth, chain_count, above_chains, column)
            sibling = _best_child(corrected, homes, gains, depth, chain_count, above_chains, above_used, WIDE)
            child = _best_child(corrected, homes, gains, depth + 1, chain_count, new_chains, nothing, WIDE)
            at = tl.where(
                column < width, ids + depth * width + column, chains + (column - width) * depths + depth
            )
            fresh = row == new
            token = tl.where(fresh, tl.load(at), token)
            parent = tl.where(fresh, above, parent)
            weight = tl.where(fresh, new_weight, weight)
            depth_of = tl.where(fresh, depth + 1, depth_of)
            ancestors = tl.where(fresh, ancestors | above_ancestors, ancestors)
            used = tl.where(here, above_used, used)
            chains_of = tl.where(fresh, new_chains, chains_of)
            below = _pending(new_weight, child, depth + 1, new)
            pending = tl.where(here, _pending(above_weight, sibling, depth, above), pending)
            pending = tl.where(fresh, below, pending)
            if (above == tail) & (forced > 0):
                forced -= 1
                tail = new
                tail_next = below
            new += 1
    inside = row < rows
    tl.store(out_tokens + row, token, mask=inside)
    tl.store(out_parents + row, parent.to(tl.int64), mask=inside)
    tl.store(out_weights + row, weight, mask=inside)
    tl.store(out_ancestors + row, ancestors, mask=inside)
    tl.store(out_positions + row, start + depth_of, mask=inside)


@triton.jit
def _pending(weight, best, depth, row):
    """A row's best child as one number: order of its weight, 63 - depth, 63 - row, 63 - column."""
    order = _order(weight + _disorder(best >> 6))
    return (order << 18) + ((63 - depth) * 4096 + (63 - row) * 64) + (best & 63)


@triton.jit(do_not_specialize=_SHAPES[-2:])
def walk_kernel(
    tokens,
    parents,
    ancestors,
    chosen,
    stops,
    room,
    written,
    header,
    path,
    decided,
    source,
    rows,
    stop_count,
    COUNTED: tl.constexpr,
):
    row = tl.arange(0, _ROWS)
    inside = row < rows
    token = tl.load(tokens + row, mask=inside, other=-1)
    parent = tl.load(parents + row, mask=inside, other=-2)
    most = tl.load(room)
    at, count, going = 0, 0, True
    walked = tl.full([_ROWS], -1, tl.int64)
    drawn = tl.full([_ROWS], -1, tl.int64)
    while going:
        walked = tl.where(row == count, at, walked)
        own = tl.load(tokens + at)
        if COUNTED:
            tl.atomic_add(written + own, 1.0, sem="relaxed")
        pick = tl.load(chosen + at)
        drawn = tl.where(row == count, pick, drawn)
        count += 1
        child = tl.max(tl.where((parent == at) & (token == pick) & (row > 0), row, -1), 0)
        going = (child >= 0) & (count < most)
        for stop in range(0, stop_count):
            going = going & (tl.load(stops + stop) != pick)
        if going:
            at = child
        else:
            tl.store(header + 1, pick)
    tl.store(header, count)
    tl.store(header + 2, at)
    tl.store(header + 3, tl.load(ancestors + at))
    tl.store(path + row, walked)
    tl.store(decided + row, drawn)
    tl.store(source + row, tl.where(row < count, walked, row))


def build(
    anchor: Tensor,
    position: Tensor,
    ids: Tensor,
    scores: Tensor,
    chains: Tensor,
    chain_scores: Tensor,
    *,
    nodes: int,
    rows: int,
    spine: float,
    correction: Correction | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens, parents, weights, ancestors and positions, [rows] each, as the package's `build_tree` says."""
    (depths, width), count, device = ids.shape, len(chains), ids.device
    assert 0 < nodes < rows <= ROWS, f"{nodes} nodes in {rows} rows, at most {ROWS}"
    assert 0 < width + count <= ROWS and depths < ROWS, f"{width} candidates, {count} chains, {depths} deep"
    for part in (ids, scores, chains, chain_scores):
        assert part.is_contiguous(), f"strides {part.stride()}"
    wide = triton.next_power_of_2(width + count)
    corrected = torch.empty(depths + 1, wide, device=device)
    homes = torch.empty(depths + 1, count, dtype=torch.int32, device=device)
    gains = torch.empty(depths + 1, count, device=device)
    tokens, parents, ancestors, positions = torch.empty(4, rows, dtype=torch.int64, device=device)
    weights = torch.empty(rows, device=device)
    edges, table, bins = (
        (correction.edges, correction.table, correction.depth_bins) if correction else (scores, scores, ids)
    )
    build_kernel[(1,)](
        anchor,
        position,
        ids,
        scores,
        chains,
        chain_scores,
        edges,
        table,
        bins,
        corrected,
        homes,
        gains,
        tokens,
        parents,
        weights,
        ancestors,
        positions,
        depths,
        width,
        count,
        len(edges),
        nodes,
        rows,
        spine,
        CORRECTED=correction is not None,
        WIDE=wide,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return tokens, parents, weights, ancestors, positions


def walk(
    tokens: Tensor,
    parents: Tensor,
    ancestors: Tensor,
    chosen: Tensor,
    *,
    stops: Tensor,
    room: Tensor,
    written: Tensor | None,
) -> Tensor:
    """The fields of a `Walked`, one after the other."""
    rows = len(tokens)
    assert rows <= ROWS, f"{rows} rows, at most {ROWS}"
    flat = torch.empty(4 + 3 * ROWS, dtype=torch.int64, device=tokens.device)
    header, path, decided, source = flat.split([4, ROWS, ROWS, ROWS])
    walk_kernel[(1,)](
        tokens,
        parents,
        ancestors,
        chosen,
        stops,
        room,
        chosen if written is None else written,
        header,
        path,
        decided,
        source,
        rows,
        len(stops),
        COUNTED=written is not None,
        num_warps=1,
    )
    return flat
