"""A DFlash draft with a Weaver head as a proposer: the head scores the draft's candidates along each path."""

import torch
from torch import Tensor

from bough.kernels.norm_rope import rms_norm
from bough.models.decoder import Target
from bough.models.newest import ROLLBACK, NewestHidden
from bough.models.weaver import WeaverHead
from bough.spec.dflash import DFlashModel
from bough.spec.drafter import Rank
from bough.spec.expander import Expander, Growth, Nodes
from bough.spec.tree import Proposal
from bough.spec.waiting import WaitingFeatures
from bough.state.draft_ring import SavedRings
from bough.state.snapshots import host_copy

# Calls of the head after the anchor's, and nodes of each. Its authors make 16 calls of 4 nodes for 64 rows.
ROUNDS, WIDTH = 12, 4
# Of a position. The head was trained to compare 512; of what it lifts from below these little is proposed.
CANDIDATES = 32


class WeaverModel(WaitingFeatures):
    """A `DraftModel` of the states of both: the draft's rings, and the target's newest hidden states."""

    def __init__(
        self,
        head: WeaverHead,
        draft: DFlashModel,
        target: Target,
        newest: NewestHidden,
        *,
        final_norm: Tensor,
    ):
        """`final_norm` [width]: of the target."""
        super().__init__(newest.rows.device)
        self.parts = head, draft, target, newest
        self._draft, self._target, self._newest, self._final_norm = draft, target, newest, final_norm
        self._columns = len(draft.taps) * target.spec.width  # of the draft's features

    @property
    def depth(self) -> int:
        return self._draft.depth

    @property
    def taps(self) -> tuple[int, ...]:
        return *self._draft.taps, len(self._target.spec.layers) - 1

    @property
    def context_length(self) -> int:
        return self._draft.context_length

    def begin(self, slot: int) -> None:
        self._draft.begin(slot)
        self._waiting[slot] = []

    def _add(self, slot: int, features: Tensor, *, skipped: int) -> None:
        self._draft.append(slot, features[0, :, : self._columns].contiguous(), skipped=skipped)
        self._draft.flush(slot)
        newest = self._hidden(features[:, -ROLLBACK:])
        slots = self._slots(slot)
        self._newest.commit(newest, slots, torch.full_like(slots, newest.shape[1]))

    def _hidden(self, features: Tensor) -> Tensor:
        """Return the target's hidden states [B, n, width] after its final norm."""
        return rms_norm(features[..., self._columns :].contiguous(), self._final_norm, self._target.spec.eps)

    def _remove(self, slot: int, count: int) -> None:
        self._draft.rollback(slot, count)
        self._newest.rollback(slot, count)

    def commit(self, features: Tensor, rows: Tensor, counts: Tensor, slots: Tensor) -> None:
        """Add the first counts [S] of each slot's rows [S, n] of features; no host/device synchronisation."""
        self._draft.commit(features[:, : self._columns].contiguous(), rows, counts, slots)
        self._newest.commit(self._hidden(features[rows[:, : self.depth + 1]]), slots, counts)

    def candidates(
        self, anchors: Tensor, slots: Tensor, rank: Rank, count: int, chains: Tensor | None = None
    ) -> Proposal:
        """Return the likeliest paths after the anchors [S]."""
        scorer = _PathScores(self, anchors, slots, rank, min(count, CANDIDATES))
        return Expander(anchors, scorer, Growth(ROUNDS, min(WIDTH, count), self.depth)).proposal()

    def save(self, slot: int) -> SavedRings:
        self.flush(slot)
        saved = self._draft.save(slot)
        hidden = host_copy(self._newest.last(self._slots(slot))[0])
        return SavedRings(saved.length, saved.start, [*saved.rings, (hidden, hidden[:0])])

    def restore(self, slot: int, saved: SavedRings) -> None:
        *rings, (hidden, _) = saved.rings
        self._draft.restore(slot, SavedRings(saved.length, saved.start, rings))
        self._newest.restore(slot, hidden)
        self._waiting[slot] = []


class _PathScores:
    """A `PathScorer`: the head, with the K and V of one call's expansions."""

    def __init__(self, model: WeaverModel, anchors: Tensor, slots: Tensor, rank: Rank, count: int):
        self._head, draft, self._target, newest = model.parts
        self._rank, self._slots, self._count = rank, slots, count
        block = draft.block(anchors, slots)
        # [S, K, k] by the draft alone.
        self._ids, self._scores = rank(block.logits, block.positions, anchors, slots, CANDIDATES)
        self._prefix = self._head.prefix(newest.last(slots), block.hidden)
        # [S, 1 + E, heads, D] of each layer; the first row is for the anchor, which has none above.
        self._pools = [(torch.zeros_like(k[:, :1]), torch.zeros_like(v[:, :1])) for k, v in self._prefix]

    def __call__(self, nodes: Nodes) -> tuple[Tensor, Tensor]:
        number = torch.arange(len(self._slots), device=self._slots.device)[:, None, None]
        # Before the first expansion all rows are that one.
        rows = number, (nodes.above + 1).clamp(max=self._pools[0][0].shape[1] - 1)
        above = [(k[rows], v[rows]) for k, v in self._pools]
        embedded = self._target.embed(nodes.tokens)
        query, fresh = self._head.step(embedded, nodes.depths, self._prefix, above)
        self._pools = [
            (torch.cat([k, new_k], 1), torch.cat([v, new_v], 1))
            for (k, v), (new_k, new_v) in zip(self._pools, fresh, strict=True)
        ]
        index = nodes.depths[..., None].expand(-1, -1, self._ids.shape[-1])
        ids, scores = (part.gather(1, index) for part in (self._ids, self._scores))
        added = (self._target.head_rows(ids) @ query[..., None])[..., 0]
        scores = (scores + self._rank.perturb(added, self._slots)).log_softmax(-1)
        best = scores.topk(self._count, -1)
        return ids.gather(-1, best.indices), best.values
