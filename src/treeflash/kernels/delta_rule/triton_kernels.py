"""Triton kernel of a tree's delta rule: reads the state once, advances it over the path, writes it once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from treeflash.kernels.runtime.device import capability_of
from treeflash.kernels.tree import MAX_ROWS

COLUMNS = 32  # of a head's state, a program: 48 heads of 128 columns are 192 programs
SLICE = 32  # dims of keys and queries at a time: more would not stay in registers


@triton.jit(do_not_specialize=["T", "PATH"])
def _tree_kernel(
    q, k, v, g, beta, state, slots, count, ancestors, out, T, PATH,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, SLICE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One value head and one band of its state's columns a program."""
    unit = tl.program_id(0).to(tl.int64)
    item, head = unit // VALUE_HEADS, unit % VALUE_HEADS
    key_head = head % KEY_HEADS
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    dims = tl.arange(0, D)
    first = item * (PATH + T)
    slot = tl.load(slots + item).to(tl.int64)
    taken = tl.load(count + item)
    base = state + (slot * VALUE_HEADS + head) * D * D
    band = base + dims[:, None] * D + columns[None, :]
    carried = tl.load(band)

    # Token by token, so that a state does not depend on how the text was split into steps.
    for row in range(0, taken):
        at = first + row
        key = tl.load(k + (at * KEY_HEADS + key_head) * D + dims)
        value = tl.load(v + (at * VALUE_HEADS + head) * D + columns)
        carried *= tl.exp(tl.load(g + at * VALUE_HEADS + head))
        write = tl.load(beta + at * VALUE_HEADS + head) * (value - tl.sum(key[:, None] * carried, 0))
        carried += key[:, None] * write[None, :]
    if taken > 0:
        tl.store(band, carried)

    rows = tl.arange(0, ROWS)
    live = rows < T
    at = first + PATH + rows
    bits = tl.load(ancestors + item * T + rows, mask=live, other=0)
    seen = ((bits[:, None] >> rows[None, :].to(tl.int64)) & 1) != 0
    gate = tl.load(g + at * VALUE_HEADS + head, mask=live, other=0.0)
    strength = tl.load(beta + at * VALUE_HEADS + head, mask=live, other=0.0)
    total = tl.sum(tl.where(seen, gate[None, :], 0.0), 1)
    grown = tl.exp(total)
    # Always as a difference: its terms alone would overflow.
    ratio = tl.where(seen, total[:, None] - total[None, :], -float("inf"))
    decay = tl.exp(ratio)

    if SLICE == D:
        key_at = (at * KEY_HEADS + key_head)[:, None] * D + dims[None, :]
        keys = tl.load(k + key_at, mask=live[:, None], other=0.0)
        query_at = ((item * T + rows) * KEY_HEADS + key_head)[:, None] * D + dims[None, :]
        queries = tl.load(q + query_at, mask=live[:, None], other=0.0)
        stored = tl.dot(keys, carried, input_precision=PRECISION)
        read = tl.dot(queries, carried, input_precision=PRECISION)
        overlap = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        attention = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    else:
        # Many rows: a slice of the dims at a time, or they would not fit in shared memory.
        tl.debug_barrier()
        stored = tl.zeros((ROWS, COLUMNS), tl.float32)
        read = tl.zeros((ROWS, COLUMNS), tl.float32)
        overlap = tl.zeros((ROWS, ROWS), tl.float32)
        attention = tl.zeros((ROWS, ROWS), tl.float32)
        for start in range(0, D, SLICE):
            part = start + tl.arange(0, SLICE)
            key_at = (at * KEY_HEADS + key_head)[:, None] * D + part[None, :]
            keys = tl.load(k + key_at, mask=live[:, None], other=0.0)
            query_at = ((item * T + rows) * KEY_HEADS + key_head)[:, None] * D + part[None, :]
            queries = tl.load(q + query_at, mask=live[:, None], other=0.0)
            slice_ = tl.load(base + part[:, None] * D + columns[None, :])
            stored = tl.dot(keys, slice_, stored, input_precision=PRECISION)
            read = tl.dot(queries, slice_, read, input_precision=PRECISION)
            overlap = tl.dot(keys, tl.trans(keys), overlap, input_precision=PRECISION)
            attention = tl.dot(queries, tl.trans(keys), attention, input_precision=PRECISION)

    value = tl.load(
        v + (at * VALUE_HEADS + head)[:, None] * D + columns[None, :], mask=live[:, None], other=0.0
    )
    right = strength[:, None] * (value - grown[:, None] * stored)
    solve = tl.where(rows[:, None] > rows[None, :], strength[:, None] * overlap * decay, 0.0)
    # A row is final once its ancestors are: as many rounds as the tree's depth below its roots.
    rounds = tl.max(tl.sum(seen.to(tl.int32), 1), 0) - 1
    writes = right
    for _ in range(0, rounds):
        writes = right - tl.dot(solve, writes, input_precision=PRECISION)
    result = grown[:, None] * read + tl.dot(attention * decay, writes, input_precision=PRECISION)
    target = ((item * T + rows) * VALUE_HEADS + head)[:, None] * D + columns[None, :]
    tl.store(out + target, result, mask=live[:, None])


def takes(state: Tensor) -> bool:
    """Return whether the kernel takes such heads: a power of two of dims."""
    dim = state.shape[-1]
    return dim >= 16 and dim & (dim - 1) == 0


def tiles(rows: int, dim: int, capability: tuple[int, int] | None) -> dict:
    """Return tile sizes and precision; capability: of an NVIDIA card, None for others.

    Three TF32 matmuls give float32's accuracy on tensor cores.
    """
    ampere = capability is not None and capability >= (8, 0)
    return {
        "ROWS": max(16, triton.next_power_of_2(rows)),
        "COLUMNS": min(COLUMNS, dim),
        "SLICE": min(SLICE, dim),
        "PRECISION": "tf32x3" if ampere else "ieee",
        "num_warps": 4,
        "num_stages": 1,
    }


def tree_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    slots: Tensor,
    count: Tensor,
    ancestors: Tensor,
) -> Tensor:
    """See reference.tree_delta."""
    batch, rows, key_heads, dim = q.shape
    value_heads = v.shape[2]
    assert takes(state) and state.shape[1:] == (value_heads, dim, dim), f"{state.shape}, heads of {dim}"
    for part in (q, k, v, g, beta, state, ancestors):
        assert part.is_contiguous(), f"{part.shape}, strides {part.stride()}"
        assert part is ancestors or part.dtype == torch.float32, f"{part.dtype}, needed float32"
    assert rows <= MAX_ROWS, f"{rows} rows, at most {MAX_ROWS}"
    out = torch.empty(batch, rows, value_heads, dim, dtype=torch.float32, device=q.device)
    chosen = tiles(rows, dim, capability_of(q.device))
    _tree_kernel[(batch * value_heads, dim // chosen["COLUMNS"])](
        q, k, v, g, beta, state, slots, count, ancestors, out, rows, k.shape[1] - rows,
        KEY_HEADS=key_heads, VALUE_HEADS=value_heads, D=dim, **chosen,
    )  # fmt: skip
    return out
