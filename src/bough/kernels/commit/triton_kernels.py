"""Triton kernels of a commit: one program a sequence finds the path, one a head of a layer moves its rows."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.commit.reference import AcceptedPath

_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}


@triton.jit(do_not_specialize=["tree_rows"])
def _commit_kernel(
    ancestors, last, slots, first, path, count, lengths, counts, starts, source, path_stride, tree_rows,
    BLOCK: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64)
    begin, rows = item * tree_rows, tl.full((), 0, tl.int32) + tree_rows
    if RAGGED:
        begin = tl.load(first + item)
        rows = (tl.load(first + item + 1) - begin).to(tl.int32)
    slot = tl.load(slots + item)
    row = tl.load(last + item)
    bits = tl.load(ancestors + begin + row, mask=(row >= 0) & (rows > 0), other=0)
    column = tl.arange(0, BLOCK)
    inside = column < rows
    accepted = tl.where(inside, (bits >> column.to(tl.int64)) & 1, 0).to(tl.int32)
    before = tl.cumsum(accepted, 0) - accepted
    size = tl.sum(accepted, 0)
    taken = accepted != 0
    order = tl.where(taken, before, size + column - before)
    tl.store(path + slot * path_stride + order, column.to(tl.int64), mask=inside)
    tl.store(source + item * tree_rows + before, column.to(tl.int64), mask=taken)
    tl.store(source + item * tree_rows + column, column.to(tl.int64), mask=inside & (column >= size))
    start = tl.load(lengths + slot)
    tl.store(counts + item, size.to(tl.int64))
    tl.store(starts + item, start)
    # A sequence without rows is nobody's: its slot may be that of another one.
    tl.store(count + slot, size.to(tl.int64), mask=rows > 0)
    tl.store(lengths + slot, start + size, mask=rows > 0)


@triton.jit
def _move_kernel(
    plane, source, counts, starts, slots, page_table, layer_stride, table_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """All of a head's rows are read before the first is overwritten; a root alone moves nothing."""
    layer, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    item = tl.program_id(1).to(tl.int64)
    row, word = tl.arange(0, BLOCK), tl.arange(0, BLOCK_WIDTH)
    taken = tl.load(counts + item)
    old = tl.load(source + item * ROWS + row, mask=row < taken, other=0)
    moved = (row < taken) & (old != row)
    start = tl.load(starts + item)
    pages = page_table + tl.load(slots + item) * table_stride
    at, to = start + old, start + row
    old_page = tl.load(pages + at // PAGE, mask=moved, other=0)
    page = tl.load(pages + to // PAGE, mask=moved, other=0)
    base = plane + layer * layer_stride
    inside = moved[:, None] & (word < WIDTH)[None, :]
    old_row, new_row = (old_page * HEADS + head) * PAGE + at % PAGE, (page * HEADS + head) * PAGE + to % PAGE
    values = tl.load(base + old_row[:, None] * WIDTH + word[None, :], mask=inside, other=0)
    tl.debug_barrier()
    tl.store(base + new_row[:, None] * WIDTH + word[None, :], values, mask=inside)


def commit_path(
    ancestors: Tensor,
    last: Tensor,
    slots: Tensor,
    first: Tensor | None = None,
    *,
    path: Tensor,
    count: Tensor,
    lengths: Tensor,
) -> AcceptedPath:
    """See reference.commit_path; of ragged rows `source` has no more than a sequence's own."""
    batch, rows = len(slots), ancestors.shape[1]
    assert first is not None or rows <= path.shape[1], f"{rows} rows, room for {path.shape[1]}"
    for part in (last, slots, path, count, lengths):
        assert part.is_contiguous() and part.dtype == torch.int64, f"{part.dtype}, strides {part.stride()}"
    counts, starts = torch.empty(2, batch, dtype=torch.int64, device=last.device)
    source = torch.empty(batch, rows, dtype=torch.int64, device=last.device)
    _commit_kernel[(batch,)](
        ancestors.contiguous(), last, slots, slots if first is None else first, path, count, lengths,
        counts, starts, source, path.stride(0), rows,
        BLOCK=max(32, triton.next_power_of_2(rows)), RAGGED=first is not None, num_warps=1,
    )  # fmt: skip
    return AcceptedPath(counts, starts, source)


def move_rows(planes: Sequence[Tensor], accepted: AcceptedPath, slots: Tensor, page_table: Tensor) -> None:
    """See reference.move_rows; without host/device synchronisation."""
    batch, rows = accepted.source.shape
    if rows == 1:
        return
    assert page_table.stride(1) == 1, f"strides {page_table.stride()}"
    for plane in planes:
        assert plane.is_contiguous(), f"strides {plane.stride()}"
        layers, _, heads, page, _ = plane.shape
        size = next(size for size in _WORDS if plane.shape[-1] * plane.element_size() % size == 0)
        words = plane.view(_WORDS[size])
        width = words.shape[-1]
        _move_kernel[(layers * heads, batch)](
            words, accepted.source, accepted.counts, accepted.starts, slots, page_table,
            words.stride(0), page_table.stride(0),
            ROWS=rows, BLOCK=triton.next_power_of_2(rows), HEADS=heads, PAGE=page, WIDTH=width,
            BLOCK_WIDTH=triton.next_power_of_2(width), num_warps=8 if rows * width > 4096 else 4,
        )  # fmt: skip
