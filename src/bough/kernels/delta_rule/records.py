"""The rows of a step, as the delta rule takes them."""

from dataclasses import dataclass

from torch import Tensor

from bough.kernels.tree import MAX_ROWS


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """The rows of a tree step; the first `count` rows of each path before them are committed first."""

    slots: Tensor  # [S]
    count: Tensor  # [S]
    order: Tensor  # [S, T] visits of a tree's rows, from `tree_order`; [N] of ragged rows
    first: Tensor | None = None  # [S + 1] first row of each sequence, for ragged rows
    most: int = MAX_ROWS  # rows of a sequence
