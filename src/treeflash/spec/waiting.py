"""Features of committed positions that wait until a proposal needs them: a few at a time cost as one does."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

_MOST = 64  # rows that wait, or pieces of a few rows


class WaitingFeatures(ABC):
    """The part of a `DraftModel` that adds features to its state, by slot."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Tensor]] = {}

    @abstractmethod
    def _add(self, slot: int, features: Tensor, *, skipped: int) -> None:
        """Add features [1, n, taps * width] to the state, after `skipped` positions without."""

    @abstractmethod
    def _remove(self, slot: int, count: int) -> None:
        """Remove the newest positions from the state."""

    def append(self, slot: int, features: Tensor, *, skipped: int = 0) -> None:
        """Add features [n, taps * width] after `skipped` positions that no ring holds; a few rows wait."""
        if skipped or len(features) >= _MOST:
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

    def flush(self, slot: int) -> None:
        if waiting := self._waiting[slot]:
            self._add(slot, torch.cat(waiting)[None], skipped=0)
            self._waiting[slot] = []
