"""A tree's accepted path: which rows it is, and their keys and values moved behind the committed ones."""

from collections.abc import Sequence

from torch import Tensor

from treeflash.kernels.commit import reference
from treeflash.kernels.commit.reference import Kept

__all__ = ["Kept", "keep_path", "move_rows"]


def _of(x: Tensor):
    """The implementation for x's device."""
    if not x.is_cuda:
        return reference
    from treeflash.kernels.commit import triton_kernels as kernel

    return kernel


def keep_path(
    ancestors: Tensor, last: Tensor, slots: Tensor, *, path: Tensor, count: Tensor, lengths: Tensor
) -> Kept:
    return _of(last).keep_path(ancestors, last, slots, path=path, count=count, lengths=lengths)


def move_rows(planes: Sequence[Tensor], kept: Kept, slots: Tensor, page_table: Tensor) -> None:
    _of(slots).move_rows(planes, kept, slots, page_table)
