"""Where a step's rows stand: what layers read of the slots' tables, and a tree's rows filled up to a size."""

from torch import Tensor

from treeflash.kernels.slot_mapping import reference
from treeflash.kernels.slot_mapping.reference import Places

__all__ = ["Places", "padded_tree", "row_places"]


def _of(x: Tensor):
    """The implementation for x's device."""
    if not x.is_cuda:
        return reference
    from treeflash.kernels.slot_mapping import triton_kernels as kernel

    return kernel


def padded_tree(tree: Tensor, count: Tensor, slots: Tensor, lengths: Tensor, *, size: int) -> Tensor:
    return _of(tree).padded_tree(tree, count, slots, lengths, size=size)


def row_places(
    slots: Tensor, lengths: Tensor, page_table: Tensor, path: Tensor, count: Tensor, *, rows: int, page: int
) -> Places:
    return _of(slots).row_places(slots, lengths, page_table, path, count, rows=rows, page=page)
