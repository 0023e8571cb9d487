"""How many rows the coming step verifies, decided before it starts: from past outcomes and measured cost.

For every number of rows it knows what a step of that size costs and how many proposed tokens it will probably
commit: trees are in order of worth, so a walk tells what any smaller tree would have given.
Some plain steps and the question behind them, with its tree, are one stretch; the stretch that gives the most
tokens a second is taken. If none beats plain decoding, the draft is asked so seldom that what this loses is a
small share of the time. What a question costs is spent whatever follows: its tree is verified if that alone
pays. Copies from the text cost nothing to propose: they are taken whenever they promise to pay.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from treeflash.spec.acceptance import WAITS, Outlook

BUCKETS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_PROBE_SHARE = 0.01  # of the time that asking a draft which does not pay may lose
_PROBE_EVERY = 6  # steps between two such questions, at least
_MARGIN = 1.02  # how much better a tree must promise to be than plain decoding
_PATIENCE = 1.2  # the same of waiting against asking at once, which also tells more
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
    waited: int = 0  # plain steps between the last tree and the question


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
        self._outlook = Outlook(self._buckets)
        self._new_text = True
        self._waited = 0  # plain steps since the last tree
        self._since_question = 0
        self.steps = 0
        self.proposals = 0
        self.accepted = 0

    def begin(self) -> None:
        """Another text follows."""
        self._new_text = True

    def plan(self, *, copied: int = 0, sure: float = 0.0) -> Plan:
        """For the coming step, when a copy of `copied` tokens might follow, each with probability `sure`."""
        self._outlook.step(new_text=self._new_text)
        if self._new_text:
            # Its beginning is not behind a miss.
            self._waited, self._new_text = WAITS[-1], False
        return self._taken(self._decided(copied, sure))

    def rest(self, *, copied: int = 0, sure: float = 0.0) -> bool:
        """Whether the step behind the one under way will be plain; then that is planned.

        A copy that was not there one token ago, or is surer now, has to wait for one step.
        """
        plan = self._decided(copied, sure)
        if self._new_text or plan.rows > 1 or plan.ask:
            return False
        self._outlook.step(new_text=False)
        self._taken(plan)
        return True

    def _taken(self, plan: Plan) -> Plan:
        self.steps += 1
        self._since_question = 0 if plan.ask else self._since_question + 1
        self._waited = 0 if plan.rows > 1 else self._waited + 1
        return plan

    def _decided(self, copied: int, sure: float) -> Plan:
        top = self._buckets[-1]
        if self._fixed:
            return Plan(top, self._drafts, copy=not self._drafts and copied > 0)
        if 1 not in self.costs.step:
            return Plan(1, False)  # what plain decoding costs has to be known first
        if self._drafts and not self._outlook.known:
            return Plan(top, True, waited=self._waited)
        plain, *larger = [self.costs.of(rows) for rows in self._buckets]
        best, speed = Plan(1, False), _MARGIN / plain
        # The question that loses least against a plain step, and how many plain steps that is.
        probe, loss = Plan(1, True, waited=self._waited), self.costs.draft / plain
        for wait in (self._waited, *(wait for wait in WAITS if wait > self._waited)) if self._drafts else ():
            accepted = self._outlook.accepted(wait)
            for rows, cost, more in zip(self._buckets[1:], larger, accepted[1:], strict=True):
                seconds = cost + self.costs.draft
                now = wait == self._waited
                rate = (wait + 1 + more) / (wait * plain + seconds) / (1 if now else _PATIENCE)
                if rate > speed:
                    best, speed = Plan(rows, True, waited=wait) if now else Plan(1, False), rate
                if now and seconds / plain - 1 - more < loss:
                    probe, loss = Plan(rows, True, waited=wait), seconds / plain - 1 - more
        for rows, cost in zip(self._buckets[1:], larger, strict=True) if copied else ():
            # 1 + sure + sure^2 + ...: one for the target's own token behind the copy.
            count = min(rows, copied + 1)
            rate = (1 - sure**count) / (1 - min(sure, 0.999)) / cost
            if rate > speed:
                best, speed = Plan(rows, False, copy=True), rate
        due = self._since_question + 1 >= max(loss / _PROBE_SHARE, _PROBE_EVERY)
        return probe if self._drafts and best.rows == 1 and due else best

    def learn(self, weights: list[float], path: list[int], *, verified: int, waited: int) -> None:
        """Of a question: its tree's path probabilities, the rows that came true, how many were verified."""
        self.proposals += 1
        self.accepted += len(path) - 1
        self._outlook.learn(weights, path, verified=verified, waited=waited)

    def complaint(self) -> str | None:
        """In words, when speculation does nothing at all."""
        if self.accepted == 0 and self.proposals >= _SILENCE[0] and self.steps >= _SILENCE[1]:
            return (
                f"not one token of {self.proposals} proposals in {self.steps} steps came true: is this the"
                " draft of this target, with the right layers (target_layer_ids) and mask (mask_token_id)?"
            )
        return None
