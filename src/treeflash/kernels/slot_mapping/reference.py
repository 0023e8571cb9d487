"""The slot mapping of a step's rows, and padded trees, in plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotMapping:
    """The step's rows of the slots' tables, and the page and offset of each row in the KV cache."""

    lengths: Tensor  # [B] committed tokens
    page_table: Tensor  # [B, pages a slot]
    pages: Tensor  # [B * T] of the rows in the KV cache
    offsets: Tensor  # [B * T] in their pages
    path: Tensor  # [B, R] pending rows
    count: Tensor  # [B] number of pending rows


def padded_tree(tree: Tensor, count: Tensor, slots: Tensor, lengths: Tensor, *, size: int) -> Tensor:
    """Return the first `size` rows of a tree as [4, size]: tokens, parents, ancestors, positions.

    tree [4, R]: tokens, parents, ancestors, depths. Rows from `count` [1] on are padding: the root's token,
    without a parent, visible to themselves. Depth 0 is at position lengths[slots], slots [1].
    """
    columns = torch.arange(size, device=tree.device)
    spare = columns >= count
    tokens, parents, ancestors, depths = tree[:, :size].unbind()
    tokens = torch.where(spare, tokens[:1], tokens)
    ancestors = torch.where(spare, torch.ones_like(columns) << columns, ancestors)
    positions = lengths[slots] + depths.masked_fill(spare, 0)
    return torch.stack([tokens, parents.masked_fill(spare, -1), ancestors, positions])


def slot_mapping(
    slots: Tensor, lengths: Tensor, page_table: Tensor, path: Tensor, count: Tensor, *, rows: int, page: int
) -> SlotMapping:
    """Return the slot mapping of `rows` rows after the committed tokens of each of slots [B].

    lengths, count [slots]; page_table, path [slots, ...].
    """
    own, table = lengths[slots], page_table[slots]
    index = own[:, None] + torch.arange(rows, device=slots.device)
    pages, offsets = table.gather(1, index // page).flatten(), (index % page).flatten()
    return SlotMapping(own, table, pages, offsets, path[slots], count[slots])
