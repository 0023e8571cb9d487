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
    """Return the first `size` rows of a tree as [6, size], as `ragged_rows` does.

    tree [4, R]: tokens, parents, ancestors, depths. Rows from `count` [1] on are padding: the root's token,
    without a parent, visible to themselves. Depth 0 is at position lengths[slots], slots [1].
    """
    columns = torch.arange(size, device=tree.device)
    spare = columns >= count
    tokens, parents, ancestors, depths = tree[:, :size].unbind()
    tokens = torch.where(spare, tokens[:1], tokens)
    ancestors = torch.where(spare, torch.ones_like(columns) << columns, ancestors)
    positions = lengths[slots] + depths.masked_fill(spare, 0)
    owners = slots.expand(size), torch.zeros_like(columns)
    return torch.stack([tokens, parents.masked_fill(spare, -1), ancestors, positions, *owners])


def ragged_rows(rows: Tensor, first: Tensor, slots: Tensor, lengths: Tensor, *, size: int) -> Tensor:
    """Return the first `size` rows of some trees as [6, size]: tokens, parents, ancestors, positions, the
    slot of each row and the first row of its sequence.

    rows [4, R]: tokens, parents, ancestors, depths; those of sequence s, in slots[s], from first[s] to
    first[s + 1]. Rows after the last sequence are padding: token 0 at position 0, without a parent, in slot
    -1.
    """
    columns = torch.arange(size, device=rows.device)
    item = torch.searchsorted(first, columns, right=True) - 1
    spare = item == len(slots)
    item = item.clamp(max=len(slots) - 1)
    tokens, parents, ancestors, depths = rows[:, :size].unbind()
    owner = slots[item]
    return torch.stack(
        [
            tokens.masked_fill(spare, 0),
            parents.masked_fill(spare, -1),
            ancestors.masked_fill(spare, 1),
            (lengths[owner] + depths).masked_fill(spare, 0),
            owner.masked_fill(spare, -1),
            torch.where(spare, columns, first[item]),
        ]
    )


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
    """Return the slot mapping of `rows` rows after the committed tokens of each of slots [B].

    lengths, count [slots]; page_table, path [slots, ...]. Ragged rows: `rows` in all, those of sequence s
    from first[s] to first[s + 1]; rows after the last sequence are padding and go to `spare_page`, and a
    sequence without rows has no pending ones.
    """
    committed, table, pending = lengths[slots], page_table[slots], count[slots]
    columns = torch.arange(rows, device=slots.device)
    if first is None:
        index = committed[:, None] + columns
        pages, offsets = table.gather(1, index // page).flatten(), (index % page).flatten()
        return SlotMapping(committed, table, pages, offsets, path[slots], pending)
    item = torch.searchsorted(first, columns, right=True) - 1
    spare = item == len(slots)
    item = item.clamp(max=len(slots) - 1)
    index = torch.where(spare, columns, committed[item] + columns - first[item])
    pages = torch.where(spare, spare_page, table[item, index // page])
    return SlotMapping(committed, table, pages, index % page, path[slots], pending * (first.diff() > 0))
