"""How many rows the coming step verifies, decided before it starts: from past outcomes and measured cost.

For every number of rows it knows what a step of that size costs and how many proposed tokens it would have
committed of late: trees are in order of worth, so a walk tells what any smaller tree would have given. If no
size beats the root alone, steps are plain, and now and then the draft is asked only to be compared with what
comes. Copies from the text cost nothing to propose: they are taken whenever they promise to pay.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

BUCKETS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_FADE = 0.85  # of what a past step says about the next, for every step between
_LEAST_FADE = 0.4  # a single proposal never outweighs the past by more than this leaves
_PROBE_SHARE = 0.015  # of the time that asking a draft may take while steps are plain
_PROBE_EVERY = (6, 40)  # steps between two such questions, at least and at most
# Proposals, and accepted tokens of each: a draft below that is asked as seldom as its cost says.
_HOPELESS = (6, 0.05)
_MARGIN = 1.02  # how much better a tree must promise to be than plain decoding
_SILENCE = (20, 200)  # proposals, and steps, without one accepted token: then something is wrong


@dataclass(slots=True)
class Costs:
    """Measured seconds, which outlive a run: a step by rows, and one question to the draft."""

    step: dict[int, float] = field(default_factory=dict)
    draft: float = 0.0

    def learn_step(self, rows: int, seconds: float) -> None:
        old = self.step.get(rows)
        # The fastest of late: what else the machine was doing is not the step's cost.
        self.step[rows] = seconds if old is None else min(seconds, old + 0.1 * (seconds - old), 1.02 * old)

    def learn_draft(self, seconds: float) -> None:
        self.draft = seconds if not self.draft else min(seconds, self.draft + 0.1 * (seconds - self.draft))

    def of(self, rows: int) -> float:
        """A size never measured is taken to cost a little more than the next smaller one: so it is tried."""
        if rows in self.step:
            return self.step[rows]
        known = sorted(self.step)
        if not known:
            return 1.0
        place = bisect.bisect(known, rows)
        if 0 < place < len(known):
            low, high = known[place - 1], known[place]
            share = (rows - low) / (high - low)
            return self.step[low] + share * (self.step[high] - self.step[low])
        nearest = known[place - 1] if place else known[0]
        return self.step[nearest] * (1.05 if place else 1.0)


@dataclass(frozen=True, slots=True)
class Plan:
    rows: int  # of the step, the root included
    ask: bool  # the draft for a proposal; with one row only to compare it with what comes
    copy: bool = False  # no question to the draft: the rows are a copy from the text


class Controller:
    def __init__(
        self,
        costs: Costs,
        *,
        max_rows: int,
        drafts: bool,
        fixed: bool = False,
        sizes: Sequence[int] = BUCKETS,
    ):
        """`sizes` of steps to choose from, as far as they are below `max_rows`."""
        self.costs = costs
        self._drafts = drafts
        self._buckets = [rows for rows in sizes if rows < max_rows] + [max_rows]
        self._fixed = fixed
        # Accepted tokens a step by bucket, and the same as promised by the scores: None until known.
        self._accepted: list[float] = []
        self._promised: list[float] = []
        self._since_question = 0
        self._steps_since_learning = 0
        self.steps = 0
        self.proposals = 0
        self.accepted = 0

    def plan(self, *, copied: int = 0, sure: float = 0.0) -> Plan:
        """For the coming step, when a copy of `copied` tokens might follow, each with probability `sure`."""
        self.steps += 1
        self._steps_since_learning += 1
        top = self._buckets[-1]
        if self._fixed:
            return Plan(top, self._drafts, copy=not self._drafts and copied > 0)
        if 1 not in self.costs.step:
            return Plan(1, False)  # what plain decoding costs has to be known first
        if self._drafts and not self._accepted:
            return Plan(top, True)
        best, speed = Plan(1, False), _MARGIN / self.costs.of(1)
        for rows, accepted in zip(self._buckets[1:], self._accepted[1:], strict=False):
            rate = (1 + accepted) / (self.costs.of(rows) + self.costs.draft)
            if rate > speed:
                best, speed = Plan(rows, True), rate
        for rows in self._buckets[1:] if copied else ():
            # 1 + sure + sure^2 + ...: one for the target's own token behind the copy.
            count = min(rows, copied + 1)
            rate = (1 - sure**count) / (1 - min(sure, 0.999)) / self.costs.of(rows)
            if rate > speed:
                best, speed = Plan(rows, False, copy=True), rate
        if best.rows > 1 or not self._drafts:
            self._since_question = 0
            return best
        self._since_question += 1
        every = max(self.costs.draft / self.costs.of(1) / _PROBE_SHARE, _PROBE_EVERY[0])
        hopeless = self.proposals >= _HOPELESS[0] and self.accepted < _HOPELESS[1] * self.proposals
        ask = self._since_question >= (every if hopeless else min(every, _PROBE_EVERY[1]))
        if ask:
            self._since_question = 0
        return Plan(1, ask)

    def learn(self, weights: list[float], path: list[int], *, verified: int) -> None:
        """Path probabilities of a tree's rows, the rows that came true, and how many rows were verified."""
        promised = [sum(weights[1:rows]) for rows in self._buckets]
        accepted = [float(sum(0 < row < rows for row in path)) for rows in self._buckets]
        self.proposals += 1
        self.accepted += len(path) - 1
        if not self._accepted:
            self._accepted, self._promised = promised[:], promised[:]
        within = sum(rows <= verified for rows in self._buckets)
        fade = max(_FADE ** max(1, self._steps_since_learning), _LEAST_FADE)
        # At first every outcome counts the same, beside one for what the scores promise.
        fade = min(fade, self.proposals / (self.proposals + 1))
        self._steps_since_learning = 0
        for index, (new, claim) in enumerate(zip(accepted, promised, strict=True)):
            self._promised[index] += (1 - fade) * (claim - self._promised[index])
            if index < within:
                self._accepted[index] += (1 - fade) * (new - self._accepted[index])
            else:
                # A larger tree than was verified: as much more as the scores promise for it.
                ratio = self._promised[index] / max(self._promised[within - 1], 1e-6)
                self._accepted[index] = max(self._accepted[within - 1] * ratio, self._accepted[within - 1])

    def complaint(self) -> str | None:
        """In words, when speculation does nothing at all."""
        if self.accepted == 0 and self.proposals >= _SILENCE[0] and self.steps >= _SILENCE[1]:
            return (
                f"not one token of {self.proposals} proposals in {self.steps} steps came true: is this the"
                " draft of this target, with the right layers (target_layer_ids) and mask (mask_token_id)?"
            )
        return None
