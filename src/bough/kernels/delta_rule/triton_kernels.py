"""Triton kernels of a tree's delta rule: the order of visits, and the rule where the CUDA kernel is not."""

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.causal_conv.records import DeltaHeads
from bough.kernels.delta_rule.cpu import saved_states
from bough.kernels.delta_rule.records import DeltaRows
from bough.kernels.tree import MAX_ROWS

COLUMNS = 32  # of a head's state, a program: 48 heads of 128 columns are 192 programs
_HAS_CHILDREN = tl.constexpr(1 << 16)


@triton.jit(do_not_specialize=["T"])
def _order_kernel(ancestors, first, order, T, RAGGED: tl.constexpr, ROWS: tl.constexpr):
    """tree_order, one sequence a program; of pairs (i, j) of rows."""
    item = tl.program_id(0).to(tl.int64)
    begin, rows = item * T, T
    if RAGGED:
        begin = tl.load(first + item)
        rows = (tl.load(first + item + 1) - begin).to(tl.int32)
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    bits = tl.load(ancestors + begin + i, mask=i < rows, other=0)
    # Row j is row i or an ancestor of it; a row without its own bit, too, has a place inside of the order.
    above = (((bits >> j.to(tl.int64)) & 1) != 0) | (i == j)
    # The same, transposed: row i is row j or an ancestor of it.
    turned = tl.load(ancestors + begin + j, mask=j < rows, other=0)
    below = (((turned >> i.to(tl.int64)) & 1) != 0) | (i == j)
    size, turned_size = tl.sum(below.to(tl.int32), 1)[:, None], tl.sum(above.to(tl.int32), 0)[None, :]
    inner = tl.sum((below & (turned_size > 1)).to(tl.int32), 1)[:, None]
    turned_inner = tl.sum((above & (size > 1)).to(tl.int32), 0)[None, :]
    parent = tl.max(tl.where(above & (j < i), j, -1), 1)[:, None]
    turned_parent = tl.max(tl.where(below & (i < j), i, -1), 0)[None, :]
    # Siblings in order of their inner rows, then of their number: row j before or after row i.
    sibling = (parent == turned_parent) & (i < rows) & (j < rows)
    earlier = sibling & ((turned_inner < inner) | ((turned_inner == inner) & (j < i)))
    later = sibling & ((turned_inner > inner) | ((turned_inner == inner) & (j > i)))
    before = tl.sum(tl.where(earlier, turned_size, 0), 1)
    branches_before = tl.sum((earlier & (turned_inner > 0)).to(tl.int32), 1)
    branches_after = tl.sum((later & (turned_inner > 0)).to(tl.int32), 1)
    # A row follows its ancestors and the subtrees of their earlier siblings and of its own.
    place = tl.sum(tl.where(above, before[None, :] + 1, 0), 1) - 1
    level = tl.sum((above & (j < i) & (branches_after[None, :] > 0)).to(tl.int32), 1) + 1
    row = tl.arange(0, ROWS)
    children = tl.sum(below.to(tl.int32), 1) > 1
    save = tl.where(children & (branches_before == 0) & (branches_after > 0), level, 0)
    restore = tl.where(children & (branches_before > 0), level, 0)
    visit = row | (save << 8) | (restore << 12) | tl.where(children, _HAS_CHILDREN, 0)
    tl.store(order + begin + place, visit, mask=row < rows)


@triton.jit(do_not_specialize=["T", "PATH"])
def _tree_kernel(
    q, k, v, g, beta, state, slots, count, order, first, saved, out, T, PATH,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
    LEVELS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """One value head and one band of its state's columns a program.

    Path and tree rows run through one loop body, so that both advance a state to the same bits.
    """
    unit = tl.program_id(0).to(tl.int64)
    item, head = unit // VALUE_HEADS, unit % VALUE_HEADS
    key_head = head % KEY_HEADS
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    dims = tl.arange(0, D)
    begin, rows = item * T, T
    if RAGGED:
        begin = tl.load(first + item)
        rows = (tl.load(first + item + 1) - begin).to(tl.int32)
    slot = tl.load(slots + item).to(tl.int64)
    taken = tl.load(count + item).to(tl.int32)
    part = dims[:, None] * D + columns[None, :]
    band = state + (slot * VALUE_HEADS + head) * D * D + part
    place = saved + unit * LEVELS * D * D + part
    carried = tl.load(band)
    for n in range(0, taken + rows):
        in_tree = n >= taken
        visit = tl.load(order + begin + n - taken, mask=in_tree, other=_HAS_CHILDREN)
        row = visit & 255
        level = (visit >> 12) & 15
        if level > 0:
            tl.debug_barrier()
            carried = tl.load(place + (level - 1) * D * D)
        at = item * PATH + begin + tl.where(in_tree, PATH + row, n)
        key = tl.load(k + (at * KEY_HEADS + key_head) * D + dims)
        value = tl.load(v + (at * VALUE_HEADS + head) * D + columns)
        query_at = ((begin + row) * KEY_HEADS + key_head) * D + dims
        query = tl.load(q + query_at, mask=n + 0 * dims >= taken, other=0.0)
        decay = tl.exp(tl.load(g + at * VALUE_HEADS + head))
        stored = tl.sum(key[:, None] * carried, 0)
        read = tl.sum(query[:, None] * carried, 0)
        write = tl.load(beta + at * VALUE_HEADS + head) * (value - decay * stored)
        # q S of the row's own state, from its parent's.
        result = decay * read + tl.sum(query * key, 0) * write
        target = ((begin + row) * VALUE_HEADS + head) * D + columns
        tl.store(out + target, result, mask=n + 0 * columns >= taken)
        level = (visit >> 8) & 15
        if level > 0:
            tl.store(place + (level - 1) * D * D, carried)
            tl.debug_barrier()
        if visit >= _HAS_CHILDREN:
            carried = carried * decay + key[:, None] * write[None, :]
        if n == taken - 1:
            tl.store(band, carried)


def takes_tree_delta(heads: DeltaHeads, state: Tensor, rows: DeltaRows) -> bool:
    dim = state.shape[-1]
    return dim >= 16 and dim & (dim - 1) == 0


def tree_order(ancestors: Tensor, first: Tensor | None = None, most: int = MAX_ROWS) -> Tensor:
    order = torch.empty(ancestors.shape, dtype=torch.int32, device=ancestors.device)
    ancestors = ancestors.contiguous()
    rows = ancestors.shape[-1]
    assert first is not None or rows <= MAX_ROWS, f"{rows} rows, at most {MAX_ROWS}"
    batch = len(ancestors) if first is None else len(first) - 1
    begins, room = ancestors if first is None else first, min(rows, most)
    _order_kernel[(batch,)](
        ancestors, begins, order, rows,
        RAGGED=first is not None, ROWS=max(2, triton.next_power_of_2(room)), num_warps=4,
    )  # fmt: skip
    return order


def tree_delta(heads: DeltaHeads, state: Tensor, rows: DeltaRows) -> Tensor:
    (key_heads, dim), value_heads, batch = heads.q.shape[-2:], heads.v.shape[-2], len(rows.slots)
    assert takes_tree_delta(heads, state, rows) and state.shape[1:] == (value_heads, dim, dim), (
        f"{state.shape}, heads of {dim}"
    )
    order, count = rows.order, rows.order.shape[-1]
    for part in (*heads, state, order):
        assert part.is_contiguous(), f"{part.shape}, strides {part.stride()}"
        assert part is order or part.dtype == torch.float32, f"{part.dtype}, needed float32"
    path = (prod(heads.k.shape[:-2]) - order.numel()) // batch
    levels, columns = max(1, saved_states(min(count, rows.most))), min(COLUMNS, dim)
    out = torch.empty(*heads.q.shape[:-2], value_heads, dim, dtype=torch.float32, device=state.device)
    saved = torch.empty(batch * value_heads, levels, dim, dim, dtype=torch.float32, device=state.device)
    begins = order if rows.first is None else rows.first
    _tree_kernel[(batch * value_heads, dim // columns)](
        *heads, state, rows.slots, rows.count, order, begins, saved, out, count, path,
        KEY_HEADS=key_heads, VALUE_HEADS=value_heads, D=dim, COLUMNS=columns, LEVELS=levels,
        RAGGED=rows.first is not None, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
