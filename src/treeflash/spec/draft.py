"""Who proposes the tree of the coming step: the interface, nobody, and the DFlash draft at work."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from treeflash.models.decoder import Decoder
from treeflash.models.dflash import DFlashDraft, DraftBuffers
from treeflash.spec.proposal import Proposal
from treeflash.spec.tree import DraftTree
from treeflash.state.draft_ring import SavedRings, restore_rings, save_rings
from treeflash.state.graphs import Part


class Rank(Protocol):
    """How the request will draw: logits [K, V] for positions [K] to the best ids and log probabilities."""

    def __call__(
        self, logits: Tensor, positions: Tensor, anchor: Tensor, count: int
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a tree."""

    verified: int  # rows of the tree
    rows: list[int]  # accepted of them, the root first
    tokens: list[int]  # decided: those of the accepted rows below the root, and the target's own next
    draft_seconds: float
    step_seconds: float


class TreeGuide(Protocol):
    """What a request allows to follow; proposals it forbids cannot come true."""

    def forced(self, limit: int) -> list[int]:
        """Tokens that will follow, or very likely so."""
        ...

    def kept(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Rows of a tree that are allowed, in their order."""
        ...

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> list[np.ndarray | None]:
        """What may follow each row of a tree below the last decided token, a bit a token; None: anything."""
        ...

    def accept(self, tokens: Sequence[int]) -> int | None:
        """Tokens that are decided, in order; a number: so many of them complete the answer."""
        ...


class Drafter(Protocol):
    """Proposes for one sequence at a time; whatever it proposes, the text stays the target's."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs `append` wants."""
        ...

    @property
    def reach(self) -> int:
        """Of how many positions, the newest, it has any use for those outputs."""
        ...

    def open(self) -> None:
        """A new sequence begins."""
        ...

    def append(self, tokens: list[int], features: Tensor | None) -> None:
        """The target has processed `tokens`, and they stay; features [n, taps * width] of the last n of them.

        None: kept before.
        """
        ...

    def fix(self, rank: Rank) -> list[Part]:
        """From now on proposals use tensors that stay where they are; the parts that can be captured."""
        ...

    def keep(self, features: Tensor, count: Tensor) -> None:
        """Of features [n, taps * width] the first `count` [1] stay; nothing is asked of the device."""
        ...

    def trim(self, count: int) -> None:
        """The last `count` that were kept do not stay after all."""
        ...

    def propose(
        self, anchor: int, position: int, limit: int, rank: Rank, guide: TreeGuide | None = None
    ) -> DraftTree:
        """A tree below `anchor`, which stands at `position`, of at most `limit` rows, the root included."""
        ...

    def rests(self) -> bool:
        """Whether the next step is the root alone whatever the one under way brings, which then may begin.

        If so, that step's proposal is asked for with a limit of 1.
        """
        ...

    def learn(self, outcome: Outcome) -> None: ...

    def save(self) -> SavedRings | None:
        """What it has made of the sequence so far, never to change."""
        ...

    def restore(self, tokens: Sequence[int], saved: SavedRings | None) -> None:
        """The sequence goes on from `tokens`, where the state was saved."""
        ...

    def notes(self) -> list[str]:
        """What the user should know, in words."""
        ...


class NoDrafter:
    """Plain decoding: the root alone."""

    taps: tuple[int, ...] = ()
    reach = 0

    def open(self) -> None: ...

    def append(self, tokens: list[int], features: Tensor | None) -> None: ...

    def fix(self, rank: Rank) -> list[Part]:
        return []

    def keep(self, features: Tensor, count: Tensor) -> None: ...

    def trim(self, count: int) -> None: ...

    def propose(
        self, anchor: int, position: int, limit: int, rank: Rank, guide: TreeGuide | None = None
    ) -> DraftTree:
        return DraftTree.root(anchor)

    def rests(self) -> bool:
        return True

    def learn(self, outcome: Outcome) -> None: ...

    def save(self) -> SavedRings | None:
        return None

    def restore(self, tokens: Sequence[int], saved: SavedRings | None) -> None: ...

    def notes(self) -> list[str]:
        return []


class BlockDraft:
    """The DFlash draft with its ring of context and the target's embedding and head."""

    def __init__(self, draft: DFlashDraft, target: Decoder, buffers: DraftBuffers):
        self.spec = draft.spec
        self._draft, self._target, self._buffers = draft, target, buffers
        self._slots = torch.zeros(1, dtype=torch.int64, device=draft.device)
        self._waiting: list[Tensor] = []
        masks = torch.full((1, draft.spec.block_size - 1), draft.spec.mask_id, device=draft.device)
        self._masks = target.embed(masks)

    def open(self) -> None:
        self._buffers.lengths[0] = 0
        self._buffers.starts[0] = 0
        self._waiting = []

    def save(self) -> SavedRings:
        self.flush()
        return save_rings(self._buffers, 0)

    def restore(self, saved: SavedRings) -> None:
        restore_rings(self._buffers, 0, saved)
        self._waiting = []

    @property
    def reach(self) -> int:
        """Positions that the longest ring holds."""
        return max(keys.shape[1] for keys in self._buffers.keys)

    def append(self, features: Tensor, *, skipped: int = 0) -> None:
        """features [n, taps * width], behind `skipped` positions whose features nobody will need.

        A few wait until a proposal needs them.
        """
        if skipped or len(features) >= 64:
            self.flush()
            self._draft.append(features[None], self._slots, self._buffers, skipped=skipped)
            return
        self._waiting.append(features)
        if sum(map(len, self._waiting)) >= 64:
            self.flush()

    def keep(self, features: Tensor, count: Tensor) -> None:
        """The first `count` [1] of features [n, taps * width], at once; none may be waiting."""
        assert not self._waiting
        # No path of a tree below the anchor is longer than the block.
        rows = features[None, : self.spec.block_size]
        self._draft.commit(rows, self._slots, self._buffers, count)

    def trim(self, count: int) -> None:
        self._buffers.lengths[0] -= count

    def propose(self, anchor: int, rank: Rank, count: int) -> Proposal:
        """Candidates for the block's positions behind the anchor."""
        self.flush()
        return self.candidates(torch.tensor([anchor], device=self._draft.device), rank, count)

    def candidates(self, token: Tensor, rank: Rank, count: int) -> Proposal:
        """The same behind a token [1], of which only the device knows."""
        rows = torch.cat([self._target.embed(token[None]), self._masks], 1)
        hidden = self._draft.block(rows, self._slots, self._buffers)[0, 1:]
        logits = self._draft.shape_logits(self._target.logits(hidden))
        positions = self._buffers.lengths[0] + torch.arange(1, len(hidden) + 1, device=self._draft.device)
        return Proposal.rows(*rank(logits, positions, token, count))

    def flush(self) -> None:
        if self._waiting:
            self._draft.append(torch.cat(self._waiting)[None], self._slots, self._buffers)
            self._waiting = []
