"""The commit of one sequence on a CPU: integers where the reference takes a dozen tensor operations."""

from collections.abc import Sequence

import torch
from torch import Tensor


def commit_rows(
    rows: list[int], slot: int, *, size: int, path: Tensor, count: Tensor, lengths: Tensor
) -> int:
    """Commit the rows of an accepted path in a tree of `size` rows, as reference.commit_path does.

    Return how many tokens were committed before.
    """
    held = lengths.numpy()
    start, taken = int(held[slot]), len(rows)
    accepted = set(rows)
    path.numpy()[slot, :size] = rows + [row for row in range(size) if row not in accepted]
    count.numpy()[slot] = taken
    held[slot] = start + taken
    return start


def move_rows(planes: Sequence[Tensor], rows: list[int], start: int, table: Tensor) -> None:
    """Move K and V of an accepted path's rows to the positions from `start` on; table: the slot's pages."""
    moved = [(row, to) for to, row in enumerate(rows) if row != to]
    if not moved:
        return
    page = planes[0].shape[3]
    old, new = (torch.tensor([start + pair[side] for pair in moved]) for side in (0, 1))
    for plane in planes:
        plane[:, table[new // page], :, new % page] = plane[:, table[old // page], :, old % page]
