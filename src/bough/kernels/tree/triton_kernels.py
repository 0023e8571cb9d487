"""Triton kernels that build a tree and accept its path, each one program of one warp."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.tree.records import HEADER, MAX_ROWS, Acceptance, Candidates, TreeForm

_ROWS = tl.constexpr(MAX_ROWS)
# One compiled kernel serves every shape.
_SHAPES = ["depths", "width", "lines", "chain_count", "edge_count", "nodes", "rows", "stop_count"]


@triton.jit
def _order(value):
    """Return int32 keys that sort like the values: a warp reduces them in one instruction."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _disorder(ordered):
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _prepare(
    ids, scores, chains, chain_scores, corrected, homes, gains, edges, table, depth_bins, depths, width,
    lines, chain_count, edge_count, CORRECTED: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Correct the scores and find the column that holds each chain's token at each depth, -1 for none.

    A depth has one line of scores, or one after each candidate of the depth before and one after any other
    token. One more depth follows the last; it has no candidates.
    """
    column, depth = tl.arange(0, WIDE)[None, :], tl.arange(0, DEEP)[:, None]
    candidate = (column < width) & (depth < depths)
    for number in range(0, lines):
        line = depth * lines + number
        score = tl.load(scores + line * width + column, mask=candidate, other=float("-inf"))
        if CORRECTED:
            claim = tl.zeros([DEEP, WIDE], tl.int32)
            for edge in range(0, edge_count):
                claim += (score > tl.load(edges + edge)).to(tl.int32)
            bin = tl.load(depth_bins + depth, mask=depth < depths, other=0) * (edge_count + 1)
            score = score + tl.load(table + bin + claim, mask=candidate, other=0.0)
        tl.store(corrected + line * WIDE + column, tl.minimum(score, 0.0))
    if chain_count > 0:
        token = tl.load(ids + depth * width + column, mask=candidate, other=-1)
        nth = column - width
        in_chain = (nth >= 0) & (nth < chain_count) & (depth < depths)
        token = tl.where(in_chain, tl.load(chains + nth * depths + depth, mask=in_chain, other=-1), token)
        level = tl.arange(0, DEEP)
        for chain in range(0, chain_count):
            chain_tokens = tl.load(chains + chain * depths + depth, mask=depth < depths, other=-1)
            home = tl.min(tl.where((token == chain_tokens) & (chain_tokens >= 0), column, WIDE), 1)
            tl.store(homes + level * chain_count + chain, tl.where(home < WIDE, home, -1))
            gain = tl.load(chain_scores + chain * depths + level, mask=level < depths, other=float("-inf"))
            tl.store(gains + level * chain_count + chain, tl.minimum(gain, 0.0))


@triton.jit
def _best_child(
    corrected, homes, gains, depth, above, lines, chain_count, followed, used, WIDE: tl.constexpr
):
    """Order of the score of the best unused column, and the column; order of -inf when there is none.

    above: the column of the parent, 0 for the root.
    """
    column = tl.arange(0, WIDE)
    score = tl.load(corrected + (depth * lines + tl.minimum(above, lines - 1)) * WIDE + column)
    for chain in range(0, chain_count):
        home = tl.load(homes + depth * chain_count + chain)
        gain = tl.load(gains + depth * chain_count + chain)
        there = (column == home) & (((followed >> chain) & 1) != 0)
        score = tl.where(there, tl.maximum(score, gain), score)
    order = _order(tl.where(((used >> column) & 1) != 0, float("-inf"), score))
    best = tl.max(order, 0)
    return best, tl.min(tl.where(order == best, column, WIDE), 0)


@triton.jit
def _followed(homes, depth, chain_count, followed, column):
    """The chains that go on with the token in this column."""
    still = followed ^ followed
    for chain in range(0, chain_count):
        home = tl.load(homes + depth * chain_count + chain)
        still |= ((home == column).to(tl.int32) << chain) & followed
    return still


@triton.jit
def _tie(depth, row, column):
    """Decides between equal weights: the shallower depth, then the earlier row. The column goes along."""
    return (63 - depth) * 4096 + (63 - row) * 64 + (63 - column)


@triton.jit
def _at(here, values):
    return tl.sum(tl.where(here, values, 0), 0)


@triton.jit(do_not_specialize=_SHAPES[:-1])
def best_tree_kernel(
    anchor, ids, scores, chains, chain_scores, edges, table, depth_bins, corrected, homes, gains, out_tokens,
    out_parents, out_weights, out_ancestors, out_depths, depths, width, lines, chain_count, edge_count, nodes,
    rows, spine, CORRECTED: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add the best remaining child of any row until the tree is full.

    Every row holds its best child not yet taken: the sort key of its weight and a tie-breaker, so that two
    reductions over the rows find the next one. One sequence a program.
    """
    item = tl.program_id(0).to(tl.int64)
    anchor, ids, scores = anchor + item, ids + item * depths * width, scores + item * depths * lines * width
    chains, chain_scores = chains + item * chain_count * depths, chain_scores + item * chain_count * depths
    corrected += item * DEEP * lines * WIDE
    homes, gains = homes + item * DEEP * chain_count, gains + item * DEEP * chain_count
    out_tokens, out_parents = out_tokens + item * 4 * rows, out_parents + item * 4 * rows
    out_ancestors, out_depths = out_ancestors + item * 4 * rows, out_depths + item * 4 * rows
    out_weights += item * rows
    _prepare(
        ids, scores, chains, chain_scores, corrected, homes, gains, edges, table, depth_bins, depths, width,
        lines, chain_count, edge_count, CORRECTED, DEEP, WIDE,
    )  # fmt: skip
    tl.debug_barrier()
    lowest = _order(tl.full((), float("-inf"), tl.float32))
    every = (tl.full((), 1, tl.int32) << chain_count) - 1
    # Columns taken, one bit each.
    nothing = tl.full((), 0, tl.int32 if WIDE == 32 else tl.int64)
    # How many rows the path of best children has.
    forced, line, followed, going = 0, tl.full((), 0.0, tl.float32), every, True
    column = tl.full((), 0, tl.int32)
    while going:
        score, column = _best_child(
            corrected, homes, gains, forced, column, lines, chain_count, followed, nothing, WIDE
        )
        line = line + _disorder(score)
        followed = _followed(homes, forced, chain_count, followed, column)
        going = (line >= spine) & (line > float("-inf"))
        forced += going.to(tl.int32)
        going = going & (forced < nodes) & (forced < depths)

    row = tl.arange(0, _ROWS)
    parent = tl.full([_ROWS], -1, tl.int32)
    column_of = tl.zeros([_ROWS], tl.int32)
    weight = tl.where(row == 0, 0.0, float("-inf")).to(tl.int32, bitcast=True)
    depth_of = tl.zeros([_ROWS], tl.int32)
    one = tl.full([_ROWS], 1, tl.int32)
    # Two words: 64-bit sums have no instruction of their own.
    low, high = tl.where(row < 32, one << (row & 31), 0), tl.where(row < 32, 0, one << (row & 31))
    used = tl.zeros([_ROWS], tl.int32 if WIDE == 32 else tl.int64)
    chains_of = tl.where(row == 0, every, 0)
    score, column = _best_child(corrected, homes, gains, 0, 0, lines, chain_count, every, nothing, WIDE)
    tail_order, tail_tie = _order(_disorder(score)), _tie(0, 0, column)
    order, tie = tl.where(row == 0, tail_order, lowest), tl.where(row == 0, tail_tie, 0)
    tail, new, open_ = 0, 1, True
    while (new <= nodes) & open_:
        top = tl.max(order, 0)
        taken = tl.max(tl.where(order == top, tie, 0), 0)
        if (forced > 0) & (nodes - new + 1 == forced):
            top, taken = tail_order, tail_tie
        open_ = top > lowest
        if open_:
            column, above, depth = 63 - (taken & 63), 63 - ((taken >> 6) & 63), 63 - (taken >> 12)
            here, fresh = row == above, row == new
            above_used = _at(here, used) | (nothing + 1 << column)
            above_chains = _at(here, chains_of)
            above_weight = _at(here, weight).to(tl.float32, bitcast=True)
            new_weight = _disorder(top)
            new_chains = _followed(homes, depth, chain_count, above_chains, column)
            child, child_column = _best_child(
                corrected, homes, gains, depth + 1, column, lines, chain_count, new_chains, nothing, WIDE
            )
            above_column = _at(here, column_of)
            sibling, sibling_column = _best_child(
                corrected, homes, gains, depth, above_column, lines, chain_count, above_chains, above_used,
                WIDE,
            )  # fmt: skip
            parent = tl.where(fresh, above, parent)
            column_of = tl.where(fresh, column, column_of)
            weight = tl.where(fresh, new_weight.to(tl.int32, bitcast=True), weight)
            depth_of = tl.where(fresh, depth + 1, depth_of)
            above_low, above_high = _at(here, low), _at(here, high)
            low, high = tl.where(fresh, low | above_low, low), tl.where(fresh, high | above_high, high)
            used = tl.where(here, above_used, used)
            chains_of = tl.where(fresh, new_chains, chains_of)
            below = _order(new_weight + _disorder(child))
            below_tie = _tie(depth + 1, new, child_column)
            order = tl.where(here, _order(above_weight + _disorder(sibling)), order)
            order = tl.where(fresh, below, order)
            tie = tl.where(here, _tie(depth, above, sibling_column), tie)
            tie = tl.where(fresh, below_tie, tie)
            if (above == tail) & (forced > 0):
                forced -= 1
                tail = new
                tail_order, tail_tie = below, below_tie
            new += 1
    inside, filled = row < rows, depth_of > 0
    candidate = filled & (column_of < width)
    token = tl.load(anchor) + tl.zeros([_ROWS], tl.int64)
    token = tl.where(
        candidate, tl.load(ids + (depth_of - 1) * width + column_of, mask=candidate, other=0), token
    )
    other = filled & (column_of >= width)
    at = chains + (column_of - width) * depths + depth_of - 1
    token = tl.where(other, tl.load(at, mask=other, other=0), token)
    tl.store(out_tokens + row, token, mask=inside)
    tl.store(out_parents + row, parent.to(tl.int64), mask=inside)
    tl.store(out_weights + row, weight.to(tl.float32, bitcast=True), mask=inside)
    ancestors = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    tl.store(out_ancestors + row, ancestors, mask=inside)
    tl.store(out_depths + row, depth_of.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=_SHAPES[-2:])
def accept_path_kernel(
    tokens, parents, ancestors, sampled, first, slots, stops, limits, counts, header, path, out_tokens,
    source, rows, stop_count, vocabulary, RAGGED: tl.constexpr,
):  # fmt: skip
    """One sequence a program; a sequence without rows accepts none."""
    item, sequences = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    if RAGGED:
        begin = tl.load(first + item)
        rows = (tl.load(first + item + 1) - begin).to(tl.int32)
        tokens, parents, ancestors, sampled = (
            tokens + begin,
            parents + begin,
            ancestors + begin,
            sampled + begin,
        )
    slot = tl.load(slots + item)
    stops, counts = stops + slot * stop_count, counts + slot * vocabulary
    row = tl.arange(0, _ROWS)
    inside = row < rows
    token = tl.load(tokens + row, mask=inside, other=-1)
    parent = tl.load(parents + row, mask=inside, other=-2)
    most = tl.load(limits + item)
    at, count, going = 0, 0, rows > 0
    accepted = tl.full([_ROWS], -1, tl.int64)
    picked = tl.full([_ROWS], -1, tl.int64)
    while going:
        accepted = tl.where(row == count, at, accepted)
        token_at = tl.load(tokens + at)
        tl.atomic_add(counts + token_at, 1.0, sem="relaxed")
        pick = tl.load(sampled + at)
        picked = tl.where(row == count, pick, picked)
        count += 1
        child = tl.max(tl.where((parent == at) & (token == pick) & (row > 0), row, -1), 0)
        going = (child >= 0) & (count < most)
        for stop in range(0, stop_count):
            going = going & (tl.load(stops + stop) != pick)
        if going:
            at = child
        else:
            tl.store(header + sequences + item, pick)
    some = rows > 0
    tl.store(header + item, count)
    tl.store(header + 2 * sequences + item, tl.where(some, at, -1))
    tl.store(header + 3 * sequences + item, tl.load(ancestors + at, mask=some, other=0))
    tl.store(path + item * _ROWS + row, accepted)
    tl.store(out_tokens + item * _ROWS + row, picked)
    tl.store(source + item * _ROWS + row, tl.where(row < count, accepted, row))


def best_tree(anchors: Tensor, candidates: Candidates, form: TreeForm) -> tuple[Tensor, Tensor]:
    ids, scores, chains, chain_scores = (part.contiguous() for part in candidates)
    (sequences, depths, width), count, device = ids.shape, chains.shape[1], ids.device
    nodes, rows, correction = form.nodes, form.rows, form.correction
    assert 0 < nodes < rows <= MAX_ROWS, f"{nodes} nodes in {rows} rows, at most {MAX_ROWS}"
    assert 0 < width + count <= MAX_ROWS and count < 31, f"{width} candidates, {count} chains"
    assert 0 < depths < MAX_ROWS, f"{depths} deep"
    # One column for each lane of a warp, at least.
    deep, wide = triton.next_power_of_2(depths + 1), max(32, triton.next_power_of_2(width + count))
    lines = scores.shape[2] if scores.ndim == 4 else 1
    assert lines in (1, width + 1), f"{lines} lines of scores for {width} candidates"
    corrected = torch.empty(sequences, deep * lines, wide, device=device)
    homes = torch.empty(sequences, deep, count, dtype=torch.int32, device=device)
    gains = torch.empty(sequences, deep, count, device=device)
    packed = torch.empty(sequences, 4, rows, dtype=torch.int64, device=device)
    tokens, parents, ancestors, depth_rows = packed.unbind(1)
    weights = torch.empty(sequences, rows, device=device)
    edges, table, bins = (
        (correction.edges, correction.table, correction.depth_bins) if correction else (scores, scores, ids)
    )
    best_tree_kernel[(sequences,)](
        anchors, ids, scores, chains, chain_scores, edges, table, bins, corrected, homes, gains, tokens,
        parents, weights, ancestors, depth_rows, depths, width, lines, count, len(edges), nodes, rows,
        form.spine, CORRECTED=correction is not None, DEEP=deep, WIDE=wide, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return packed, weights


def accept_path(
    tokens: Tensor,
    parents: Tensor,
    ancestors: Tensor,
    sampled: Tensor,
    *,
    first: Tensor | None = None,
    slots: Tensor,
    stops: Tensor,
    limits: Tensor,
    counts: Tensor,
) -> Acceptance:
    rows, sequences = len(tokens), len(slots)
    assert rows <= MAX_ROWS, f"{rows} rows, at most {MAX_ROWS}"
    assert first is not None or sequences == 1, f"{sequences} sequences in one tree"
    for part in (stops, counts, limits, slots):
        assert part.is_contiguous(), f"strides {part.stride()}"
    flat = torch.empty(sequences * (HEADER + 3 * MAX_ROWS), dtype=torch.int64, device=tokens.device)
    header, path, out_tokens, source = flat.split([HEADER * sequences] + 3 * [MAX_ROWS * sequences])
    accept_path_kernel[(sequences,)](
        tokens, parents, ancestors, sampled, slots if first is None else first, slots, stops, limits, counts,
        header, path, out_tokens, source, rows, stops.shape[1], counts.shape[1], RAGGED=first is not None,
        num_warps=1,
    )  # fmt: skip
    return Acceptance(flat)
