"""Features of committed positions that wait until a proposal needs them: a few at a time cost as one does."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from bough.spec.tree import Proposal

_MOST = 512  # rows that wait, or pieces of a few rows


class WaitingFeatures(ABC):
    """The part of a `DraftModel` that adds features to its state, by slot."""

    passes = next_passes = 1.0
    pass_counts = (1,)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: dict[int, list[Tensor]] = {}
        self._slot_tensors: dict[int, Tensor] = {}

    @abstractmethod
    def _add(self, slot: int, features: Tensor, *, skipped: int) -> None:
        """Add features [1, n, taps * width] to the state, after `skipped` positions without."""

    @abstractmethod
    def _remove(self, slot: int, count: int) -> None:
        """Remove the newest positions from the state."""

    def append(self, slot: int, features: Tensor, *, skipped: int = 0) -> None:
        """Add features [n, taps * width] after `skipped` positions that no ring holds; a few rows wait."""
        # `len` of a tensor is slow, and this is called at every step.
        if skipped or features.shape[0] >= _MOST:
            self.flush(slot)
            self._add(slot, features[None], skipped=skipped)
            return
        waiting = self._waiting[slot]
        waiting.append(features)
        if len(waiting) == _MOST:
            self.flush(slot)

    def rollback(self, slot: int, count: int) -> None:
        """Remove the last `count` positions of the last append or commit."""
        if waiting := self._waiting[slot]:
            waiting[-1] = waiting[-1][: len(waiting[-1]) - count]
        else:
            self._remove(slot, count)

    def _slots(self, slot: int) -> Tensor:
        """Return a slot as [1] int64; a copy to the device would wait for all that is enqueued there."""
        if slot not in self._slot_tensors:
            self._slot_tensors[slot] = torch.tensor([slot], device=self._device)
        return self._slot_tensors[slot]

    def unread(self, slot: int, text: Sequence[int]) -> int:
        return 0

    def observe(self, proposal: Proposal) -> None:
        return  # calibration learns

    def flush(self, slot: int, text: Sequence[int] = ()) -> int:
        """Add them to the state; return how many there were."""
        if not (waiting := self._waiting[slot]):
            return 0
        rows = torch.cat(waiting)
        self._add(slot, rows[None], skipped=0)
        self._waiting[slot] = []
        return len(rows)
