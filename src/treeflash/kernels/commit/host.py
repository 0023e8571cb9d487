"""The commit of one sequence on a CPU: integers where the reference takes a dozen tensor operations."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treeflash.kernels.commit.reference import AcceptedPath


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
    """See reference.commit_path; slots [1]."""
    slot, row, rows = int(slots), int(last), ancestors.shape[1]
    bits, held = ancestors[0].tolist()[row] if row >= 0 else 0, lengths.numpy()
    accepted = [r for r in range(rows) if bits >> r & 1]
    start, kept = int(held[slot]), len(accepted)
    path.numpy()[slot, :rows] = accepted + [r for r in range(rows) if not bits >> r & 1]
    count.numpy()[slot] = kept
    held[slot] = start + kept
    flat = torch.from_numpy(np.array([kept, start, *accepted, *range(kept, rows)]))
    return AcceptedPath(flat[:1], flat[1:2], flat[None, 2:])


def move_rows(planes: Sequence[Tensor], accepted: AcceptedPath, slots: Tensor, page_table: Tensor) -> None:
    """See reference.move_rows; slots [1]."""
    moved = [(row, to) for to, row in enumerate(accepted.source[0].tolist()) if row != to]
    if not moved:
        return
    start, page, table = int(accepted.starts), planes[0].shape[3], page_table[int(slots)]
    old, new = (torch.tensor([start + pair[side] for pair in moved]) for side in (0, 1))
    for plane in planes:
        plane[:, table[new // page], :, new % page] = plane[:, table[old // page], :, old % page]
