"""ExpertCache: which experts of a layer, whose weights are in host memory, have a place on the device.

All of it is on the device: a step finds its misses, evicts the experts that were used least recently and
copies what is missing, without the host. Where an expert's weights are is no part of a row's bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bough.kernels.experts.stack import Copies, ExpertStack

ROUNDS = 4  # in which a prompt reads the experts of a matrix that have no place, at most
_ALIGNED = 4  # numbers of 32 bits: kernels read what begins at a multiple of 16 bytes


@dataclass(slots=True)
class ExpertCache:
    """The places of one layer's experts, the same in all its stacks."""

    places: Tensor  # int32 [experts]: of each expert, or -1
    owners: Tensor  # int32 [slots]: the expert in each place
    stamps: Tensor  # int64 [slots]: the step that used it last
    uses: Tensor  # int64 [experts]: steps that used each
    totals: Tensor  # int64 [3]: steps, distinct experts of steps that had a place, and that had none
    copies: Copies  # of the step
    stage: Tensor = field(default_factory=lambda: torch.empty(0))  # uint8, shared by all layers
    mirror: Tensor = field(default_factory=lambda: torch.empty(0))  # the totals where the host reads them

    @classmethod
    def of(cls, stacks: Sequence[ExpertStack]) -> "ExpertCache":
        """Return the cache of a layer's stacks; the first experts have places."""
        count, slots = stacks[0].count, len(stacks[0].data)
        assert all(len(stack.data) == slots and stack.host is not None for stack in stacks)
        device = stacks[0].row_scale.device
        pairs = torch.empty(slots, 2, dtype=torch.int32, device=device)
        cache = cls(
            places=torch.full((count,), -1, dtype=torch.int32, device=device),
            owners=torch.full((slots,), -1, dtype=torch.int32, device=device),
            stamps=torch.zeros(slots, dtype=torch.int64, device=device),
            uses=torch.zeros(count, dtype=torch.int64, device=device),
            totals=torch.zeros(3, dtype=torch.int64, device=device),
            copies=Copies(pairs, torch.zeros(1, dtype=torch.int32, device=device)),
        )
        cache.mirror = torch.zeros_like(cache.totals)
        return cache

    def fill(self, stacks: Sequence[ExpertStack], experts: Sequence[int]) -> None:
        """Give the places to these experts, the most used first, and forget the counts."""
        for slot, expert in enumerate(experts[: len(self.owners)]):
            for stack in stacks:
                assert stack.host is not None
                stack.data[slot].copy_(stack.host[expert], non_blocking=True)
        held = torch.tensor(experts[: len(self.owners)], device=self.places.device)
        self.places.fill_(-1)
        self.places[held] = torch.arange(len(held), dtype=torch.int32, device=held.device)
        self.owners.copy_(held)
        # The most used is evicted last.
        self.stamps.copy_(-torch.arange(len(held), device=held.device))
        for counts in (self.uses, self.totals, self.mirror):
            counts.zero_()

    def share(self, stage: Tensor, mirror: Tensor, uses: Tensor) -> None:
        """Take the memory that prompts of all layers use one after the other, and where it counts."""
        self.stage, self.mirror, self.uses = stage, mirror, uses

    def round_buffers(self, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return chunks [rounds, most, 4], their numbers, copies [rounds, at once, 2] and their numbers."""
        pairs = staged_at_once(len(self.places))
        shapes = ((most, 4), (_ALIGNED,), (pairs, 2), (_ALIGNED,))
        device = self.places.device
        chunks, counts, copies, filled = (
            torch.empty(ROUNDS, *shape, dtype=torch.int32, device=device) for shape in shapes
        )
        return chunks, counts, copies, filled


def staged_at_once(experts: int) -> int:
    """Return how many experts' matrices are in the stage at a time."""
    return -(-experts // ROUNDS)


def stage_bytes(stacks: Sequence[ExpertStack]) -> int:
    """Return the bytes of the stage that a layer's prompts need."""
    return max(staged_at_once(stack.count) * stack.expert_bytes for stack in stacks)
