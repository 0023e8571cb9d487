"""The target's hidden states of the newest committed positions, for heads that read the last one."""

from dataclasses import dataclass

import torch
from torch import Tensor

ROLLBACK = 64  # positions that a rollback may remove


@dataclass(frozen=True, slots=True)
class NewestHidden:
    """After the final norm, of each slot: up to the position before the next."""

    rows: Tensor  # [slots + 1, 65, width] float32; the last slot is spare
    counts: Tensor  # [slots + 1] int64: the row of the newest position

    @classmethod
    def empty(cls, slots: int, width: int, device: torch.device | str) -> "NewestHidden":
        rows = torch.zeros(slots + 1, ROLLBACK + 1, width, device=device)
        return cls(rows, torch.zeros(slots + 1, dtype=torch.int64, device=device))

    def last(self, slots: Tensor) -> Tensor:
        """Return the hidden state [B, 1, width] of the last committed position."""
        return self.rows[slots, self.counts[slots]][:, None]

    def commit(self, hidden: Tensor, slots: Tensor, count: Tensor) -> Tensor:
        """Add the first `count` [B] of hidden [B, n, width]; return it after the state before it [B, n + 1,
        width]. No host/device synchronisation.
        """
        hidden = torch.cat([self.last(slots), hidden], 1)
        length = min(hidden.shape[1], self.rows.shape[1])
        # A slot that commits nothing may be that of another row of the batch: it writes to the spare one.
        targets = torch.where(count > 0, slots, len(self.counts) - 1)
        self.rows[targets, :length] = hidden[:, -length:]
        self.counts[targets] = count - (hidden.shape[1] - length)
        return hidden

    def rollback(self, slot: int, count: int) -> None:
        self.counts[slot] -= count

    def restore(self, slot: int, hidden: Tensor) -> None:
        """Take the state [1, width] that `last` returned, as the only one."""
        self.rows[slot, :1].copy_(hidden, non_blocking=True)
        self.counts[slot] = 0
