"""Triton kernels of the slot mapping and of padded trees: one launch each, where torch takes a dozen."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from treeflash.kernels.slot_mapping.reference import SlotMapping


@triton.jit
def _pad_kernel(tree, count, slots, lengths, out, tree_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    inside = row < SIZE
    spare = row >= tl.load(count)
    kept = inside & (row < tl.load(count))
    root = tl.load(tree)
    token = tl.load(tree + row, mask=kept, other=0)
    parent = tl.load(tree + tree_stride + row, mask=kept, other=-1)
    ancestors = tl.load(tree + 2 * tree_stride + row, mask=kept, other=0)
    depth = tl.load(tree + 3 * tree_stride + row, mask=kept, other=0)
    own = tl.full([BLOCK], 1, tl.int64) << row.to(tl.int64)
    tl.store(out + row, tl.where(spare, root, token), mask=inside)
    tl.store(out + SIZE + row, parent, mask=inside)
    tl.store(out + 2 * SIZE + row, tl.where(spare, own, ancestors), mask=inside)
    tl.store(out + 3 * SIZE + row, tl.load(lengths + tl.load(slots)) + depth, mask=inside)


@triton.jit
def _slot_mapping_kernel(
    slots, lengths, page_table, path, count, own_lengths, own_table, pages, offsets, own_path, own_count,
    table_stride, path_stride, T, PAGE: tl.constexpr, PAGES: tl.constexpr, SAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program copies a part of one slot's table; the first one does all the rest."""
    item, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    slot = tl.load(slots + item)
    table = page_table + slot * table_stride
    at = part * BLOCK + tl.arange(0, BLOCK)
    tl.store(own_table + item * PAGES + at, tl.load(table + at, mask=at < PAGES), mask=at < PAGES)
    if part == 0:
        length = tl.load(lengths + slot)
        tl.store(own_lengths + item, length)
        tl.store(own_count + item, tl.load(count + slot))
        for start in range(0, T, BLOCK):
            row = start + tl.arange(0, BLOCK)
            index = length + row
            page = tl.load(table + index // PAGE, mask=(row < T) & (index < PAGES * PAGE), other=0)
            tl.store(pages + item * T + row, page, mask=row < T)
            tl.store(offsets + item * T + row, index % PAGE, mask=row < T)
        for start in range(0, SAVED, BLOCK):
            row = start + tl.arange(0, BLOCK)
            saved = tl.load(path + slot * path_stride + row, mask=row < SAVED)
            tl.store(own_path + item * SAVED + row, saved, mask=row < SAVED)


def padded_tree(tree: Tensor, count: Tensor, slots: Tensor, lengths: Tensor, *, size: int) -> Tensor:
    """See reference.padded_tree."""
    assert tree.stride(1) == 1 and size <= tree.shape[1], f"{tree.shape}, {tree.stride()}, {size} rows"
    out = torch.empty(4, size, dtype=torch.int64, device=tree.device)
    _pad_kernel[(1,)](
        tree, count, slots, lengths, out, tree.stride(0),
        SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=1,
    )  # fmt: skip
    return out


def slot_mapping(
    slots: Tensor, lengths: Tensor, page_table: Tensor, path: Tensor, count: Tensor, *, rows: int, page: int
) -> SlotMapping:
    """See reference.slot_mapping."""
    batch, table_pages, saved = len(slots), page_table.shape[1], path.shape[1]
    assert page_table.stride(1) == 1 and path.stride(1) == 1, f"{page_table.stride()}, {path.stride()}"

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=slots.device)

    mapping = SlotMapping(
        lengths=new(batch),
        page_table=new(batch, table_pages),
        pages=new(batch * rows),
        offsets=new(batch * rows),
        path=new(batch, saved),
        count=new(batch),
    )
    block = 256
    _slot_mapping_kernel[(triton.cdiv(table_pages, block), batch)](
        slots, lengths, page_table, path, count,
        mapping.lengths, mapping.page_table, mapping.pages, mapping.offsets, mapping.path, mapping.count,
        page_table.stride(0), path.stride(0), rows,
        PAGE=page, PAGES=table_pages, SAVED=saved, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return mapping
