"""The commit of an accepted path in plain torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AcceptedPath:
    counts: Tensor  # [B] int64 accepted rows
    starts: Tensor  # [B] int64 tokens committed before them
    source: Tensor  # [B, T] int64: the accepted rows in their order, then each row itself


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
    """Commit row `last` [B] of each tree and its ancestors; -1: none. ancestors [B, T] are bit masks.

    path [slots, R >= T] becomes the accepted rows in order, then the others; count [slots] the number of
    accepted rows; lengths [slots] grow by it. Ragged rows: ancestors [1, N], those of sequence s from
    first[s] to first[s + 1]; nothing changes for a sequence without rows.
    """
    if first is not None:
        state = {"path": path, "count": count, "lengths": lengths}
        counts, starts = torch.zeros(2, len(slots), dtype=torch.int64, device=slots.device)
        source = torch.arange(path.shape[1], device=slots.device).repeat(len(slots), 1)
        for item, (begin, end) in enumerate(pairwise(first.tolist())):
            if end > begin:
                one = slice(item, item + 1)
                one_path = commit_path(ancestors[:, begin:end], last[one], slots[one], **state)
                counts[one], starts[one] = one_path.counts, one_path.starts
                source[one, : end - begin] = one_path.source
        return AcceptedPath(counts, starts, source)
    rows = ancestors.shape[1]
    bits = ancestors.gather(1, last.clamp(min=0)[:, None])[:, 0].masked_fill(last < 0, 0)
    columns = torch.arange(rows, device=last.device)
    accepted = (bits[:, None] >> columns) & 1
    counts, starts = accepted.sum(1), lengths[slots]
    order = (1 - accepted).argsort(dim=1, stable=True)
    path[slots, :rows] = order
    count[slots] = counts
    lengths[slots] = starts + counts
    return AcceptedPath(counts, starts, torch.where(columns < counts[:, None], order, columns))


def move_rows(planes: Sequence[Tensor], accepted: AcceptedPath, slots: Tensor, page_table: Tensor) -> None:
    """Move accepted rows of the KV cache from index starts + source to starts + 0, 1, ...

    planes: [layers, pages, KV, page, row] each; page_table [slots, pages a slot].
    """
    columns = torch.arange(accepted.source.shape[1], device=slots.device)
    item, to = (accepted.source != columns).nonzero(as_tuple=True)
    if not len(item):
        return
    page, start = planes[0].shape[3], accepted.starts[item]
    (old_pages, old_offsets), (pages, offsets) = (
        (page_table[slots[item], index // page], index % page)
        for index in (start + accepted.source[item, to], start + to)
    )
    for plane in planes:
        plane[:, pages, :, offsets] = plane[:, old_pages, :, old_offsets]
