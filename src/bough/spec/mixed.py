"""Several drafts of one target: their states are kept up together, a draft call asks one of them or all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bough.spec.draft_model import DraftModel
from bough.spec.drafter import Rank
from bough.spec.tree import Proposal
from bough.state.draft_ring import SavedRings


class MixedModel:
    """A block draft and the target's MTP block beside it: a `DraftModel` of the states of both."""

    passes = next_passes = 1.0
    pass_counts = (1,)

    def __init__(self, first: DraftModel, other: DraftModel, *, width: int):
        """`width` of the target, whose features both read."""
        self.drafts = (first, other)
        self._columns = [len(draft.taps) * width for draft in self.drafts]

    @property
    def depth(self) -> int:
        """No tree is deeper than each draft's state can follow."""
        return min(draft.depth for draft in self.drafts)

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(tap for draft in self.drafts for tap in draft.taps)

    @property
    def context_length(self) -> int:
        return max(draft.context_length for draft in self.drafts)

    def begin(self, slot: int) -> None:
        for draft in self.drafts:
            draft.begin(slot)

    def append(self, slot: int, features: Tensor, *, skipped: int = 0) -> None:
        for draft, part in zip(self.drafts, self._split(features), strict=True):
            draft.append(slot, part.contiguous(), skipped=skipped)

    def commit(self, features: Tensor, rows: Tensor, counts: Tensor, slots: Tensor) -> None:
        for draft, part in zip(self.drafts, self._split(features), strict=True):
            draft.commit(part, rows, counts, slots)

    def rollback(self, slot: int, count: int) -> None:
        for draft in self.drafts:
            draft.rollback(slot, count)

    def flush(self, slot: int, text: Sequence[int] = ()) -> int:
        return max(draft.flush(slot, text) for draft in self.drafts)

    def unread(self, slot: int, text: Sequence[int]) -> int:
        return max(draft.unread(slot, text) for draft in self.drafts)

    def observe(self, proposal: Proposal) -> None:
        raise AssertionError("each of the drafts learns from its own")

    def candidates(
        self, anchors: Tensor, slots: Tensor, rank: Rank, count: int, chains: Tensor | None = None
    ) -> Proposal:
        raise AssertionError("a draft call asks each of the drafts")

    def save(self, slot: int) -> SavedRings:
        first, other = (draft.save(slot) for draft in self.drafts)
        assert first is not None and other is not None
        sizes = torch.tensor([other.length, other.start, len(other.rings)])
        return SavedRings(first.length, first.start, [*first.rings, *other.rings, (sizes, sizes[:0])])

    def restore(self, slot: int, saved: SavedRings) -> None:
        *rings, (sizes, _) = saved.rings
        length, start, count = sizes.tolist()
        self.drafts[0].restore(slot, SavedRings(saved.length, saved.start, rings[:-count]))
        self.drafts[1].restore(slot, SavedRings(length, start, rings[-count:]))

    def _split(self, features: Tensor) -> Sequence[Tensor]:
        """Return the columns [n, taps * width] of each draft."""
        return features.split(self._columns, -1)


def mixes_of(draft: DraftModel, *, chain: bool) -> list[tuple[DraftModel, ...]]:
    """Return which drafts a call may ask: the first alone, the other alone, or both, unless in a chain."""
    if not isinstance(draft, MixedModel):
        return [(draft,)]
    alone: list[tuple[DraftModel, ...]] = [(each,) for each in draft.drafts]
    return alone if chain else [*alone, draft.drafts]
