"""The slot mapping of a step's rows (KV pages and offsets), and trees padded to a size."""

from torch import Tensor

from treeflash.kernels.slot_mapping import reference
from treeflash.kernels.slot_mapping.reference import SlotMapping

__all__ = ["SlotMapping", "padded_tree", "slot_mapping"]


def _of(x: Tensor):
    """Return the implementation for x's device."""
    if not x.is_cuda:
        return reference
    from treeflash.kernels.slot_mapping import triton_kernels

    return triton_kernels


def padded_tree(tree: Tensor, count: Tensor, slots: Tensor, lengths: Tensor, *, size: int) -> Tensor:
    """See reference.padded_tree."""
    if not tree.is_cuda and int(count) == size:
        rows = tree[:, :size].clone()  # nothing to pad
        rows[3] += lengths[slots]
        return rows
    return _of(tree).padded_tree(tree, count, slots, lengths, size=size)


def slot_mapping(
    slots: Tensor, lengths: Tensor, page_table: Tensor, path: Tensor, count: Tensor, *, rows: int, page: int
) -> SlotMapping:
    """See reference.slot_mapping."""
    return _of(slots).slot_mapping(slots, lengths, page_table, path, count, rows=rows, page=page)
