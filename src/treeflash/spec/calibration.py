"""How often a draft's claims come true, learnt from the walks; corrects the scores that trees are built from.

A claim is the log probability that a proposer gives a token behind a prefix that has come true. Claims are
sorted into bins by depth and by size; each bin keeps how many came true of how many, older ones fading.
"""

import math

import torch
from torch import Tensor

from treeflash.kernels.tree import Correction
from treeflash.spec.proposal import Proposal

# Upper ends of the bins of claimed probability, and of depth.
_CLAIMS = (0.01, 0.03, 0.08, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97, 1.01)
_DEPTHS = (1, 2, 3, 5, 8, 64)
_PRIOR = 12.0  # claims that a fresh bin is taken to have seen, all of them honest
_FADE = 0.998  # of a bin's counts at each of its claims: about 500 are remembered
LEADING = 4  # candidates of a depth that are learnt from


class Calibration:
    def __init__(self, device: torch.device | str = "cpu"):
        self._claimed = [[0.0] * len(_CLAIMS) for _ in _DEPTHS]
        self._came_true = [[0.0] * len(_CLAIMS) for _ in _DEPTHS]
        self._stale = False
        bins = [_depth_bin(depth) for depth in range(1, _DEPTHS[-1] + 1)]
        self._correction = Correction(
            edges=torch.tensor(_CLAIMS[:-1], device=device).log(),
            table=torch.zeros(len(_DEPTHS), len(_CLAIMS), device=device),
            depth_bins=torch.tensor(bins, device=device),
        )

    def correction(self) -> Correction:
        """Up to date, always the same tensors."""
        if self._stale:
            table = [[self._gain(d, c) for c in range(len(_CLAIMS))] for d in range(len(_DEPTHS))]
            self._correction.table.copy_(torch.tensor(table))
            self._stale = False
        return self._correction

    def correct(self, scores: Tensor) -> Tensor:
        """scores [K, k], one row a depth, as what they were worth in the past; at most 0."""
        return self.correction().applied(scores)

    def learn(self, proposal: Proposal, followed: list[int]) -> None:
        """What was proposed, before correction, and the tokens that then came."""
        ids, scores = proposal.ids[:, :LEADING].tolist(), proposal.scores[:, :LEADING].tolist()
        for depth, token in enumerate(followed[: proposal.depth]):
            row = _depth_bin(depth + 1)
            for candidate, claim in zip(ids[depth], scores[depth], strict=True):
                column = _claim_bin(claim)
                for counts, amount in (
                    (self._claimed, math.exp(claim)),
                    (self._came_true, float(candidate == token)),
                ):
                    counts[row][column] = _FADE * counts[row][column] + amount
        self._stale = True

    def _gain(self, row: int, column: int) -> float:
        """Log of what came true over what was claimed, both with the prior's honest claims."""
        middle = (_CLAIMS[column] + (_CLAIMS[column - 1] if column else 0.0)) / 2
        claimed = self._claimed[row][column] + _PRIOR * middle
        true = self._came_true[row][column] + _PRIOR * middle
        return math.log(true / claimed)


def _depth_bin(depth: int) -> int:
    return next(i for i, end in enumerate(_DEPTHS) if depth <= end)


def _claim_bin(claim: float) -> int:
    return next(i for i, end in enumerate(_CLAIMS) if math.exp(claim) < end or i == len(_CLAIMS) - 1)
