"""What the scores of drafts are worth: how often they hold, and how two drafts' scores are mixed."""

import math

import torch
from torch import Tensor

from bough.kernels.runtime.device import on_device
from bough.kernels.tree import Correction
from bough.spec.tree import Proposal

SCORE_EDGES = (0.01, 0.03, 0.08, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97, 1.01)  # upper ends of the probability bins
DEPTH_EDGES = (1, 2, 3, 5, 8, 64)  # upper ends of the depth bins
CALIBRATION_PRIOR = 12.0  # candidates that a fresh bin has seen, all as likely as claimed
CALIBRATION_DECAY = 0.998  # of a bin's counts per candidate: an average over about 500
LEADING = 4  # candidates of a depth that are learnt from
SHARE_PRIOR = 0.3  # of another draft beside the first
SHARE_RATE = 0.02  # of an exponential moving average, per token
UNLISTED = 0.005  # least probability of a token, as of one that is not among the leading candidates


class Calibration:
    """How often a draft's scores hold, learnt from accepted paths; corrects them before a tree is built.

    A score is the log probability that the draft gives a token after an accepted prefix. Scores are binned by
    depth and probability; each bin counts how many candidates were right against how many should have been.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self._claimed = [[0.0] * len(SCORE_EDGES) for _ in DEPTH_EDGES]
        self._right = [[0.0] * len(SCORE_EDGES) for _ in DEPTH_EDGES]
        self._stale = False
        bins = [_depth_bin(depth) for depth in range(1, DEPTH_EDGES[-1] + 1)]
        self._correction = Correction(
            edges=torch.tensor(SCORE_EDGES[:-1], device=device).log(),
            table=torch.zeros(len(DEPTH_EDGES), len(SCORE_EDGES), device=device),
            depth_bins=torch.tensor(bins, device=device),
        )

    def correction(self) -> Correction:
        """Return the current correction, always in the same tensors."""
        if self._stale:
            table = [[self._gain(d, s) for s in range(len(SCORE_EDGES))] for d in range(len(DEPTH_EDGES))]
            self._correction.table.copy_(on_device(table, self._correction.table.device))
            self._stale = False
        return self._correction

    def observe(self, proposal: Proposal, followed: list[int]) -> None:
        """Learn from a proposal, before correction, and the tokens that followed."""
        ids = proposal.ids[:, :LEADING].tolist()
        for depth, token in enumerate(followed[: proposal.depth]):
            row = _depth_bin(depth + 1)
            for candidate, score in zip(ids[depth], _scores_after(proposal, followed[:depth]), strict=False):
                column = _score_bin(score)
                for counts, amount in (
                    (self._claimed, math.exp(score)),
                    (self._right, float(candidate == token)),
                ):
                    counts[row][column] = CALIBRATION_DECAY * counts[row][column] + amount
        self._stale = True

    def _gain(self, row: int, column: int) -> float:
        """Return the log of right over claimed, both with the prior's candidates."""
        middle = (SCORE_EDGES[column] + (SCORE_EDGES[column - 1] if column else 0.0)) / 2
        claimed = self._claimed[row][column] + CALIBRATION_PRIOR * middle
        right = self._right[row][column] + CALIBRATION_PRIOR * middle
        return math.log(right / claimed)

    def calibrated(self, score: float, depth: int) -> float:
        """Return the probability that a score stands for, at a depth from 0 on."""
        return min(1.0, math.exp(score + self._gain(_depth_bin(depth + 1), _score_bin(score))))


class Share:
    """How much another draft's scores count where the first draft has scores as well: a mixture, by depth.

    Its weights are those that make the text likeliest (expectation maximisation), learnt from accepted paths.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self._shares = [SHARE_PRIOR] * len(DEPTH_EDGES)
        self._stale = False
        self._bins = torch.tensor([_depth_bin(depth) for depth in range(1, DEPTH_EDGES[-1] + 1)])
        self._table = torch.full(self._bins.shape, SHARE_PRIOR, device=device)

    def table(self) -> Tensor:
        """Return the share at each depth, always in the same tensor."""
        if self._stale:
            shares = [self._shares[index] for index in self._bins.tolist()]
            self._table.copy_(on_device(shares, self._table.device))
            self._stale = False
        return self._table

    def mixed(self, other: Tensor, first: Tensor) -> Tensor:
        """Return the scores [..., K] of chains, given both drafts' scores of them."""
        share = self.table()[: other.shape[-1]]
        return torch.logaddexp(other + share.log(), first + (1 - share).log()).clamp(max=0)

    def observe(
        self, other: list[tuple[int, float]], first: list[tuple[int, float]], depth: int, token: int
    ) -> None:
        """Learn from a token, and the candidates and probabilities of both drafts."""
        row = _depth_bin(depth + 1)
        share = self._shares[row]
        likely = share * max(dict(other).get(token, 0.0), UNLISTED)
        unlikely = (1 - share) * max(dict(first).get(token, 0.0), UNLISTED)
        self._shares[row] += SHARE_RATE * (likely / (likely + unlikely) - share)
        self._stale = True


def candidates_after(
    proposal: Proposal, path: list[int], calibration: Calibration
) -> list[tuple[int, float]]:
    """Return the leading candidates after a path and their probabilities; none if it was not scored."""
    depth, scores = len(path), _scores_after(proposal, path)
    ids = proposal.ids[depth, :LEADING].tolist()
    return [
        (id, calibration.calibrated(each, depth)) for id, each in zip(ids, scores, strict=False) if id >= 0
    ]


def _scores_after(proposal: Proposal, path: list[int]) -> list[float]:
    """Return the scores of the leading candidates after a path; none if they were not scored after it."""
    depth = len(path)
    if proposal.given is not None and proposal.given[depth, :depth].tolist() != path:
        return []
    if proposal.edges is None:
        return proposal.scores[depth, :LEADING].tolist()
    before = proposal.ids[depth - 1, :LEADING].tolist() if depth else []
    if depth and path[-1] not in before:
        return []
    return proposal.edges[depth, before.index(path[-1]) if depth else 0, :LEADING].tolist()


def _depth_bin(depth: int) -> int:
    return next(i for i, end in enumerate(DEPTH_EDGES) if depth <= end)


def _score_bin(score: float) -> int:
    return next(i for i, end in enumerate(SCORE_EDGES) if math.exp(score) < end or i == len(SCORE_EDGES) - 1)
