"""How many tokens of a draft call are accepted, learnt from accepted paths."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bough.spec.calibration import CALIBRATION_DECAY

# Plain steps since the last tree from which a factor of its own is learnt; after the last it is 1. Embedded
# pair, 16 rows: 1.7 tokens are accepted right after a tree, 3.3 after 4 plain steps, 4.5 after 20.
WAITS = (0, 4, 16)
RECENT_DECAY, RECENT_FLOOR = 0.93, 0.4  # of the recent average, per step; least weight left to the past
LONG_DECAY, LONG_FLOOR = 15 / 16, 0.8  # the same of the long-run average
REVERT = 0.97  # how much of the difference to the long-run average is left per step without an outcome
# Outcomes in a row that fell short of half make that slower, so that a draft is called ever more seldom in a
# poor text after good ones: from the third on each doubles the steps, so many times. Good and poor texts in
# turn, simulated with a call as dear as 1.15 plain steps: poor ones have 0.956 of the speed with lookup alone
# instead of 0.915, all 1.09 instead of 1.05. From the first on: 0.951, and 3% less where half is right.
SHORT, SHORT_IN_A_ROW, MOST_DOUBLINGS = 0.5, 2, 5
NEW_TEXT_STEPS = 32  # another text is as far from the last one as this many steps
WAIT_DECAY = 0.98  # of the counts that the factors of WAITS come from, per outcome
WAIT_PRIOR = 20.0  # tokens that a fresh factor has seen, all accepted
# Tokens accepted for each doubling of the rows, before any outcome: of weak drafts (docs/training.md).
PRIOR_GAIN = 0.5
KEPT_PRIOR = 4.0  # tokens that trees of a new text have promised; as many were accepted as is usual


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
    credit: float = 0.25  # plain steps that the next copy may be expected to lose
    kept: "KeptPromises" = field(default_factory=lambda: KeptPromises(None))


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
        self._short = 0  # outcomes in a row that fell short

    def fork(self) -> "AcceptanceEstimator":
        """Return the estimator of another text, which begins where this one is."""
        other = AcceptanceEstimator(self._sizes, self.usual)
        other._recent, other._age = self._recent[:], self._age
        return other

    @property
    def started(self) -> bool:
        return self.usual.outcomes > 0

    def step(self, *, new_text: bool = False, count: int = 1) -> None:
        self._age += count + new_text * NEW_TEXT_STEPS

    def expected(self, waited: int) -> list[float]:
        """Return accepted tokens by size, of a draft call `waited` plain steps after the last tree."""
        factor, weight = self._factor(_wait_class(waited)), self._left()
        long_run = self.usual.long_run or [PRIOR_GAIN * math.log2(rows) for rows in self._sizes]
        return [
            factor * (usual + weight * (recent - usual))
            for recent, usual in zip(self._recent or long_run, long_run, strict=True)
        ]

    def _left(self) -> float:
        """Return how much of the difference to the long-run average is left."""
        return REVERT ** (self._age / 2 ** max(0, self._short - SHORT_IN_A_ROW))

    def most(self) -> float:
        """Return more accepted tokens than are `expected` of any size after any wait."""
        long_run = self.usual.long_run or [PRIOR_GAIN * math.log2(self._sizes[-1])]
        return max([*long_run, *self._recent]) * max(self._factor(wait) for wait in range(len(WAITS)))

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
        short = accepted[last] < SHORT * factor * self._recent[last]
        self._short = min(self._short + 1, SHORT_IN_A_ROW + MOST_DOUBLINGS) if short else 0
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
