"""Triton kernels of the slot mapping and of padded trees: one launch each, where torch takes a dozen."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.slot_mapping.reference import SlotMapping


@triton.jit(do_not_specialize=["size"])
def _pad_kernel(tree, count, slots, lengths, out, tree_stride, size, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    inside = row < size
    spare = row >= tl.load(count)
    in_tree = inside & (row < tl.load(count))
    root = tl.load(tree)
    token = tl.load(tree + row, mask=in_tree, other=0)
    parent = tl.load(tree + tree_stride + row, mask=in_tree, other=-1)
    ancestors = tl.load(tree + 2 * tree_stride + row, mask=in_tree, other=0)
    depth = tl.load(tree + 3 * tree_stride + row, mask=in_tree, other=0)
    row_bit = tl.full([BLOCK], 1, tl.int64) << row.to(tl.int64)
    tl.store(out + row, tl.where(spare, root, token), mask=inside)
    tl.store(out + BLOCK + row, parent, mask=inside)
    tl.store(out + 2 * BLOCK + row, tl.where(spare, row_bit, ancestors), mask=inside)
    slot = tl.load(slots)
    tl.store(out + 3 * BLOCK + row, tl.load(lengths + slot) + depth, mask=inside)
    tl.store(out + 4 * BLOCK + row, tl.zeros([BLOCK], tl.int64) + slot, mask=inside)
    tl.store(out + 5 * BLOCK + row, tl.zeros([BLOCK], tl.int64), mask=inside)


@triton.jit(do_not_specialize=["sequences", "size"])
def _ragged_kernel(rows, first, slots, lengths, out, rows_stride, sequences, size, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    inside = row < size
    in_tree = inside & (row < tl.load(first + sequences))
    begin, slot = row.to(tl.int64), tl.full([BLOCK], -1, tl.int64)
    for item in range(0, sequences):
        start = tl.load(first + item)
        in_sequence = in_tree & (row >= start) & (row < tl.load(first + item + 1))
        begin = tl.where(in_sequence, start, begin)
        slot = tl.where(in_sequence, tl.load(slots + item), slot)
    depth = tl.load(rows + 3 * rows_stride + row, mask=in_tree, other=0)
    position = tl.load(lengths + slot, mask=in_tree, other=0) + depth
    tl.store(out + row, tl.load(rows + row, mask=in_tree, other=0), mask=inside)
    tl.store(out + BLOCK + row, tl.load(rows + rows_stride + row, mask=in_tree, other=-1), mask=inside)
    tl.store(out + 2 * BLOCK + row, tl.load(rows + 2 * rows_stride + row, mask=in_tree, other=1), mask=inside)
    tl.store(out + 3 * BLOCK + row, position, mask=inside)
    tl.store(out + 4 * BLOCK + row, slot, mask=inside)
    tl.store(out + 5 * BLOCK + row, begin, mask=inside)


@triton.jit(do_not_specialize=["T", "sequences", "spare_page"])
def _slot_mapping_kernel(
    slots, lengths, page_table, path, count, first, own_lengths, own_table, pages, offsets, own_path,
    own_count, table_stride, path_stride, T, sequences, spare_page, PAGE: tl.constexpr, PAGES: tl.constexpr,
    SAVED: tl.constexpr, BLOCK: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """One program copies a part of one slot's table; the first one does all the rest."""
    item, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    slot = tl.load(slots + item)
    table = page_table + slot * table_stride
    at = part * BLOCK + tl.arange(0, BLOCK)
    tl.store(own_table + item * PAGES + at, tl.load(table + at, mask=at < PAGES), mask=at < PAGES)
    if part == 0:
        length, pending = tl.load(lengths + slot), tl.load(count + slot)
        begin, rows = item * T, tl.full((), 0, tl.int64) + T
        if RAGGED:
            begin = tl.load(first + item)
            rows = tl.load(first + item + 1) - begin
            pending = tl.where(rows > 0, pending, 0)
            # The last sequence's program: rows after it are padding.
            after = begin + rows + tl.arange(0, BLOCK)
            spare = after < tl.where(item == sequences - 1, T, 0)
            tl.store(pages + after, tl.zeros([BLOCK], tl.int64) + spare_page, mask=spare)
            tl.store(offsets + after, after % PAGE, mask=spare)
        tl.store(own_lengths + item, length)
        tl.store(own_count + item, pending)
        for start in range(0, rows, BLOCK):
            row = start + tl.arange(0, BLOCK)
            index = length + row
            page = tl.load(table + index // PAGE, mask=(row < rows) & (index < PAGES * PAGE), other=0)
            tl.store(pages + begin + row, page, mask=row < rows)
            tl.store(offsets + begin + row, index % PAGE, mask=row < rows)
        for start in range(0, SAVED, BLOCK):
            at = start + tl.arange(0, BLOCK)
            saved = tl.load(path + slot * path_stride + at, mask=at < SAVED)
            tl.store(own_path + item * SAVED + at, saved, mask=at < SAVED)


def padded_tree(tree: Tensor, count: Tensor, slots: Tensor, lengths: Tensor, *, size: int) -> Tensor:
    assert tree.stride(1) == 1 and size <= tree.shape[1], f"{tree.shape}, {tree.stride()}, {size} rows"
    # One kernel for all sizes, and rows that are aligned whatever the size.
    block = triton.next_power_of_2(tree.shape[1])
    out = torch.empty(6, block, dtype=torch.int64, device=tree.device)
    _pad_kernel[(1,)](tree, count, slots, lengths, out, tree.stride(0), size, BLOCK=block, num_warps=1)
    return out[:, :size]


def ragged_rows(rows: Tensor, first: Tensor, slots: Tensor, lengths: Tensor, *, size: int) -> Tensor:
    assert rows.stride(1) == 1 and size <= rows.shape[1], f"{rows.shape}, {rows.stride()}, {size} rows"
    block = triton.next_power_of_2(rows.shape[1])
    out = torch.empty(6, block, dtype=torch.int64, device=rows.device)
    _ragged_kernel[(1,)](
        rows, first, slots, lengths, out, rows.stride(0), len(slots), size, BLOCK=block, num_warps=1
    )
    return out[:, :size]


def slot_mapping(
    slots: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    path: Tensor,
    count: Tensor,
    *,
    rows: int,
    page: int,
    first: Tensor | None = None,
    spare_page: int = 0,
) -> SlotMapping:
    assert first is None or rows <= 256, f"{rows} ragged rows, at most 256"
    total = len(slots) * rows if first is None else rows
    batch, table_pages, saved = len(slots), page_table.shape[1], path.shape[1]
    assert page_table.stride(1) == 1 and path.stride(1) == 1, f"{page_table.stride()}, {path.stride()}"

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=slots.device)

    mapping = SlotMapping(
        lengths=new(batch),
        page_table=new(batch, table_pages),
        pages=new(total),
        offsets=new(total),
        path=new(batch, saved),
        count=new(batch),
    )
    block = 256
    _slot_mapping_kernel[(triton.cdiv(table_pages, block), batch)](
        slots, lengths, page_table, path, count, lengths if first is None else first,
        mapping.lengths, mapping.page_table, mapping.pages, mapping.offsets, mapping.path, mapping.count,
        page_table.stride(0), path.stride(0), rows, batch, spare_page,
        PAGE=page, PAGES=table_pages, SAVED=saved, BLOCK=block, RAGGED=first is not None, num_warps=4,
    )  # fmt: skip
    return mapping
