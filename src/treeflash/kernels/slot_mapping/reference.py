"""Where a step's rows stand, in plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Places:
    """Of the step's slots only."""

    lengths: Tensor  # [B] committed tokens
    page_table: Tensor  # [B, pages a slot]
    pages: Tensor  # [B * T] of the rows' keys and values
    offsets: Tensor  # [B * T] in their pages
    path: Tensor  # [B, R] pending rows
    count: Tensor  # [B] how many


def padded_tree(tree: Tensor, count: Tensor, slots: Tensor, lengths: Tensor, *, size: int) -> Tensor:
    """The first `size` rows of a tree [4, R]: tokens, parents, ancestors, positions.

    tree: tokens, parents, ancestors, depths. Rows from `count` [1] on are padding: the root's token, below
    nothing, seen by themselves. Depth 0 stands behind the lengths of slots [1].
    """
    columns = torch.arange(size, device=tree.device)
    spare = columns >= count
    tokens, parents, ancestors, depths = tree[:, :size].unbind()
    tokens = torch.where(spare, tokens[:1], tokens)
    ancestors = torch.where(spare, torch.ones_like(columns) << columns, ancestors)
    positions = lengths[slots] + depths.masked_fill(spare, 0)
    return torch.stack([tokens, parents.masked_fill(spare, -1), ancestors, positions])


def row_places(
    slots: Tensor, lengths: Tensor, page_table: Tensor, path: Tensor, count: Tensor, *, rows: int, page: int
) -> Places:
    """slots [B]; lengths, count [slots], page_table and path [slots, ...]: rows stand behind the lengths."""
    own, table = lengths[slots], page_table[slots]
    behind = own[:, None] + torch.arange(rows, device=slots.device)
    pages, offsets = table.gather(1, behind // page).flatten(), (behind % page).flatten()
    return Places(own, table, pages, offsets, path[slots], count[slots])
