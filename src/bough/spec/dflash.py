"""The DFlash draft as a proposer: its KV ring, the target's embedding and head."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bough.kernels.tree import MAX_ROWS
from bough.models.decoder import Target
from bough.models.dflash import DFlashDraft, DraftBuffers
from bough.models.refine import Refiner
from bough.spec.drafter import Rank
from bough.spec.tree import Proposal
from bough.spec.waiting import WaitingFeatures
from bough.state.draft_ring import SavedRings, restore_rings, save_rings


@dataclass(frozen=True, slots=True)
class DraftedBlock:
    """The rows of one draft call that predict tokens, and their positions [S, K]."""

    residual: Tensor  # [S, K, width] before the final norm, where a head refines them
    hidden: Tensor  # after it
    logits: Tensor  # [S, K, vocabulary]
    positions: Tensor


class DFlashModel(WaitingFeatures):
    """The DFlash draft with its KV ring and the target's embedding and head."""

    def __init__(self, draft: DFlashDraft, target: Target, buffers: DraftBuffers):
        super().__init__(draft.device)
        self._spec = draft.spec
        self._draft, self._target, self._buffers = draft, target, buffers
        masks = torch.full((1, draft.spec.block_size - 1), draft.spec.mask_id, device=draft.device)
        self._masks = target.embed(masks)
        self.positions = draft.spec.depth  # that a call proposes for, at most `depth`

    @property
    def watched(self) -> tuple[DFlashDraft, Target]:
        """The draft and its target, for an experiment on them."""
        return self._draft, self._target

    @property
    def depth(self) -> int:
        return self._spec.depth

    @property
    def taps(self) -> tuple[int, ...]:
        return self._spec.taps

    @property
    def context_length(self) -> int:
        """Positions that the longest ring holds."""
        return max(keys.shape[1] for keys in self._buffers.keys)

    def begin(self, slot: int) -> None:
        self._buffers.lengths[slot] = 0
        self._buffers.starts[slot] = 0
        self._waiting[slot] = 0

    def _add(self, slot: int, features: Tensor, *, skipped: int) -> None:
        self._draft.append(features, self._slots(slot), self._buffers, skipped=skipped)

    def _remove(self, slot: int, count: int) -> None:
        self._buffers.lengths[slot] -= count

    def commit(self, features: Tensor, rows: Tensor, counts: Tensor, slots: Tensor) -> None:
        """Add the first counts [S] of each slot's rows [S, n] of features; no host/device synchronisation.

        features [R, taps * width].
        """
        # No path of a tree is longer.
        rows = rows[:, : self.depth + 1]
        if rows.numel() <= MAX_ROWS:
            self._draft.commit(features[rows], slots, self._buffers, counts)
            return
        # More rows than the matmuls of small steps take: only the accepted ones, each as an item of its own.
        number = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
        taken = number < counts[:, None]
        # Where each goes; the others go after them.
        places = torch.where(taken, (counts.cumsum(0) - counts)[:, None] + number, len(features)).flatten()
        packed = torch.stack([rows, slots[:, None].expand_as(rows), number, taken.long()]).flatten(1)
        flat = packed.new_zeros(4, len(features) + 1).index_copy_(1, places, packed)[:, : len(features)]
        row, slot, after, count = (part.contiguous() for part in flat)
        self._draft.commit(features[row][:, None], slot, self._buffers, count, after)

    def candidates(
        self, anchors: Tensor, slots: Tensor, rank: Rank, count: int, chains: Tensor | None = None
    ) -> Proposal:
        """Return candidates for the block's positions after the anchors [S]."""
        block = self.block(anchors, slots)
        hidden, logits, positions = block.hidden, block.logits, block.positions
        head = self._draft.selector or self._draft.refiner
        if head is None:
            return Proposal.of(*rank(logits, positions, anchors, slots, count))
        ids, scores = rank(logits, positions, anchors, slots, head.candidates)
        # Before each candidate: those of the position before, and the token that prompt lookup has there.
        other = anchors[:, None].expand(positions.shape)
        if chains is not None:
            other = chains[:, : positions.shape[1]].clamp(min=0)
        before = torch.cat([ids, other[..., None]], -1)
        first = anchors[:, None, None].expand(-1, 1, before.shape[-1])
        before = torch.cat([first, before[:, :-1]], 1)
        flat = hidden.flatten(0, 1), before.flatten(0, 1)
        if isinstance(head, Refiner):
            new = head(block.residual.flatten(0, 1), *flat, ids.flatten(0, 1), self._target)
            new = self._draft.scaled(new).unflatten(0, positions.shape)
            added = rank.perturb(new - logits.gather(-1, ids)[:, :, None], slots)
            confidence = None
        else:
            added = head(*flat, ids.flatten(0, 1)).unflatten(0, positions.shape)
            confidence = head.confidence(*flat)
        edges = (scores[:, :, None] + added).log_softmax(-1)
        if confidence is not None:
            edges = edges + confidence.unflatten(0, positions.shape)
        if count > 1:
            return replace(Proposal.of(ids, scores), edges=edges)
        return Proposal.stack([Proposal.best_path(*each) for each in zip(ids, edges, strict=True)])

    def block(self, anchors: Tensor, slots: Tensor) -> DraftedBlock:
        """Return the rows after the anchors [S], and what they predict."""
        depth, draft = self.positions, self._draft
        masks = self._masks[:, : self._masks.shape[1] - self.depth + depth].expand(len(anchors), -1, -1)
        rows = torch.cat([self._target.embed(anchors[:, None]), masks], 1)
        if draft.refiner is None:
            residual = hidden = draft.block(rows, slots, self._buffers)[:, -depth:]
        else:
            residual, hidden = (part[:, -depth:] for part in draft.rows(rows, slots, self._buffers, anchors))
        after = torch.arange(1, depth + 1, device=draft.device)
        positions = self._buffers.lengths[slots][:, None] + after
        return DraftedBlock(residual, hidden, draft.logits(hidden, self._target.draft_logits), positions)

    def save(self, slot: int) -> SavedRings:
        self.flush(slot)
        return save_rings(self._buffers, slot)

    def restore(self, slot: int, saved: SavedRings) -> None:
        restore_rings(self._buffers, slot, saved)
        self._waiting[slot] = 0
