"""The rows of one step, shared between the trees of its sequences: torch on every device, capturable."""

import torch
from torch import Tensor

from bough.kernels.tree import MAX_ROWS


def share_rows(trees: Tensor, gains: Tensor, present: Tensor, extra: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best rows of some trees as ragged rows [P, 64], the first row of each tree [S + 1], and the
    64 best gains.

    trees [S, P, 64]; gains [S, 63] of the rows below the roots, 0 where there is none; present [S] int64: 1,
    or 0 for a sequence that is missing. Each has its root, and the best `extra` [1] rows of all are theirs. A
    row is in the tree only if all before it are, so it counts for no more than they do: the best rows of all
    trees are a prefix of each. Ties: the earlier sequence's.
    """
    best = gains.cummin(1).values.flatten().sort(descending=True, stable=True)
    place = torch.arange(len(best.values), device=gains.device)
    taken = (place < extra) & (best.values > 0)
    sizes = present.index_add(0, best.indices // gains.shape[1], taken.long())
    first = torch.cat([torch.zeros_like(sizes[:1]), sizes.cumsum(0)])
    row = torch.arange(MAX_ROWS, device=gains.device)
    owner = (row[:, None] >= first[1:]).sum(1).clamp(max=len(trees) - 1)
    index = (row - first[owner]).clamp(max=MAX_ROWS - 1)
    return trees[owner, :, index].T, first, best.values[:MAX_ROWS]
