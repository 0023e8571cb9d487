"""From the draft's block to a tree, over tensors that stay where they are; asks the device nothing."""

import torch
from torch import Tensor

from treeflash.kernels.tree import ROWS, build_tree
from treeflash.spec.calibration import LEADING, Calibration
from treeflash.spec.draft import BlockDraft, Rank
from treeflash.spec.proposal import Proposal, ScoredTree
from treeflash.state.graphs import Part


class DraftPart:
    """Anchor and copy in; out come the tree, and a report of it for the host."""

    def __init__(
        self,
        draft: BlockDraft,
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
        self._depth = depth = draft.spec.block_size - 1
        self._leading = min(LEADING, candidates)
        on_device = torch.device(device).type == "cuda"
        size = 3 * ROWS + 2 * depth * self._leading
        self._inputs = torch.zeros(1 + depth, dtype=torch.int64, device=device)  # the anchor, then the copy
        self._score = torch.zeros(1, device=device)  # of each token of the copy
        self._begin = torch.zeros(1, dtype=torch.int64, device=device)
        self.tree = torch.zeros(4, ROWS, dtype=torch.int64, device=device)
        self._staged = torch.zeros(1 + depth, dtype=torch.int64, pin_memory=on_device)
        self._staged_score = torch.zeros(1, pin_memory=on_device)
        self._report = torch.zeros(size, dtype=torch.int64, pin_memory=on_device)
        self.part = Part(self._work)

    def __call__(self, anchor: int, copied: list[int], score: float, *, nodes: int | None = None) -> None:
        """Starts it; the tree is `tree`. `nodes`: another number than usual, which no graph was made for."""
        self._draft.flush()
        self._calibration.correction()
        chain = copied[: self._depth]
        self._staged.copy_(torch.tensor([anchor, *chain] + [-1] * (self._depth - len(chain))))
        self._staged_score.fill_(score)
        self._inputs.copy_(self._staged, non_blocking=True)
        self._score.copy_(self._staged_score, non_blocking=True)
        report = self.part() if nodes is None else self._work(nodes)
        self._report.copy_(report, non_blocking=True)

    def report(self) -> Tensor:
        """Of the last call, on the host; the device must have come so far."""
        return self._report.clone()

    def read(self, report: Tensor) -> tuple[Proposal, ScoredTree]:
        """What the draft claimed and the tree it made."""
        tokens, parents, weights, rest = report.split([ROWS, ROWS, ROWS, 2 * self._depth * self._leading])
        ids, scores = rest.view(2, self._depth, self._leading)
        scored = ScoredTree(tokens, parents, weights.int().view(torch.float32))
        return Proposal.rows(ids, scores.int().view(torch.float32)), scored.trimmed()

    def _work(self, nodes: int | None = None) -> Tensor:
        anchor, chain = self._inputs[:1], self._inputs[None, 1:]
        claimed = self._draft.candidates(anchor, self._rank, self._candidates)
        built = build_tree(
            anchor,
            self._begin,
            claimed.ids,
            claimed.scores,
            chain,
            self._score.expand(1, self._depth).contiguous(),
            nodes=nodes or self._nodes,
            rows=ROWS,
            spine=self._spine,
            correction=self._calibration.correction(),
        )
        self.tree.copy_(torch.stack([built.tokens, built.parents, built.ancestors, built.positions]))
        return torch.cat(
            [
                built.tokens,
                built.parents,
                built.weights.view(torch.int32).long(),
                claimed.ids[:, : self._leading].flatten(),
                claimed.scores[:, : self._leading].contiguous().view(torch.int32).flatten().long(),
            ]
        )
