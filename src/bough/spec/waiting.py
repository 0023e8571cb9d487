"""Features of committed positions that wait until a proposal needs them: a few at a time cost as one does."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bough.spec.tree import Proposal

_BLOCK = 5 << 20  # bytes that wait on a CPU, in memory written before: fresh memory is 5 page faults a step


class WaitingFeatures(ABC):
    """The part of a `DraftModel` that adds features to its state, by slot."""

    passes = next_passes = 1.0
    pass_counts = (1,)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: dict[int, int] = {}  # rows by slot, the first of its block
        self._blocks: dict[int, np.ndarray] = {}
        self._slot_tensors: dict[int, Tensor] = {}

    @abstractmethod
    def _add(self, slot: int, features: Tensor, *, skipped: int) -> None:
        """Add features [1, n, taps * width] to the state, after `skipped` positions without."""

    @abstractmethod
    def _remove(self, slot: int, count: int) -> None:
        """Remove the newest positions from the state."""

    def append(self, slot: int, features: Tensor, *, skipped: int = 0) -> None:
        """Add features [n, taps * width] after `skipped` positions that no ring holds; on a CPU they wait."""
        rows, width = features.shape  # `len` of a tensor is slow, and this is called at every step
        most = _BLOCK // (4 * width) if self._device.type == "cpu" else 0
        if skipped or self._waiting[slot] + rows > most:
            self.flush(slot)
            if skipped or rows > most:
                return self._add(slot, features[None], skipped=skipped)
        if slot not in self._blocks:
            self._blocks[slot] = np.ones((most, width), np.float32)
        end = self._waiting[slot] = self._waiting[slot] + rows
        self._blocks[slot][end - rows : end] = features.numpy()

    def rollback(self, slot: int, count: int) -> None:
        """Remove the last `count` positions of the last append or commit."""
        if self._waiting[slot]:
            self._waiting[slot] -= count
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
        rows, self._waiting[slot] = self._waiting[slot], 0
        if rows:
            self._add(slot, torch.tensor(self._blocks[slot][None, :rows]), skipped=0)
        return rows
