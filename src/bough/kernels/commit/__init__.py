"""The commit of a tree's accepted path: its rows, and their K and V moved after the committed tokens."""

from collections.abc import Sequence

from torch import Tensor

from bough.kernels.commit import reference
from bough.kernels.commit.reference import AcceptedPath
from bough.kernels.runtime.backends import runs

__all__ = ["AcceptedPath", "commit_path", "move_rows"]


def _of(slots: Tensor):
    """Return the implementation for the slots' device."""
    if not runs("commit", "triton", slots.device):
        return reference
    from bough.kernels.commit import triton_kernels

    return triton_kernels


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
    """See reference.commit_path."""
    return _of(slots).commit_path(ancestors, last, slots, first, path=path, count=count, lengths=lengths)


def move_rows(planes: Sequence[Tensor], accepted: AcceptedPath, slots: Tensor, page_table: Tensor) -> None:
    """See reference.move_rows."""
    _of(slots).move_rows(planes, accepted, slots, page_table)
