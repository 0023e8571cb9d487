"""The target's MTP block as a proposer: it is called once a depth, for the likeliest paths so far."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from bough.kernels.tree import MAX_ROWS
from bough.models.decoder import Target
from bough.models.mtp import DraftPaths, MTPBlock, MTPBuffers
from bough.spec.drafter import Rank
from bough.spec.tree import Proposal
from bough.spec.waiting import WaitingFeatures
from bough.state.draft_ring import SavedRings, restore_rings, save_rings
from bough.state.snapshots import host_copy

# Calls of the block in one proposal. Each costs the target's head once, some 7% of a step of the 27B; the
# block was trained to predict one token ahead, so its later proposals are accepted less and less.
STEPS = 4
# Paths that are continued at each depth, and continuations of each: within the head's rows for the price of
# one, and the continuations of all depths within the chains that a tree takes.
BEAMS, CHILDREN = 4, 3
_DEPTH = 15  # of a proposal: prompt lookup may go deeper than the block


class MTPModel(WaitingFeatures):
    """The block with its KV ring and the target's embedding and head: a `DraftModel`."""

    depth = _DEPTH

    def __init__(self, block: MTPBlock, target: Target, buffers: MTPBuffers):
        super().__init__(block.device)
        self._block, self._target, self._buffers = block, target, buffers

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
        self._waiting[slot] = 0

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
        """Return candidates after the anchors [S], and continuations of the likeliest as chains."""
        block, start, sequences = self._block, self._buffers.ring.lengths[slots], len(slots)
        beams, children = min(BEAMS, count), min(CHILDREN, count)

        def ranked(hidden: Tensor, depth: int, count: int) -> tuple[Tensor, Tensor]:
            """Rank what follows rows [S * W, 1, width]: [S, W, count]."""
            logits = self._target.draft_logits(hidden[:, 0]).unflatten(0, (sequences, -1))
            positions = (start[:, None] + 1 + depth).expand(logits.shape[:2])
            return rank(logits, positions, anchors, slots, count)

        x = block.fuse(self._target.embed(anchors[:, None]), self._buffers.newest.last(slots))
        hidden, paths = block.step(x, None, slots, self._buffers)
        ids, scores = ranked(hidden, 0, count)
        beam = _Found(ids[:, 0], scores[:, 0])
        tokens, gains = ids[:, 0, :beams, None], scores[:, 0, :beams, None]
        # All of a sequence's paths begin after the anchor's row.
        first = torch.arange(sequences, device=slots.device)[:, None]
        hidden, paths = _selected(hidden, paths, first.expand(-1, beams))
        same = slots.repeat_interleave(beams)
        for depth in range(1, STEPS):
            embedded = self._target.embed(tokens[..., -1:].flatten(0, 1))
            hidden, paths = block.step(block.fuse(embedded, hidden), paths, same, self._buffers)
            ids, scores = ranked(hidden, depth, children)
            beam.learn(tokens[:, 0], ids[:, 0], scores[:, 0])
            tokens, gains, parents = _continued(tokens, gains, ids, scores)
            last = depth == STEPS - 1
            # Those that are continued again are the beginnings of later chains.
            beam.add(tokens if last else tokens[:, beams:], gains if last else gains[:, beams:])
            tokens, gains = tokens[:, :beams], gains[:, :beams]
            hidden, paths = _selected(hidden, paths, first * beams + parents[:, :beams])
        return beam.proposal()

    def save(self, slot: int) -> SavedRings:
        self.flush(slot)
        saved = save_rings(self._buffers.ring, slot)
        hidden = host_copy(self._buffers.newest.last(self._slots(slot))[0])
        return SavedRings(saved.length, saved.start, [*saved.rings, (hidden, hidden[:0])])

    def restore(self, slot: int, saved: SavedRings) -> None:
        *rings, (hidden, _) = saved.rings
        restore_rings(self._buffers.ring, slot, SavedRings(saved.length, saved.start, rings))
        self._buffers.newest.restore(slot, hidden)
        self._waiting[slot] = 0


def _selected(hidden: Tensor, paths: DraftPaths, rows: Tensor) -> tuple[Tensor, DraftPaths]:
    """Return the hidden states and paths at indices [S, W]."""
    return hidden[rows.flatten()], paths.select(rows.flatten())


def _continued(tokens: Tensor, gains: Tensor, ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the paths [S, W, d], continued by ids [S, W, c], likeliest first: [S, W * c, d + 1], and their
    parents.

    gains, scores: the log probability of each token after those before it. The path of best children stays
    the first: where the text is hard to predict it is not among the likeliest, but the others are worse.
    """
    children = ids.shape[-1]
    longer = torch.cat([tokens.repeat_interleave(children, 1), ids.flatten(1)[..., None]], -1)
    gained = torch.cat([gains.repeat_interleave(children, 1), scores.flatten(1)[..., None]], -1)
    worth = torch.cat([torch.ones_like(gained[:, :1, 0]), gained[:, 1:].sum(-1)], 1)
    order = worth.sort(dim=1, descending=True, stable=True).indices
    at = order[..., None].expand_as(longer)
    return longer.gather(1, at), gained.gather(1, at), order // children


class _Found:
    """Collects the candidates of all depths, of S sequences."""

    def __init__(self, ids: Tensor, scores: Tensor):
        self._ids, self._scores, self._given = [ids], [scores], [ids[:, :0]]
        self._chains: list[Tensor] = []
        self._gains: list[Tensor] = []

    def learn(self, path: Tensor, ids: Tensor, scores: Tensor) -> None:
        """Add the candidates [S, c] of the next depth after a path."""
        self._given.append(path)
        self._ids.append(ids)
        self._scores.append(scores)

    def add(self, chains: Tensor, gains: Tensor) -> None:
        """Add chains [S, m, d] and their scores."""
        self._chains.append(pad(chains, (0, _DEPTH - chains.shape[-1]), value=-1))
        self._gains.append(pad(gains, (0, _DEPTH - gains.shape[-1]), value=-torch.inf))

    def proposal(self) -> Proposal:
        width, deeper = self._ids[0].shape[1], _DEPTH - len(self._ids)
        rows = [pad(row, (0, width - row.shape[1]), value=-1) for row in self._ids]
        scores = [pad(row, (0, width - row.shape[1]), value=-torch.inf) for row in self._scores]
        given = [pad(path, (0, _DEPTH - path.shape[1]), value=-1) for path in self._given]
        return Proposal(
            pad(torch.stack(rows, 1), (0, 0, 0, deeper), value=-1),
            pad(torch.stack(scores, 1), (0, 0, 0, deeper), value=-torch.inf),
            torch.cat(self._chains, 1),
            torch.cat(self._gains, 1),
            # No text follows a path of -2: depths that were not drafted are not learnt from.
            given=pad(torch.stack(given, 1), (0, 0, 0, deeper), value=-2),
        )
