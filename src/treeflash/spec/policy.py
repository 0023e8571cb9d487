"""How many rows the next step verifies, and what a draft's scores are worth: learnt from outcomes and costs.

Four statistics, each a class of its own: what steps cost (`StepCosts`), how many tokens of a draft call are
accepted (`AcceptanceEstimator`), how often a draft's scores hold (`Calibration`), and how often prompt
lookup is right (`LookupAccuracy`). `RowPolicy` decides from them before the step starts.

Trees are in order of worth, so one accepted path shows what any smaller tree would have accepted. For every
number of rows the policy compares plans of some plain steps followed by a draft call with its tree, and
takes the one with the most tokens a second. If none beats plain decoding, the draft is called so seldom
that the loss stays a small share of the time. The cost of a draft call is spent whatever follows, so its
tree is verified if that alone pays. Prompt lookup costs nothing to propose: it is used whenever it promises
to pay.
"""

import bisect
import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from treeflash.kernels.tree import Correction
from treeflash.spec.tree import Proposal

# -- Row policy
EAGER_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # rows to choose from where steps are not padded
PROBE_SHARE = 0.01  # of the time that calls of a draft which does not pay may lose
PROBE_INTERVAL = 6  # steps between two such calls, at least
MARGIN = 1.02  # factor by which a tree must promise to beat plain decoding
# The same for waiting some steps against calling the draft at once, which also yields an outcome to learn
# from.
PATIENCE = 1.2
SILENT_CALLS, SILENT_STEPS = 20, 200  # without one accepted token the draft cannot be the target's: warn

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
KEPT_PRIOR = 4.0  # tokens that trees of a new text have promised; as many were accepted as is usual

# -- Calibration
SCORE_EDGES = (0.01, 0.03, 0.08, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97, 1.01)  # upper ends of the probability bins
DEPTH_EDGES = (1, 2, 3, 5, 8, 64)  # upper ends of the depth bins
CALIBRATION_PRIOR = 12.0  # candidates that a fresh bin has seen, all as likely as claimed
CALIBRATION_DECAY = 0.998  # of a bin's counts per candidate: an average over about 500
LEADING = 4  # candidates of a depth that are learnt from

# -- Prompt lookup
LONGEST_MATCH = 32  # tokens of agreement that are counted
# Length of the match up to which a class reaches, and how often a copied token is right before any outcome.
MATCH_CLASSES = ((3, 0.45), (5, 0.6), (8, 0.75), (16, 0.88), (LONGEST_MATCH, 0.94))
LOOKUP_PRIOR = 6.0
LOOKUP_DECAY = 0.98


_DRAFT = 0  # the draft call's key among the ages, which are by rows


@dataclass(slots=True)
class StepCosts:
    """Measured seconds, kept from run to run: a step by its rows, and one draft call."""

    step: dict[int, float] = field(default_factory=dict)
    draft: float = 0.0
    _ages: dict[int, "_Age"] = field(default_factory=dict, repr=False, compare=False)
    _steps: int = 0

    def observe_step(self, rows: int, seconds: float) -> None:
        self._steps += 1
        old = self.step.get(rows)
        self.step[rows] = self._observed(rows, old, seconds)
        if rows == 1 and old is not None and self.step[1] < CALMED * old:
            self._scale_trees(self.step[1] / old)

    def observe_draft(self, seconds: float) -> None:
        self.draft = self._observed(_DRAFT, self.draft or None, seconds)

    def draft_call(self) -> float:
        """Return the cost of a draft call."""
        return self._aged(_DRAFT, self.draft)

    def of(self, rows: int) -> float:
        """Return the cost of a step, interpolated between measured sizes."""
        if rows in self.step:
            return self._aged(rows, self.step[rows])
        known = sorted(self.step)
        if not known:
            return 1.0
        index = bisect.bisect(known, rows)
        if 0 < index < len(known):
            low, high = known[index - 1], known[index]
            share = (rows - low) / (high - low)
            return self.of(low) + share * (self.of(high) - self.of(low))
        return self.of(known[index - 1]) * UNMEASURED if index else self.of(known[0])

    def _observed(self, key: int, old: float | None, seconds: float) -> float:
        """Return the new estimate after a measurement."""
        age = self._ages.get(key, _Age(seconds, self._steps))
        unused, slow = self._steps - age.step > UNUSED, seconds > SLOW_AGAIN * age.fastest
        half_life = age.half_life if slow else COST_HALF_LIFE
        if unused and slow and key > 1:
            half_life = min(2 * age.half_life, LONGEST_HALF_LIFE)
            for other in self._trees():
                self._ages[other] = replace(self._ages[other], step=self._steps, half_life=half_life)
        self._ages[key] = _Age(min(age.fastest, seconds), self._steps, half_life)
        if old is None or unused:
            return seconds
        return min(seconds, old + COST_RATE * (seconds - old), COST_RISE * old)

    def _scale_trees(self, factor: float) -> None:
        """Lower the costs of trees, not measured meanwhile, as much as that of plain decoding fell."""
        for rows in self._trees():
            age = self._ages[rows]
            self.step[rows] = max(factor * self.step[rows], age.fastest)
            self._ages[rows] = replace(age, half_life=COST_HALF_LIFE)
        if _DRAFT in self._ages:
            self.draft = max(factor * self.draft, self._ages[_DRAFT].fastest)

    def _trees(self) -> list[int]:
        return [rows for rows in self.step if rows > 1 and rows in self._ages]

    def _aged(self, key: int, seconds: float) -> float:
        age = self._ages.get(key)
        if age is None:
            return seconds
        weight = 0.5 ** ((self._steps - age.step) / age.half_life)
        return age.fastest + weight * (seconds - age.fastest)


@dataclass(frozen=True, slots=True)
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
        self._sizes = sizes
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

    def step(self, *, new_text: bool) -> None:
        self._age += 1 + new_text * NEW_TEXT_STEPS

    def expected(self, waited: int) -> list[float]:
        """Return accepted tokens by size, of a draft call `waited` plain steps after the last tree."""
        factor, weight, long_run = self._factor(_wait_class(waited)), REVERT**self._age, self.usual.long_run
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

    def __init__(self) -> None:
        self._right = [prior * LOOKUP_PRIOR for _, prior in MATCH_CLASSES]
        self._seen = [LOOKUP_PRIOR] * len(MATCH_CLASSES)

    def log_probability(self, match: int) -> float:
        index = _match_class(match)
        return math.log(self._right[index] / self._seen[index])

    def observe(self, match: int, right: bool) -> None:
        index = _match_class(match)
        self._seen[index] = LOOKUP_DECAY * self._seen[index] + 1
        self._right[index] = LOOKUP_DECAY * self._right[index] + 0.99 * right


def _match_class(match: int) -> int:
    return next(i for i, (longest, _) in enumerate(MATCH_CLASSES) if match <= longest)


@dataclass(frozen=True, slots=True)
class Plan:
    """The next step, decided before it starts."""

    rows: int  # the root included
    draft: bool  # call the draft; with one row only to compare its proposal with what follows
    lookup: bool = False  # no draft call: the rows are what prompt lookup found
    waited: int = 0  # plain steps between the last tree and the draft call


class RowPolicy:
    """The plans of one text; `fork` makes that of another, with what all texts share."""

    def __init__(
        self,
        costs: StepCosts,
        *,
        max_rows: int,
        drafts: bool,
        adaptive: bool = True,
        sizes: Sequence[int] = EAGER_SIZES,
    ):
        """`sizes` of steps to choose from, those below `max_rows`; not `adaptive`: always `max_rows`."""
        self.costs = costs
        self._drafts = drafts
        self._sizes = [rows for rows in sizes if rows < max_rows] + [max_rows]
        self._adaptive = adaptive
        self._estimator = AcceptanceEstimator(self._sizes)
        self._new_text = True
        self._waited = 0  # plain steps since the last tree
        self.since_draft = 0

    def fork(self) -> "RowPolicy":
        """Return the policy of a new text."""
        other = copy(self)
        other._estimator, other._new_text = self._estimator.fork(), True
        return other

    def plan(self, *, copied: int = 0, probability: float = 0.0) -> Plan:
        """Plan the next step, where prompt lookup found `copied` tokens, each right with `probability`."""
        self.begin_step()
        return self._take(self._decide(copied, probability))

    def plan_root(self, *, copied: int = 0, probability: float = 0.0) -> bool:
        """Return whether the step after the current one is the root alone; if so that is planned.

        A lookup that was not there one token ago, or is more likely now, has to wait one step.
        """
        plan = self._decide(copied, probability)
        if self._new_text or plan.rows > 1 or plan.draft:
            return False
        self._estimator.step(new_text=False)
        self._take(plan)
        return True

    def observe(self, weights: list[float], path: list[int], *, verified: int, waited: int) -> None:
        """Learn from a draft call: probabilities of its rows' paths, the accepted rows, the rows verified."""
        self._usual.draft_calls += 1
        self._usual.accepted_tokens += len(path) - 1
        self._estimator.observe(weights, path, verified=verified, waited=waited)

    def warning(self) -> str | None:
        """Return a sentence for the user when nothing of the draft is ever accepted."""
        seen = self._usual
        if seen.accepted_tokens == 0 and seen.draft_calls >= SILENT_CALLS and seen.steps >= SILENT_STEPS:
            return (
                f"not one token of {seen.draft_calls} draft calls in {seen.steps} steps was accepted:"
                " is this the draft of this target, with the right layers (target_layer_ids)"
                " and mask (mask_token_id)?"
            )
        return None

    # -- For steps of several texts, which `RowSharing` plans

    @property
    def started(self) -> bool:
        """Whether there is any outcome to plan from."""
        return self._estimator.started

    @property
    def kept_promises(self) -> float:
        """Tokens accepted of this text's trees for each that their weights promised."""
        return self._estimator.kept.factor

    def expected(self) -> list[float]:
        """Return the tokens that a draft call now would have accepted, by size; [] before any outcome."""
        return self._estimator.expected(self._waited)

    def taken(self, *, rows: int, draft: bool, lookup: bool) -> Plan:
        """Return the plan of this text in a step of several."""
        return self._take(Plan(rows, draft, lookup, self._waited))

    @property
    def _usual(self) -> UsualAcceptance:
        return self._estimator.usual

    def begin_step(self) -> None:
        """Count a step; `plan` does so by itself."""
        self._estimator.step(new_text=self._new_text)
        if self._new_text:
            # No tree has just ended at the beginning of a text.
            self._waited, self._new_text = WAITS[-1], False

    def _take(self, plan: Plan) -> Plan:
        self._usual.steps += 1
        self.since_draft = 0 if plan.draft else self.since_draft + 1
        self._waited = 0 if plan.rows > 1 else self._waited + 1
        return plan

    def _decide(self, copied: int, probability: float) -> Plan:
        largest = self._sizes[-1]
        if not self._adaptive:
            return Plan(largest, self._drafts, lookup=not self._drafts and copied > 0)
        if 1 not in self.costs.step:
            return Plan(1, False)  # the cost of plain decoding has to be measured first
        if self._drafts and not self._estimator.started:
            return Plan(largest, True, waited=self._waited)
        best, speed = Plan(1, False), MARGIN / self.costs.of(1)
        if self._drafts:
            best, speed = self._best_draft(best, speed)
        if copied:
            best, speed = self._best_lookup(best, speed, copied, probability)
        if self._drafts and best.rows == 1:
            probe, loss = self._cheapest_probe()
            if self.since_draft + 1 >= max(loss / PROBE_SHARE, PROBE_INTERVAL):
                return probe
        return best

    def _best_draft(self, best: Plan, speed: float) -> tuple[Plan, float]:
        """Return the fastest plan of plain steps and a draft call, if any beats `speed` tokens a second."""
        plain = self.costs.of(1)
        for wait in (self._waited, *(wait for wait in WAITS if wait > self._waited)):
            now = wait == self._waited
            for rows, more in zip(self._sizes[1:], self._estimator.expected(wait)[1:], strict=True):
                seconds = self.costs.of(rows) + self.costs.draft_call()
                rate = (wait + 1 + more) / (wait * plain + seconds) / (1 if now else PATIENCE)
                if rate > speed:
                    best, speed = Plan(rows, True, waited=wait) if now else Plan(1, False), rate
        return best, speed

    def _best_lookup(self, best: Plan, speed: float, copied: int, probability: float) -> tuple[Plan, float]:
        for rows in self._sizes[1:]:
            # 1 + p + p^2 + ...: one for the target's own token after the copied ones.
            count = min(rows, copied + 1)
            rate = (1 - probability**count) / (1 - min(probability, 0.999)) / self.costs.of(rows)
            if rate > speed:
                best, speed = Plan(rows, False, lookup=True), rate
        return best, speed

    def _cheapest_probe(self) -> tuple[Plan, float]:
        """Return the draft call that loses least against a plain step, and its loss in plain steps."""
        plain = self.costs.of(1)
        probe, loss = Plan(1, True, waited=self._waited), self.costs.draft_call() / plain
        for rows, more in zip(self._sizes[1:], self._estimator.expected(self._waited)[1:], strict=True):
            lost = (self.costs.of(rows) + self.costs.draft_call()) / plain - 1 - more
            if lost < loss:
                probe, loss = Plan(rows, True, waited=self._waited), lost
        return probe, loss
