"""The DFlash draft as a proposer: its KV ring, the target's embedding and head, and the draft call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from treeflash.kernels.tree import MAX_ROWS
from treeflash.models.decoder import Target
from treeflash.models.dflash import DFlashDraft, DraftBuffers
from treeflash.spec.drafter import Rank
from treeflash.spec.policy import LEADING, Calibration
from treeflash.spec.tree import Proposal, Tree, build_tree
from treeflash.state.draft_ring import SavedRings, restore_rings, save_rings
from treeflash.state.graphs import CapturedFunction

_FLUSH = 64  # rows of features that wait for a proposal, at most


class DraftModel(Protocol):
    """A draft with its state of one sequence."""

    @property
    def depth(self) -> int:
        """Positions that one call proposes for."""
        ...

    @property
    def taps(self) -> tuple[int, ...]: ...
    @property
    def context_length(self) -> int: ...
    def begin(self) -> None: ...
    def append(self, features: Tensor, *, skipped: int = 0) -> None: ...
    def commit(self, features: Tensor, count: Tensor) -> None: ...
    def rollback(self, count: int) -> None: ...
    def flush(self) -> None: ...
    def candidates(self, anchor: Tensor, rank: Rank, count: int) -> Proposal: ...
    def save(self) -> SavedRings | None: ...
    def restore(self, saved: SavedRings) -> None: ...


class DFlashModel:
    """The DFlash draft with its KV ring and the target's embedding and head."""

    def __init__(self, draft: DFlashDraft, target: Target, buffers: DraftBuffers):
        self._spec = draft.spec
        self._draft, self._target, self._buffers = draft, target, buffers
        self._slots = torch.zeros(1, dtype=torch.int64, device=draft.device)
        self._waiting: list[Tensor] = []
        masks = torch.full((1, self.depth), draft.spec.mask_id, device=draft.device)
        self._masks = target.embed(masks)

    @property
    def depth(self) -> int:
        return self._spec.block_size - 1

    @property
    def taps(self) -> tuple[int, ...]:
        return self._spec.taps

    @property
    def context_length(self) -> int:
        """Positions that the longest ring holds."""
        return max(keys.shape[1] for keys in self._buffers.keys)

    def begin(self) -> None:
        self._buffers.lengths[0] = 0
        self._buffers.starts[0] = 0
        self._waiting = []

    def append(self, features: Tensor, *, skipped: int = 0) -> None:
        """Add features [n, taps * width] after `skipped` positions that no ring has to hold.

        A few rows wait until a proposal needs them.
        """
        if skipped or len(features) >= _FLUSH:
            self.flush()
            self._draft.append(features[None], self._slots, self._buffers, skipped=skipped)
            return
        self._waiting.append(features)
        if sum(map(len, self._waiting)) >= _FLUSH:
            self.flush()

    def commit(self, features: Tensor, count: Tensor) -> None:
        """Add the first `count` [1] of features [n, taps * width] without a host/device synchronisation."""
        assert not self._waiting
        # No path of a tree is longer than the block.
        rows = features[None, : self._spec.block_size]
        self._draft.commit(rows, self._slots, self._buffers, count)

    def rollback(self, count: int) -> None:
        if self._waiting:
            self._waiting[-1] = self._waiting[-1][: len(self._waiting[-1]) - count]
        else:
            self._buffers.lengths[0] -= count

    def flush(self) -> None:
        if self._waiting:
            self._draft.append(torch.cat(self._waiting)[None], self._slots, self._buffers)
            self._waiting = []

    def candidates(self, anchor: Tensor, rank: Rank, count: int) -> Proposal:
        """Return candidates for the block's positions after the anchor [1]."""
        rows = torch.cat([self._target.embed(anchor[None]), self._masks], 1)
        hidden = self._draft.block(rows, self._slots, self._buffers)[0, 1:]
        logits = self._draft.shape_logits(self._target.draft_logits(hidden))
        positions = self._buffers.lengths[0] + torch.arange(1, len(hidden) + 1, device=self._draft.device)
        return Proposal.of(*rank(logits, positions, anchor, count))

    def save(self) -> SavedRings:
        self.flush()
        return save_rings(self._buffers, 0)

    def restore(self, saved: SavedRings) -> None:
        restore_rings(self._buffers, 0, saved)
        self._waiting = []


class NoDraftModel:
    """Prompt lookup alone: no draft, nothing to keep."""

    depth = 15
    taps: tuple[int, ...] = ()
    context_length = 0

    def begin(self) -> None: ...

    def append(self, features: Tensor, *, skipped: int = 0) -> None: ...

    def commit(self, features: Tensor, count: Tensor) -> None: ...

    def rollback(self, count: int) -> None: ...

    def flush(self) -> None: ...

    def candidates(self, anchor: Tensor, rank: Rank, count: int) -> Proposal:
        raise AssertionError("there is no draft to call")

    def save(self) -> SavedRings | None:
        return None

    def restore(self, saved: SavedRings) -> None: ...


@dataclass(frozen=True, slots=True)
class DraftReport:
    """A draft call on the host, to learn from: the leading candidates and the tree they gave."""

    proposal: Proposal  # uncorrected
    tokens: list[int]  # of the tree's rows, without padding
    parents: list[int]
    probabilities: list[float]  # of the path to each row

    def only(self, rows: Sequence[int]) -> "DraftReport":
        """Return the report of a part of the tree that holds the parent of every row."""
        index = {row: new for new, row in enumerate(rows)}
        return DraftReport(
            self.proposal,
            [self.tokens[row] for row in rows],
            [index.get(self.parents[row], -1) for row in rows],
            [self.probabilities[row] for row in rows],
        )


class DraftCall:
    """From an anchor to a tree over static buffers: draft, ranking, calibration and tree in one function."""

    def __init__(
        self,
        draft: DraftModel,
        calibration: Calibration,
        rank: Rank,
        *,
        nodes: int,
        candidates: int,
        spine: float,
        device: torch.device | str,
    ):
        self._draft, self._calibration, self._rank = draft, calibration, rank
        self._nodes, self._candidates, self._spine = nodes, candidates, spine
        self._depth = depth = draft.depth
        self._leading = min(LEADING, candidates)
        on_device = torch.device(device).type == "cuda"
        self._device_only = on_device
        size = 3 * MAX_ROWS + 2 * depth * self._leading
        self._inputs = torch.zeros(1 + depth, dtype=torch.int64, device=device)  # anchor, then the lookup
        self._score = torch.zeros(1, device=device)  # of each token of the lookup
        self._packed = torch.zeros(4, MAX_ROWS, dtype=torch.int64, device=device)
        self._staged = torch.zeros(1 + depth, dtype=torch.int64, pin_memory=on_device)
        self._staged_score = torch.zeros(1, pin_memory=on_device)
        self._report = torch.zeros(size, dtype=torch.int64, pin_memory=on_device)
        self.function = CapturedFunction(self._run)

    def __call__(self, anchor: int, chain: list[int], score: float, *, nodes: int | None = None) -> None:
        """Launch the call; `chain`: what prompt lookup found; `nodes`: other than usual, never captured."""
        self._draft.flush()
        self._calibration.correction()
        chain = chain[: self._depth]
        self._staged.copy_(torch.tensor([anchor, *chain] + [-1] * (self._depth - len(chain))))
        self._staged_score.fill_(score)
        self._inputs.copy_(self._staged, non_blocking=True)
        self._score.copy_(self._staged_score, non_blocking=True)
        report = self.function() if nodes is None else self._run(nodes)
        self._report.copy_(report, non_blocking=True)

    def tree(self, rows: int) -> Tree:
        """Return the best `rows` rows of the last call's tree.

        It shares the call's buffer, which the next call overwrites. On a GPU its last rows may be padding:
        how many candidates there were is not read back.
        """
        if not self._device_only:
            rows = min(rows, self._rows_found(self._report))
        return Tree(self._packed, rows)

    def report(self) -> Tensor:
        """Return the last call's report for `read`; the device must have finished it."""
        return self._report.clone()

    def finished_report(self) -> DraftReport:
        """Return the last call's report; synchronises with the device."""
        if self._device_only:
            torch.cuda.current_stream().synchronize()
        return self.read(self._report)

    def read(self, report: Tensor) -> DraftReport:
        rows, leading = self._rows_found(report), report[3 * MAX_ROWS :]
        ids, scores = leading.view(2, self._depth, self._leading)
        tokens, parents, _ = report[: 3 * MAX_ROWS].view(3, MAX_ROWS)[:, :rows]
        return DraftReport(
            Proposal.of(ids.clone(), _floats(scores)),
            tokens.tolist(),
            parents.tolist(),
            self._weights(report)[:rows].exp().tolist(),
        )

    def _rows_found(self, report: Tensor) -> int:
        return int((self._weights(report) > -torch.inf).sum())

    @staticmethod
    def _weights(report: Tensor) -> Tensor:
        return _floats(report[2 * MAX_ROWS : 3 * MAX_ROWS])

    def _run(self, nodes: int | None = None) -> Tensor:
        anchor, chain = self._inputs[:1], self._inputs[None, 1:]
        proposal = self._draft.candidates(anchor, self._rank, self._candidates)
        ids, scores = proposal.ids[:, : self._leading], proposal.scores[:, : self._leading]
        with_lookup = proposal.with_chains(chain, self._score.expand(1, self._depth))
        tree, weights = build_tree(
            anchor,
            with_lookup,
            nodes=nodes or self._nodes,
            spine=self._spine,
            correction=self._calibration.correction(),
        )
        self._packed.copy_(tree.packed)
        return torch.cat([tree.packed[:2].flatten(), _bits(weights), ids.flatten(), _bits(scores).flatten()])


def _bits(values: Tensor) -> Tensor:
    """Return float32 values as int64 words, so that one copy brings integers and floats to the host."""
    return values.contiguous().view(torch.int32).long()


def _floats(words: Tensor) -> Tensor:
    return words.int().view(torch.float32)
