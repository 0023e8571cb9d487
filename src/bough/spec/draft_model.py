"""DraftModel: a draft with its state of every sequence, as a draft call needs it."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from bough.spec.drafter import Rank
from bough.spec.tree import Proposal
from bough.state.draft_ring import SavedRings


class DraftModel(Protocol):
    """A draft with its state of every sequence."""

    # Forward passes of the last call, for each text: a draft may look as far ahead as seems to pay. Of a call
    # over static buffers, one of `pass_counts`, set before.
    passes: float

    @property
    def pass_counts(self) -> Sequence[int]:
        """How many a captured call may make: each is a function of its own."""
        ...

    @property
    def next_passes(self) -> float:
        """How many the next call is expected to make; over static buffers one of `pass_counts`."""
        ...

    @property
    def depth(self) -> int:
        """Positions that one call proposes for."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose outputs it reads."""
        ...

    @property
    def context_length(self) -> int:
        """How many of the newest positions it reads."""
        ...

    def begin(self, slot: int) -> None:
        """Start a sequence without any positions."""
        ...

    def append(self, slot: int, features: Tensor, *, skipped: int = 0) -> None:
        """Add committed positions, after `skipped` that it does not read; they may wait for `flush`."""
        ...

    def commit(self, features: Tensor, rows: Tensor, counts: Tensor, slots: Tensor) -> None:
        """Add accepted paths as `DevicePaths` says them, as a part of a captured step."""
        ...

    def rollback(self, slot: int, count: int) -> None:
        """Remove the last positions that were added."""
        ...

    def flush(self, slot: int, text: Sequence[int] = ()) -> int:
        """Bring the state up to date; return how many positions were missing.

        text: all tokens up to the anchor of the call that follows.
        """
        ...

    def unread(self, slot: int, text: Sequence[int]) -> int:
        """Return how many positions the next call has to read of a text that it reads by itself."""
        ...

    def observe(self, proposal: Proposal) -> None:
        """Learn from what a call proposed for one text, before correction; later than its step."""
        ...

    def candidates(
        self, anchors: Tensor, slots: Tensor, rank: Rank, count: int, chains: Tensor | None = None
    ) -> Proposal:
        """Return candidates after the anchors [S]; chains [S, depth]: what prompt lookup found, then -1."""
        ...

    def save(self, slot: int) -> SavedRings | None: ...
    def restore(self, slot: int, saved: SavedRings) -> None: ...


class NoDraftModel:
    """Prompt lookup alone: no draft, nothing to keep; and what a draft is that reads no features."""

    passes, depth, context_length = 1.0, 15, 0
    pass_counts: tuple[int, ...] = (1,)
    taps: tuple[int, ...] = ()

    @property
    def next_passes(self) -> float:
        return 1.0

    def begin(self, slot: int) -> None: ...

    def append(self, slot: int, features: Tensor, *, skipped: int = 0) -> None: ...

    def commit(self, features: Tensor, rows: Tensor, counts: Tensor, slots: Tensor) -> None: ...

    def rollback(self, slot: int, count: int) -> None: ...

    def flush(self, slot: int, text: Sequence[int] = ()) -> int:
        return 0

    def unread(self, slot: int, text: Sequence[int]) -> int:
        return 0

    def observe(self, proposal: Proposal) -> None: ...

    def candidates(
        self, anchors: Tensor, slots: Tensor, rank: Rank, count: int, chains: Tensor | None = None
    ) -> Proposal:
        raise AssertionError("there is no draft to call")

    def save(self, slot: int) -> SavedRings | None:
        return None

    def restore(self, slot: int, saved: SavedRings) -> None: ...
