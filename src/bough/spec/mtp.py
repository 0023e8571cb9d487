"""The target's MTP block as a proposer: it is called for a few of the likeliest paths so far at a time."""

import torch
from torch import Tensor

from bough.kernels.tree import MAX_ROWS
from bough.models.decoder import Target
from bough.models.mtp import MTPBlock, MTPBuffers
from bough.spec.drafter import Rank
from bough.spec.expander import Expander, Growth, Nodes
from bough.spec.tree import Proposal
from bough.spec.waiting import WaitingFeatures
from bough.state.draft_ring import SavedRings, restore_rings, save_rings
from bough.state.snapshots import host_copy

# Calls of the block in one proposal. Each costs the target's head once, some 7% of a step of the 27B; the
# block was trained to predict one token ahead, so its later proposals are accepted less and less.
STEPS = 4
BEAMS = 4  # paths that a call continues: within the head's rows for the price of one
_DEPTH = 15  # of a proposal: prompt lookup may go deeper than the block


class MTPModel(WaitingFeatures):
    """The block with its KV ring and the target's embedding and head: a `DraftModel`."""

    depth = _DEPTH

    def __init__(self, block: MTPBlock, target: Target, buffers: MTPBuffers):
        super().__init__(block.device)
        self.parts = block, target, buffers
        self._block, self._buffers = block, buffers

    @property
    def taps(self) -> tuple[int, ...]:
        return self._block.taps

    @property
    def context_length(self) -> int:
        """Positions that the ring holds, and the one before them."""
        return self._buffers.ring.keys[0].shape[1] + 1

    def begin(self, slot: int) -> None:
        self._buffers.ring.lengths[slot] = 0
        self._buffers.ring.starts[slot] = 1
        self._waiting[slot] = []

    def _add(self, slot: int, features: Tensor, *, skipped: int) -> None:
        self._block.append(features, self._slots(slot), self._buffers, skipped=skipped)

    def _remove(self, slot: int, count: int) -> None:
        self._buffers.ring.lengths[slot] -= count
        self._buffers.newest.rollback(slot, count)

    def commit(self, features: Tensor, rows: Tensor, counts: Tensor, slots: Tensor) -> None:
        """Add the first counts [S] of each slot's rows [S, n] of features; no host/device synchronisation.

        features [R, 2 * width].
        """
        rows = rows[:, : _DEPTH + 1]
        # As many slots at a time as the matmuls of small steps take.
        step = max(1, MAX_ROWS // rows.shape[1])
        for piece, count, slot in zip(*(part.split(step) for part in (rows, counts, slots)), strict=True):
            self._block.commit(features[piece], slot, self._buffers, count)

    def candidates(
        self, anchors: Tensor, slots: Tensor, rank: Rank, count: int, chains: Tensor | None = None
    ) -> Proposal:
        """Return the likeliest paths after the anchors [S]."""
        scorer = _BlockScores(self, anchors, slots, rank, count)
        return Expander(anchors, scorer, Growth(STEPS - 1, min(BEAMS, count), _DEPTH)).proposal()

    def save(self, slot: int) -> SavedRings:
        self.flush(slot)
        saved = save_rings(self._buffers.ring, slot)
        hidden = host_copy(self._buffers.newest.last(self._slots(slot))[0])
        return SavedRings(saved.length, saved.start, [*saved.rings, (hidden, hidden[:0])])

    def restore(self, slot: int, saved: SavedRings) -> None:
        *rings, (hidden, _) = saved.rings
        restore_rings(self._buffers.ring, slot, SavedRings(saved.length, saved.start, rings))
        self._buffers.newest.restore(slot, hidden)
        self._waiting[slot] = []


class _BlockScores:
    """A `PathScorer`: the block, with what it computed of one call's expansions."""

    def __init__(self, model: MTPModel, anchors: Tensor, slots: Tensor, rank: Rank, count: int):
        self._block, self._target, self._buffers = model.parts
        self._anchors, self._slots, self._rank, self._count = anchors, slots, rank, count
        # [S, 1 + E, width], of which the first is the target's; K and V [S, E, KV, D].
        self._hidden = self._buffers.newest.last(slots)
        self._keys, self._values = self._block.nothing(len(slots))
        self._rounds = 0

    def __call__(self, nodes: Nodes) -> tuple[Tensor, Tensor]:
        width = nodes.tokens.shape[1]
        item = torch.arange(len(self._slots), device=self._slots.device)[:, None]
        parents = nodes.above.gather(2, (nodes.depths - 1).clamp(min=0)[..., None])[..., 0] + 1
        before = self._hidden[item, parents.masked_fill(nodes.depths == 0, 0)]
        x = self._block.fuse(self._target.embed(nodes.tokens), before).flatten(0, 1)
        # No path is longer than there were rounds.
        rows = item[..., None], nodes.above[..., : self._rounds]
        above = self._keys[rows].flatten(0, 1), self._values[rows].flatten(0, 1)
        slots = self._slots.repeat_interleave(width)
        hidden, (keys, values) = self._block.step(x, nodes.depths.flatten(), above, slots, self._buffers)
        logits, hidden, keys, values = (
            part.unflatten(0, (-1, width))
            for part in (self._target.draft_logits(hidden), hidden, keys, values)
        )
        self._hidden = torch.cat([self._hidden, hidden], 1)
        self._keys, self._values = torch.cat([self._keys, keys], 1), torch.cat([self._values, values], 1)
        self._rounds += 1
        positions = self._buffers.ring.lengths[self._slots][:, None] + 1 + nodes.depths
        return self._rank(logits, positions, self._anchors, self._slots, self._count)
