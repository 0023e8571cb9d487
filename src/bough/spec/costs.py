"""What steps and draft calls cost: measured seconds, kept from run to run."""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
# On a busy CPU work of many short parts waits for cores more often than a plain step does. How much longer
# than its cost each kind of work takes is an average over so much of it; it begins as that of plain steps,
# and fades while it is not measured. One preempted plain step (4 ms) moves it by a tenth.
WAIT_DECAY, WAIT_FADE, WAIT_PRIOR = 0.97, 0.995, 8.0


@dataclass(slots=True)
class StepCosts:
    """Measured seconds, kept from run to run: a step by its rows, and a pass of a draft call by its mix."""

    step: dict[int, float] = field(default_factory=dict)
    draft: dict[int, float] = field(default_factory=dict)
    gap: dict[str, float] = field(default_factory=dict)  # between two steps, by the kind of the second
    # Of a draft call, for each position whose features have waited for it; 0 where none wait.
    backlog: float = 0.0
    checked: bool = field(default=True, compare=False)  # the draft's settings have been tried on a text
    suspected: dict[str, int] = field(
        default_factory=dict, compare=False
    )  # what was wrong, on how many texts
    # By rows; a draft call's by -mix.
    _ages: dict[int, "_Age"] = field(default_factory=dict, repr=False, compare=False)
    _steps: int = 0
    _waits: dict[str, tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)

    def observe_step(self, rows: int, seconds: float, wall: float | None = None) -> None:
        """`seconds` that a step has cost; `wall`: that it took, with those when others had the CPU."""
        self._steps += 1
        self._observe_wait(rows, seconds, wall)
        old = self.step.get(rows)
        self.step[rows] = self._observed(rows, old, seconds)
        if rows == 1 and old is not None and self.step[1] < CALMED * old:
            self._scale_trees(self.step[1] / old)

    def observe_draft(self, seconds: float, mix: int = 0, wall: float | None = None) -> None:
        self._observe_wait(-mix, seconds, wall)
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
        plain, trees = self._stretch("plain"), self._stretch("rows")  # once: a plan asks for all sizes
        costs = [(plain if rows == 1 else trees) * self._calm(rows, self.step[rows]) for rows in known]
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

    def _observe_wait(self, key: int, seconds: float, wall: float | None) -> None:
        if wall is None:
            return
        self._waits = {kind: (WAIT_FADE * a, WAIT_FADE * b) for kind, (a, b) in self._waits.items()}
        waited, cost = self._waits.get(_kind(key), (0.0, 0.0))
        self._waits[_kind(key)] = WAIT_DECAY * waited + wall, WAIT_DECAY * cost + seconds

    def _stretch(self, kind: str) -> float:
        """Return how many seconds a kind of work takes for each that it costs."""
        if not self._waits:
            return 1.0
        waited, cost = self._waits.get(kind, (0.0, 0.0))
        prior = WAIT_PRIOR * self.step.get(1, 0.0)
        if kind == "plain":
            return max(1.0, (waited + prior) / (cost + prior)) if cost else 1.0
        return max(1.0, (waited + self._stretch("plain") * prior) / (cost + prior)) if cost + prior else 1.0

    def _aged(self, key: int, seconds: float) -> float:
        return self._stretch(_kind(key)) * self._calm(key, seconds)

    def _calm(self, key: int, seconds: float) -> float:
        """Return a cost as if nothing else ran."""
        age = self._ages.get(key)
        if age is None:
            return seconds
        weight = 0.5 ** ((self._steps - age.step) / age.half_life)
        return age.fastest + weight * (seconds - age.fastest)


def _kind(key: int) -> str:
    """Return the kind of work of a number of rows, or of a draft call, by -mix."""
    return "plain" if key == 1 else "rows" if key > 1 else "draft"


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
