"""How many rows the next step verifies, and what a draft's scores are worth: learnt from outcomes and costs.

Five statistics, each a class of its own: what steps cost (`StepCosts`), how many tokens of a draft call are
accepted (`AcceptanceEstimator`), how often a draft's scores hold (`Calibration`), how often prompt lookup is
right (`LookupAccuracy`), and where a target has several drafts which of them are worth their calls
(`Mixes`). `RowPolicy` decides from them before the step starts.

Trees are in order of worth, so one accepted path shows what any smaller tree would have accepted. For every
number of rows the policy compares plans of some plain steps followed by a draft call with its tree, and
takes the one with the most tokens a second. If none beats plain decoding, the draft is called so seldom
that the loss stays a small share of the time. The cost of a draft call is spent whatever follows, so its
tree is verified if that alone pays. Prompt lookup costs nothing to propose: it is used whenever it promises
to pay.
"""

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bough.kernels.tree import Correction
from bough.spec.tree import Proposal

# -- Row policy
EAGER_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # rows to choose from where steps are not padded
# There: plain steps from one decision about the draft to the next after the last of WAITS, and steps from one
# plain one to the next. To decide takes 0.15 ms on a CPU whose caches hold weights, a sixth of a plain step.
RESTING_INTERVAL, PLAIN_INTERVAL = 16, 32
# Rows are dear where FEW_ROWS cost DEAR plain steps: trees are then hardly larger, and a draft that looks
# no further costs half (embedded pair, 8 rows: 2.8 tokens a step instead of 3.0 on HumanEval, 4.2 on GSM8K).
FEW_ROWS, DEAR = 8, 2.0
PROBE_SHARE = 0.005  # of the time that calls of a draft which does not pay may lose
# Of one text's time so far, the same, and of all time while few outcomes are known: a short answer has no
# time to win back what a call has cost.
TEXT_SHARE = 0.015
PROBE_INTERVAL = 6  # steps between two such calls, at least
MARGIN = 1.05  # factor by which a tree must promise to beat plain decoding
# The same for waiting some steps against calling the draft at once, which also yields an outcome to learn
# from.
PATIENCE = 1.2

# -- Mixes
MIX_TRIES = 6  # draft calls in which all drafts are compared before one mix is preferred
MIX_INTERVAL = 16  # steps between two comparisons, at least
MIX_DECAY = 0.985  # of the averages that are compared, per comparison
MIX_MARGIN = 1.02  # factor by which another mix must promise to be faster than the one in use

# -- Step costs
COST_RATE = 0.1  # of an exponential moving average towards slower steps; a faster one counts at once
SLOW_AGAIN = 1.2  # times the fastest ever measured: a try that was slow
COST_RISE = 1.02  # most that one step may raise a cost: what else the machine did is not the step's cost
UNMEASURED = 1.05  # of the next smaller size: a size that was never measured is tried
# A cost that is not measured again drifts to the fastest ever measured, with this half-life in steps, so
# that what a slow phase of the machine left is tried again. Each try of a tree that is slow again doubles
# the half-life of all trees: a size that has really become slower is tried so seldom that it loses about 1%
# of the time.
COST_HALF_LIFE, LONGEST_HALF_LIFE = 64, 1024
UNUSED = 8  # steps after which a measurement is a new try and counts fully
CALMED = (
    0.8  # of its last estimate: a plain step this fast says that the machine has calmed, for trees as well
)

# -- Acceptance estimator
# Plain steps since the last tree from which a factor of its own is learnt; after the last it is 1. Embedded
# pair, 16 rows: 1.7 tokens are accepted right after a tree, 3.3 after 4 plain steps, 4.5 after 20.
WAITS = (0, 4, 16)
RECENT_DECAY, RECENT_FLOOR = 0.93, 0.4  # of the recent average, per step; least weight left to the past
LONG_DECAY, LONG_FLOOR = 15 / 16, 0.8  # the same of the long-run average
REVERT = 0.97  # how much of the difference to the long-run average is left per step without an outcome
NEW_TEXT_STEPS = 32  # another text is as far from the last one as this many steps
WAIT_DECAY = 0.98  # of the counts that the factors of WAITS come from, per outcome
WAIT_PRIOR = 20.0  # tokens that a fresh factor has seen, all accepted
# Tokens accepted for each doubling of the rows, before any outcome: of weak drafts (docs/training.md).
PRIOR_GAIN = 0.5
KEPT_PRIOR = 4.0  # tokens that trees of a new text have promised; as many were accepted as is usual

# -- Calibration
SCORE_EDGES = (0.01, 0.03, 0.08, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97, 1.01)  # upper ends of the probability bins
DEPTH_EDGES = (1, 2, 3, 5, 8, 64)  # upper ends of the depth bins
CALIBRATION_PRIOR = 12.0  # candidates that a fresh bin has seen, all as likely as claimed
CALIBRATION_DECAY = 0.998  # of a bin's counts per candidate: an average over about 500
LEADING = 4  # candidates of a depth that are learnt from

# -- Shares
SHARE_PRIOR = 0.3  # of another draft beside the first
SHARE_RATE = 0.02  # of an exponential moving average, per token
UNLISTED = 0.005  # least probability of a token, as of one that is not among the leading candidates

# -- Prompt lookup
LONGEST_MATCH = 32  # tokens of agreement that are counted
# Length of the match up to which a class reaches, and how often a copied token is right before any outcome.
MATCH_CLASSES = ((3, 0.45), (5, 0.6), (8, 0.75), (16, 0.88), (LONGEST_MATCH, 0.94))
LOOKUP_PRIOR = 12.0
LEAST_ACCURACY = 0.05
LOOKUP_DECAY = 0.98


@dataclass(slots=True)
class StepCosts:
    """Measured seconds, kept from run to run: a step by its rows, and a draft call by its mix."""

    step: dict[int, float] = field(default_factory=dict)
    draft: dict[int, float] = field(default_factory=dict)
    gap: dict[str, float] = field(default_factory=dict)  # between two steps, by the kind of the second
    # Of a draft call, for each position whose features have waited for it; 0 where none wait.
    backlog: float = 0.0
    checked: bool = field(default=True, compare=False)  # the draft's settings have been tried on a text
    # By rows; a draft call's by -mix.
    _ages: dict[int, "_Age"] = field(default_factory=dict, repr=False, compare=False)
    _steps: int = 0

    def observe_step(self, rows: int, seconds: float) -> None:
        self._steps += 1
        old = self.step.get(rows)
        self.step[rows] = self._observed(rows, old, seconds)
        if rows == 1 and old is not None and self.step[1] < CALMED * old:
            self._scale_trees(self.step[1] / old)

    def observe_draft(self, seconds: float, mix: int = 0) -> None:
        self.draft[mix] = self._observed(-mix, self.draft.get(mix) or None, seconds)

    def observe_gap(self, kind: str, seconds: float) -> None:
        """Learn from the time between two steps; `kind` of the second one."""
        # What is longer than a plain step was spent on something else.
        seconds = min(seconds, self.of(1))
        old = self.gap.get(kind, seconds)
        self.gap[kind] = old + COST_RATE * (seconds - old)

    def observe_backlog(self, seconds: float, positions: int) -> None:
        if positions:
            self.backlog = self.backlog or seconds / positions
            self.backlog += COST_RATE * (seconds / positions - self.backlog)

    def gap_before(self, kind: str) -> float:
        """Return the time between two steps before a step of a kind; where unknown, that of plain steps."""
        return self.gap.get(kind, self.gap.get("plain", 0.0))

    def fill(self, step: Mapping[int, float], draft: float) -> None:
        """Take over measured seconds where nothing is known: the first answer need not find them out."""
        self.step = {**step, **self.step}
        self.draft = {0: draft, **{mix: seconds for mix, seconds in self.draft.items() if seconds}}

    def unmeasured_for(self, rows: int) -> int:
        """Return how many steps ago a size was measured."""
        return self._steps - (self._ages[rows].step if rows in self._ages else 0)

    def draft_call(self, mix: int = 0) -> float:
        """Return the cost of a draft call."""
        return self._aged(-mix, self.draft.get(mix, 0.0))

    def of(self, rows: int) -> float:
        """Return the cost of a step, interpolated between measured sizes."""
        if rows in self.step:
            return self._aged(rows, self.step[rows])
        return self.of_sizes([rows])[0]

    def of_sizes(self, sizes: Sequence[int]) -> list[float]:
        """Return the costs of several sizes."""
        known = sorted(self.step)
        costs = [self._aged(rows, self.step[rows]) for rows in known]
        return [_interpolated(known, costs, rows) for rows in sizes]

    def _observed(self, key: int, old: float | None, seconds: float) -> float:
        """Return the new estimate after a measurement."""
        age = self._ages.setdefault(key, _Age(seconds, self._steps))
        unused, slow = self._steps - age.step > UNUSED, seconds > SLOW_AGAIN * age.fastest
        if not slow:
            age.half_life = COST_HALF_LIFE
        elif unused and key > 1:
            age.half_life = min(2 * age.half_life, LONGEST_HALF_LIFE)
            for other in self._trees():
                self._ages[other].step, self._ages[other].half_life = self._steps, age.half_life
        age.fastest, age.step = min(age.fastest, seconds), self._steps
        if old is None or unused:
            return seconds
        return min(seconds, old + COST_RATE * (seconds - old), COST_RISE * old)

    def _scale_trees(self, factor: float) -> None:
        """Lower the costs of trees, not measured meanwhile, as much as that of plain decoding fell."""
        for rows in self._trees():
            age = self._ages[rows]
            self.step[rows] = max(factor * self.step[rows], age.fastest)
            age.half_life = COST_HALF_LIFE
        for mix, seconds in self.draft.items():
            if -mix in self._ages:
                self.draft[mix] = max(factor * seconds, self._ages[-mix].fastest)

    def _trees(self) -> list[int]:
        return [rows for rows in self.step if rows > 1 and rows in self._ages]

    def _aged(self, key: int, seconds: float) -> float:
        age = self._ages.get(key)
        if age is None:
            return seconds
        weight = 0.5 ** ((self._steps - age.step) / age.half_life)
        return age.fastest + weight * (seconds - age.fastest)


def _interpolated(known: list[int], costs: list[float], rows: int) -> float:
    """Return the cost of a size from those that were measured."""
    if not known:
        return 1.0
    index = bisect.bisect(known, rows)
    if index and known[index - 1] == rows:
        return costs[index - 1]
    if 0 < index < len(known):
        low, high = known[index - 1], known[index]
        return costs[index - 1] + (rows - low) / (high - low) * (costs[index] - costs[index - 1])
    return costs[index - 1] * UNMEASURED if index else costs[0]


@dataclass(slots=True)
class _Age:
    """Of one measured cost."""

    fastest: float  # seconds, ever measured
    step: int  # number of the step at which it was last measured
    half_life: float = COST_HALF_LIFE


@dataclass(slots=True)
class UsualAcceptance:
    """What texts have in common: the long-run acceptance, by size and by plain steps before a draft call."""

    # Tokens by size, of a draft call after a long wait, and as the scores promise; [] before any outcome.
    long_run: list[float] = field(default_factory=list)
    promised: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=lambda: [0.0] * (len(WAITS) - 1))
    expected: list[float] = field(default_factory=lambda: [0.0] * (len(WAITS) - 1))
    outcomes: int = 0
    unasked: int = 0  # steps since the last draft call, of all texts
    kept: "KeptPromises" = field(default_factory=lambda: KeptPromises(None))
    steps: int = 0
    draft_calls: int = 0
    accepted_tokens: int = 0


class KeptPromises:
    """How many tokens of a text's trees are accepted for each that their weights promise."""

    def __init__(self, usual: "KeptPromises | None"):
        """`usual`: what a text keeps of which nothing is known yet."""
        self._usual = usual
        self._accepted = self._promised = 0.0

    @property
    def factor(self) -> float:
        prior = self._usual.factor if self._usual is not None else 1.0
        return (self._accepted + KEPT_PRIOR * prior) / (self._promised + KEPT_PRIOR)

    def observe(self, promised: float, accepted: float) -> None:
        decay = RECENT_DECAY if self._usual is not None else CALIBRATION_DECAY
        self._accepted = decay * self._accepted + accepted
        self._promised = decay * self._promised + promised


class AcceptanceEstimator:
    """How many tokens of a draft call will be accepted, by rows, learnt from accepted paths of one text.

    Three things are kept apart: a recent average; a long-run average, to which the recent one reverts while
    the draft is not called; and a factor by plain steps since the last tree, because where a tree ended the
    text is hard to predict. The last two are those of all texts.
    """

    def __init__(self, sizes: Sequence[int], usual: UsualAcceptance | None = None):
        """`sizes`: the numbers of rows that are asked for."""
        self._sizes = list(sizes)
        self.usual = usual or UsualAcceptance()
        self.kept = KeptPromises(self.usual.kept)
        self._recent: list[float] = []  # [] before any outcome
        self._age = 0  # steps since the last outcome

    def fork(self) -> "AcceptanceEstimator":
        """Return the estimator of another text, which begins where this one is."""
        other = AcceptanceEstimator(self._sizes, self.usual)
        other._recent, other._age = self._recent[:], self._age
        return other

    @property
    def started(self) -> bool:
        return self.usual.outcomes > 0

    def step(self, *, new_text: bool, count: int = 1) -> None:
        self._age += count + new_text * NEW_TEXT_STEPS

    def expected(self, waited: int) -> list[float]:
        """Return accepted tokens by size, of a draft call `waited` plain steps after the last tree."""
        factor, weight = self._factor(_wait_class(waited)), REVERT**self._age
        long_run = self.usual.long_run or [PRIOR_GAIN * math.log2(rows) for rows in self._sizes]
        return [
            factor * (usual + weight * (recent - usual))
            for recent, usual in zip(self._recent or long_run, long_run, strict=True)
        ]

    def observe(self, weights: list[float], path: list[int], *, verified: int, waited: int) -> None:
        """Learn from a draft call: probabilities of its rows' paths, the accepted rows, the rows verified."""
        usual = self.usual
        promised = [sum(weights[1:rows]) for rows in self._sizes]
        accepted = [float(sum(0 < row < rows for row in path)) for rows in self._sizes]
        if not self.started:
            self._recent, usual.long_run, usual.promised = promised[:], promised[:], promised[:]
        usual.outcomes += 1
        for kept in (self.kept, usual.kept):
            kept.observe(sum(weights[1:verified]), len(path) - 1)
        self._recent = self.expected(WAITS[-1])
        # A tree of fewer rows is all that a larger size would have had of it.
        whole = len(weights)
        wait, last = _wait_class(waited), sum(min(rows, whole) <= verified for rows in self._sizes) - 1
        if last == 0 and verified > 1:
            # Fewer rows than any size but the root: scaled by what the scores promise for the next size.
            ratio = promised[1] / max(sum(weights[1:verified]), 1e-6)
            last, accepted[1] = 1, (len(path) - 1) * max(ratio, 1.0)
        factor = self._factor(wait)
        self._observe_wait(wait, accepted[last], self._recent[last])
        self._observe_sizes(promised, accepted, last, factor)
        self._age = 0

    def _observe_wait(self, wait: int, accepted: float, expected: float) -> None:
        # All of them decay, so that one which kept the draft from being called is tested again.
        usual = self.usual
        usual.accepted = [WAIT_DECAY * each for each in usual.accepted]
        usual.expected = [WAIT_DECAY * each for each in usual.expected]
        if wait < len(usual.accepted):
            usual.accepted[wait] += accepted
            usual.expected[wait] += expected

    def _observe_sizes(self, promised: list[float], accepted: list[float], last: int, factor: float) -> None:
        # The first outcomes count equally, beside one for what the scores promise.
        usual = self.usual
        equal = usual.outcomes / (usual.outcomes + 1)
        decay = min(max(RECENT_DECAY ** max(1, self._age), RECENT_FLOOR), equal)
        long_decay = min(max(LONG_DECAY ** max(1, self._age), LONG_FLOOR), equal)
        for index, promise in enumerate(promised):
            usual.promised[index] += (1 - decay) * (promise - usual.promised[index])
            if index <= last:
                new = accepted[index] / factor
                self._recent[index] += (1 - decay) * (new - self._recent[index])
            else:
                # A larger tree than was verified: scaled by what the scores promise for it.
                ratio = usual.promised[index] / max(usual.promised[last], 1e-6)
                new = self._recent[index] = self._recent[last] * max(ratio, 1.0)
            usual.long_run[index] += (1 - long_decay) * (new - usual.long_run[index])

    def _factor(self, wait: int) -> float:
        usual = self.usual
        if wait == len(usual.accepted):
            return 1.0
        return (usual.accepted[wait] + WAIT_PRIOR) / (usual.expected[wait] + WAIT_PRIOR)


def _wait_class(waited: int) -> int:
    return sum(waited >= least for least in WAITS) - 1


class Mixes:
    """Which drafts a call asks: a mix is one draft alone, or all of them, the last.

    Now and then all are asked, and the text shows what the tree of each mix would have had accepted. So mixes
    are compared at the same positions, whatever the texts are like.
    """

    def __init__(self, count: int, sizes: Sequence[int]):
        self.count = count
        self._sizes = sizes
        self._accepted = [[0.0] * len(sizes) for _ in range(count)]
        self._weight = 0.0  # of the comparisons in them
        self._comparisons, self._begun = 0, 0
        self._since = 0  # steps since the last comparison
        self._best = 0

    @property
    def last(self) -> int:
        return max(0, self.count - 1)

    def step(self, count: int = 1) -> None:
        self._since += count

    def observe(self, paths: Sequence[Sequence[int]]) -> None:
        """Learn from a comparison: the rows of each mix's tree that the text followed."""
        self._comparisons += 1
        self._weight = MIX_DECAY * self._weight + 1
        for mine, path in zip(self._accepted, paths, strict=True):
            for index, rows in enumerate(self._sizes):
                mine[index] = MIX_DECAY * mine[index] + sum(0 < row < rows for row in path)

    def best(self, step_s: Callable[[int], float], draft_s: Callable[[int], float]) -> int:
        """Return the mix to use, by the seconds of a step of some rows and of a call of each mix."""
        if self.count > 1 and self._comparisons >= MIX_TRIES:
            steps = [step_s(rows) for rows in self._sizes]
            rates = [self._rate(mix, steps, draft_s(mix)) for mix in range(self.count)]
            fastest = max(range(self.count), key=rates.__getitem__)
            if rates[fastest] > MIX_MARGIN * rates[self._best]:
                self._best = fastest
        return self._best

    def compares(self, mix: int, plain_s: float, draft_s: Callable[[int], float]) -> bool:
        """Return whether a call of a mix is to be one of all drafts; if so it is begun."""
        if self.count <= 1:
            return False
        more = (draft_s(self.last) - draft_s(mix)) / plain_s
        if self._begun >= MIX_TRIES and self._since < max(more / PROBE_SHARE, MIX_INTERVAL):
            return False
        self._begun, self._since = self._begun + 1, 0
        return True

    def _rate(self, mix: int, steps: Sequence[float], draft_s: float) -> float:
        """Return tokens a second with the best size."""
        return max(
            (1 + accepted / self._weight) / (seconds + draft_s)
            for accepted, seconds in zip(self._accepted[mix][1:], steps[1:], strict=True)
        )


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
            self._correction.table.copy_(torch.tensor(table))
            self._stale = False
        return self._correction

    def correct(self, scores: Tensor) -> Tensor:
        """Return calibrated scores [K, k], one row a depth, at most 0."""
        return self.correction().applied(scores)

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
            self._table.copy_(torch.tensor(self._shares)[self._bins])
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


class LookupAccuracy:
    """How often a token copied by prompt lookup is right, by the length of the match."""

    def __init__(self, usual: "LookupAccuracy | None" = None):
        """`usual`: that of all texts, from which a new text begins, and which learns from it."""
        self._usual = usual
        classes = range(len(MATCH_CLASSES))
        priors = [usual._rate(index) if usual else MATCH_CLASSES[index][1] for index in classes]
        self._right = [prior * LOOKUP_PRIOR for prior in priors]
        self._seen = [LOOKUP_PRIOR] * len(MATCH_CLASSES)

    def log_probability(self, match: int) -> float:
        return math.log(self._rate(_match_class(match)))

    def observe(self, match: int, right: bool) -> None:
        index = _match_class(match)
        decay = LOOKUP_DECAY if self._usual is not None else CALIBRATION_DECAY
        self._seen[index] = decay * self._seen[index] + 1
        self._right[index] = decay * self._right[index] + 0.99 * right
        if self._usual is not None:
            self._usual.observe(match, right)

    def _rate(self, index: int) -> float:
        # A class that was never right is still tried where rows cost nothing.
        return max(self._right[index] / self._seen[index], LEAST_ACCURACY)


def _match_class(match: int) -> int:
    return next(i for i, (longest, _) in enumerate(MATCH_CLASSES) if match <= longest)


@dataclass(frozen=True, slots=True)
class Plan:
    """The next step, decided before it starts."""

    rows: int  # the root included
    draft: bool  # call the draft; with one row only to compare its proposal with what follows
    lookup: bool = False  # no draft call: the rows are what prompt lookup found
    waited: int = 0  # plain steps between the last tree and the draft call
    mix: int = 0  # which drafts are called
    compares: bool = False  # all are, and each one's own tree is compared with what follows


PLAIN = Plan(1, False)


class RowPolicy:
    """The plans of one text; `fork` makes that of another, with what all texts share."""

    def __init__(
        self,
        costs: StepCosts,
        *,
        max_rows: int,
        drafts: int,
        adaptive: bool = True,
        sizes: Sequence[int] = EAGER_SIZES,
    ):
        """`drafts`: mixes to choose from; `sizes` of steps, those below `max_rows`.

        Not `adaptive`: always `max_rows` and the last mix.
        """
        self.costs = costs
        self._drafts = drafts
        self._sizes = [rows for rows in sizes if rows < max_rows] + [max_rows]
        self._adaptive = adaptive
        self._padded = sizes is not EAGER_SIZES
        self._estimators = [AcceptanceEstimator(self._sizes) for _ in range(max(1, drafts))]  # by mix
        self.mixes = Mixes(drafts, self._sizes)
        self._mix = 0  # in use
        self._new_text = True
        self._waited = 0  # plain steps since the last tree
        self._unchanged = 0  # the same, or since the last outcome or the beginning of the text
        self._steps = 0  # of the text
        self.since_draft = 0

    def fork(self) -> "RowPolicy":
        """Return the policy of a new text."""
        other = copy(self)
        other._estimators = [estimator.fork() for estimator in self._estimators]
        other._new_text, other._unchanged = True, 0
        other._steps = 0
        return other

    def plan(self, *, copied: int = 0, probability: float = 0.0) -> Plan:
        """Plan the next step, where prompt lookup found `copied` tokens, each right with `probability`."""
        self.begin_step()
        self.mixes.step()
        plan = self._decide(copied, probability)
        return self._take(self._with_mix(plan) if plan.draft and self._drafts > 1 else plan)

    def _with_mix(self, plan: Plan) -> Plan:
        """Return the plan of a draft call with the drafts that it calls."""
        if self._adaptive and self.mixes.compares(self._mix, self.costs.of(1), self.costs.draft_call):
            return replace(plan, mix=self.mixes.last, compares=True)
        return replace(plan, mix=self._mix)

    def plan_root(self, *, copied: int = 0, probability: float = 0.0) -> bool:
        """Return whether the step after the current one is the root alone; if so that is planned.

        A lookup that was not there one token ago, or is more likely now, has to wait one step.
        """
        plan = self._decide(copied, probability)
        if self._new_text or plan.rows > 1 or plan.draft:
            return False
        self._count_step(new_text=False)
        self.mixes.step()
        self._take(plan)
        return True

    def observe(
        self, weights: list[float], path: list[int], *, verified: int, waited: int, mix: int = 0
    ) -> None:
        """Learn from a draft call: probabilities of its rows' paths, the accepted rows, the rows verified."""
        self._unchanged = 0
        estimator = self._estimators[mix]
        estimator.usual.draft_calls += 1
        estimator.usual.accepted_tokens += len(path) - 1
        estimator.observe(weights, path, verified=verified, waited=waited)

    @property
    def rows_are_dear(self) -> bool:
        """Whether trees are so small that a draft need not look far ahead."""
        return self._adaptive and self.costs.of(FEW_ROWS) > DEAR * self.costs.of(1)

    def rest(self) -> int:
        """Return how many steps from now on are plain unless prompt lookup finds something."""
        if self._padded or not self._adaptive:
            return 0
        return self._next_decision(self._unchanged) - self._unchanged

    def rested(self, steps: int) -> None:
        """Count plain steps that were not planned one by one."""
        for estimator in self._estimators:
            estimator.step(new_text=False, count=steps)
        self.mixes.step(steps)
        self._count_plain(steps)

    # -- For steps of several texts, which `RowSharing` plans

    @property
    def started(self) -> bool:
        """Whether there is any outcome to plan from."""
        return self._estimator.started

    def use_mix(self, mix: int) -> None:
        self._mix = mix

    @property
    def kept_promises(self) -> float:
        """Tokens accepted of this text's trees for each that their weights promised."""
        return self._estimator.kept.factor

    def expected(self) -> list[float]:
        """Return the tokens that a draft call now would have accepted, by size; [] before any outcome."""
        return self._estimator.expected(self._waited)

    def taken(self, plan: Plan) -> Plan:
        """Return the plan of this text in a step of several."""
        return self._take(replace(plan, waited=self._waited))

    @property
    def _estimator(self) -> AcceptanceEstimator:
        """Of the mix in use."""
        return self._estimators[self._mix]

    @property
    def _usual(self) -> UsualAcceptance:
        """Of the first mix."""
        return self._estimators[0].usual

    def _count_step(self, *, new_text: bool) -> None:
        for estimator in self._estimators:
            estimator.step(new_text=new_text)

    def begin_step(self) -> None:
        """Count a step; `plan` does so by itself."""
        self._count_step(new_text=self._new_text)
        if self._new_text:
            # No tree has just ended at the beginning of a text.
            self._waited, self._new_text = WAITS[-1], False

    def _take(self, plan: Plan) -> Plan:
        self._count_plain(1)
        if plan.draft:
            self.since_draft = self._usual.unasked = 0
        if plan.rows > 1:
            self._waited = self._unchanged = 0
        return plan

    def _count_plain(self, steps: int) -> None:
        usual = self._usual
        usual.steps += steps
        usual.unasked += steps
        self.since_draft += steps
        self._waited += steps
        self._unchanged += steps
        self._steps += steps

    def _decide(self, copied: int, probability: float) -> Plan:
        largest = self._sizes[-1]
        if not self._adaptive:
            self._mix = self.mixes.last
            return Plan(largest, self._drafts > 0, lookup=not self._drafts and copied > 0)
        drafts = self._drafts > 0 and self._draft_is_due()
        if self._plain_is_due() or not (drafts or copied):
            return PLAIN
        self._mix = self.mixes.best(self.costs.of, self.costs.draft_call)
        best, speed = PLAIN, MARGIN / self._plain_s
        seconds = self._draft_seconds() if drafts else []
        if drafts:
            best, speed = self._best_draft(best, speed, seconds)
        if copied:
            best, speed = self._best_lookup(best, speed, copied, probability)
        if drafts and best.rows == 1 and (probe := self._probe(seconds)) is not None:
            return probe
        return best

    def _draft_is_due(self) -> bool:
        """Return whether to decide about the draft."""
        return self._padded or self._next_decision(self._unchanged) == self._unchanged

    @staticmethod
    def _next_decision(unchanged: int) -> int:
        """Return after how many plain steps the draft is next decided about on a CPU."""
        if unchanged <= WAITS[-1]:
            return next(wait for wait in WAITS if unchanged <= wait)
        return -(-unchanged // RESTING_INTERVAL) * RESTING_INTERVAL

    def _plain_is_due(self) -> bool:
        """Return whether plain decoding has to be measured: first of all, and on a CPU again and again.

        There one step says little, and where trees are always chosen nothing else would correct it.
        """
        if 1 not in self.costs.step:
            return True
        return not self._padded and self.costs.unmeasured_for(1) >= PLAIN_INTERVAL

    @property
    def _plain_s(self) -> float:
        """Seconds of a plain step and of what the host does before it."""
        return self.costs.of(1) + self.costs.gap_before("plain")

    def _draft_seconds(self) -> list[float]:
        """Return what a draft call and a tree cost, for each size but the root alone."""
        draft = self._call_s() + self.costs.gap_before("draft")
        return [cost + draft for cost in self.costs.of_sizes(self._sizes[1:])]

    def _call_s(self) -> float:
        """Return what a draft call costs, with the positions that have waited for it."""
        return self.costs.draft_call(self._mix) + self.costs.backlog * self._unchanged

    def _best_draft(self, best: Plan, speed: float, seconds: list[float]) -> tuple[Plan, float]:
        """Return the fastest plan of plain steps and a draft call, if any beats `speed` tokens a second."""
        plain = self._plain_s
        for wait in (self._waited, *(wait for wait in WAITS if wait > self._waited)):
            now = wait == self._waited
            expected = self._estimator.expected(wait)[1:]
            for rows, more, cost in zip(self._sizes[1:], expected, seconds, strict=True):
                rate = (wait + 1 + more) / (wait * plain + cost) / (1 if now else PATIENCE)
                if rate > speed:
                    best, speed = Plan(rows, True, waited=wait) if now else PLAIN, rate
        return best, speed

    def _best_lookup(self, best: Plan, speed: float, copied: int, probability: float) -> tuple[Plan, float]:
        for rows in self._sizes[1:]:
            # 1 + p + p^2 + ...: one for the target's own token after the copied ones.
            count = min(rows, copied + 1)
            tokens = (1 - probability**count) / (1 - min(probability, 0.999))
            rate = tokens / (self.costs.of(rows) + self.costs.gap_before("lookup"))
            if rate > speed:
                best, speed = Plan(rows, False, lookup=True), rate
        return best, speed

    def _probe(self, seconds: list[float]) -> Plan | None:
        """Return the draft call that loses least, if what it may lose is a small share of the time."""
        plain, usual = self._plain_s, self._usual
        call = self._call_s() / plain
        probe, loss = Plan(1, True, waited=self._waited), call
        expected = self._estimator.expected(self._waited)[1:]
        for rows, more, cost in zip(self._sizes[1:], expected, seconds, strict=True):
            lost = cost / plain - 1 - more
            if lost < loss:
                probe, loss = Plan(rows, True, waited=self._waited), lost
        share = max(PROBE_SHARE, TEXT_SHARE / (1 + usual.outcomes))
        due = usual.unasked + 1 >= max(loss / share, PROBE_INTERVAL)
        return probe if due and TEXT_SHARE * self._steps >= loss else None
