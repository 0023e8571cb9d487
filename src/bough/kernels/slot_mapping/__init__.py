"""The slot mapping of a step's rows (KV pages and offsets), and the rows of trees, padded to a size."""

from torch import Tensor

from bough.kernels.runtime.backends import runs
from bough.kernels.slot_mapping import reference
from bough.kernels.slot_mapping.reference import SlotMapping

__all__ = ["SlotMapping", "padded_tree", "ragged_rows", "slot_mapping"]


def _of(x: Tensor):
    """Return the implementation for x's device."""
    if not runs("slot mapping", "triton", x.device):
        return reference
    from bough.kernels.slot_mapping import triton_kernels

    return triton_kernels


def ragged_rows(rows: Tensor, first: Tensor, slots: Tensor, lengths: Tensor, *, size: int) -> Tensor:
    """See reference.ragged_rows."""
    return _of(rows).ragged_rows(rows, first, slots, lengths, size=size)


def padded_tree(tree: Tensor, count: Tensor, slots: Tensor, lengths: Tensor, *, size: int) -> Tensor:
    """See reference.padded_tree."""
    return _of(tree).padded_tree(tree, count, slots, lengths, size=size)


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
    """See reference.slot_mapping."""
    tables = (slots, lengths, page_table, path, count)
    return _of(slots).slot_mapping(*tables, rows=rows, page=page, first=first, spare_page=spare_page)
