"""How many rows the next step verifies: decided by `RowPolicy` before it starts, from what was learnt.

Trees are in order of worth, so one accepted path shows what any smaller tree would have accepted. For every
number of rows plans of some plain steps and then a draft call with its tree are compared; the one with the
most tokens a second is taken. If none beats plain decoding, the draft is called so seldom that the loss stays
a small share of the time; its tree is verified if that alone pays, as the call is spent whatever follows.
Prompt lookup costs nothing to propose: a copy is used where it promises to pay and may be lost.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace

from bough.spec.acceptance import WAITS
from bough.spec.costs import StepCosts
from bough.spec.history import TextHistory

EAGER_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # rows to choose from where steps are not padded
# There: plain steps from one decision about the draft to the next after the last of WAITS, the most where a
# bound says that no call can pay, and steps from one plain one to the next. To decide takes 0.11 ms on a CPU
# whose caches hold weights, an eighth of a plain step.
RESTING_INTERVAL, HOPELESS_INTERVAL, PLAIN_INTERVAL = 16, 64, 32
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
# Tokens that are expected of a text, which have to pay for reading its prompt where the draft does that by
# itself: as many as have been generated, and at least so many.
HORIZON = 64
MIX_TRIES = 6  # draft calls in which all drafts are compared before one mix is preferred
MIX_INTERVAL = 16  # steps between two comparisons, at least
MIX_DECAY = 0.985  # of the averages that are compared, per comparison
MIX_MARGIN = 1.02  # factor by which another mix must promise to be faster than the one in use


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


class PlanRates:
    """Tokens a second of the plans that a step can have, as far as costs and estimates tell."""

    def __init__(self, policy: "RowPolicy"):
        costs, history, unread = policy.costs, policy.history, policy.unread
        self._history, self._sizes, gap = history, policy.sizes[1:], costs.gap_before
        # Each is asked for once: a look at all costs takes a hundredth of a plain step on a fast CPU.
        root_s, *self._trees_s = costs.of_sizes(policy.sizes)
        self.plain_s = root_s + gap("plain")  # of a plain step and what the host does before it
        # Of a draft call, with the positions that wait: what plans leave unread is read again and again.
        backlog = min(history.unchanged, WAITS[-1]) if unread else history.unchanged
        self._call_s = policy.passes * costs.draft_call(history.mix) + costs.backlog * backlog
        # What it takes once to read what the draft has not seen; the tokens that are still expected.
        self._unread_s = costs.backlog * max(0, unread - WAITS[-1])
        self._horizon = max(HORIZON, history.steps)
        draft_s = self._call_s + gap("draft")
        self._drafted_s = [cost + draft_s for cost in self._trees_s]
        self._lookup_gap_s, self._most = gap("lookup"), history.acceptance.most()

    def best_draft(self, best: Plan, speed: float) -> tuple[Plan, float]:
        """Return the fastest plan of plain steps and a draft call, if any beats `speed` tokens a second."""
        acceptance, waited, least = self._history.acceptance, self._history.waited, min(self._drafted_s)
        if self._unread_s and not self._pays_to_read():
            return best, speed
        for wait in (waited, *(wait for wait in WAITS if wait > waited)):
            now, plain_s = wait == waited, wait * self.plain_s
            if wait + 1 + self._most <= speed * (plain_s + least):
                continue  # mostly, where steps are short
            for rows, more, cost in self._drafts(acceptance.expected(wait)):
                rate = (wait + 1 + more) / (plain_s + cost) / (1 if now else PATIENCE)
                if rate > speed:
                    best, speed = Plan(rows, True, waited=wait) if now else PLAIN, rate
        return best, speed

    def _pays_to_read(self) -> bool:
        """Return whether what draft calls save of the tokens to come is more than reading the text takes."""
        expected = self._history.acceptance.expected(self._history.waited)
        token_s = min(cost / (1 + more) for _, more, cost in self._drafts(expected))
        return self._unread_s <= self._horizon * (self.plain_s - token_s)

    def best_lookup(self, best: Plan, speed: float, copied: int, probability: float) -> tuple[Plan, float]:
        """Return the fastest copy of what prompt lookup found, if any beats `speed` tokens a second."""
        for rows, steps in self.copies():
            rate = _copied_tokens(min(rows, copied + 1), probability) / (steps * self.plain_s)
            if rate > speed and _shortfall(steps, probability) <= self._history.usual.credit:
                best, speed = Plan(rows, False, lookup=True), rate
        return best, speed

    def copies(self) -> list[tuple[int, float]]:
        """Return the rows of copies, and the plain steps that each takes."""
        costs = zip(self._sizes, self._trees_s, strict=True)
        return [(rows, (cost + self._lookup_gap_s) / self.plain_s) for rows, cost in costs]

    def hopeless_for(self) -> int:
        """Return for how many steps no draft call pays, whatever was accepted of others: a bound."""
        waited, least = self._history.waited, min(self._drafted_s) / self.plain_s
        if waited + 1 + self._most > MARGIN * (waited + least):
            return 0
        return min(HOPELESS_INTERVAL, math.ceil(self.least_loss() / TEXT_SHARE - self._history.steps))

    def least_loss(self) -> float:
        """Return less plain steps than any draft call may lose."""
        return min(self._call_s, min(self._drafted_s) - (1 + self._most) * self.plain_s) / self.plain_s

    def probe(self) -> tuple[Plan, float]:
        """Return the draft call that loses least, and the plain steps that it may lose."""
        waited, unread = self._history.waited, self._unread_s / self.plain_s
        probe, loss = Plan(1, True, waited=waited), self._call_s / self.plain_s + unread
        for rows, more, cost in self._drafts(self._history.acceptance.expected(waited)):
            lost = cost / self.plain_s + unread - 1 - more
            if lost < loss:
                probe, loss = Plan(rows, True, waited=waited), lost
        return probe, loss

    def _drafts(self, expected: list[float]) -> Iterator[tuple[int, float, float]]:
        """Return rows, expected tokens and seconds of a draft call and its tree, for each size."""
        return zip(self._sizes, expected[1:], self._drafted_s, strict=True)


def _copied_tokens(rows: int, probability: float) -> float:
    """Return 1 + p + p^2 + ...: one for the target's own token after the copied ones."""
    return (1 - probability**rows) / (1 - min(probability, 0.999))


def _shortfall(steps: float, probability: float) -> float:
    """Return how many plain steps a copy that takes `steps` of them loses where it loses."""
    lost, likely = 0.0, 1 - probability  # that it is right so far, and then wrong
    for tokens in range(1, math.ceil(steps)):
        lost, likely = lost + likely * (steps - tokens), likely * probability
    return lost


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
        self.sizes = [rows for rows in sizes if rows < max_rows] + [max_rows]
        self._adaptive = adaptive
        self._padded = sizes is not EAGER_SIZES
        self.history = TextHistory(self.sizes, drafts)
        self.mixes = Mixes(drafts, self.sizes)
        self.passes = 1.0  # that the next draft call makes
        self.unread = 0  # positions that the draft reads by itself and has not: of a prompt, mostly
        # See `PlanRates`; of the last decision, and for how many steps of the text.
        self._copies: list[tuple[int, float]] = []
        self._copies_until = 0

    def fork(self) -> "RowPolicy":
        """Return the policy of a new text."""
        other = copy(self)
        other.history = self.history.fork()
        other._copies_until = 0
        other.unread = 0
        return other

    def plan(self, *, copied: int = 0, probability: float = 0.0) -> Plan:
        """Plan the next step, where prompt lookup found `copied` tokens, each right with `probability`."""
        self.history.begin()
        self.history.begin_steps()
        self.mixes.step()
        plan = self._decide(copied, probability)
        plan = self._with_mix(plan) if plan.draft and self._drafts > 1 else plan
        self.history.end_steps(rows=plan.rows, draft=plan.draft)
        if plan.rows == 1:
            self.settle(1, 1)
        return plan

    def _with_mix(self, plan: Plan) -> Plan:
        """Return the plan of a draft call with the drafts that it calls."""
        if self._adaptive and self.mixes.compares(self.history.mix, self.costs.of(1), self.costs.draft_call):
            return replace(plan, mix=self.mixes.last, compares=True)
        return replace(plan, mix=self.history.mix)

    def plan_root(self, *, copied: int = 0, probability: float = 0.0) -> bool:
        """Return whether the step after the current one is the root alone; if so that is planned.

        A lookup that was not there one token ago, or is more likely now, has to wait one step.
        """
        plan = self._decide(copied, probability)
        if not self.history.begun or plan.rows > 1 or plan.draft:
            return False
        self.rested(1)
        return True

    @property
    def rows_are_dear(self) -> bool:
        """Whether trees are so small that a draft need not look far ahead."""
        return self._adaptive and self.costs.of(FEW_ROWS) > DEAR * self.costs.of(1)

    def rest(self) -> int:
        """Return how many steps from now on are plain unless prompt lookup finds something."""
        if self._padded or not self._adaptive:
            return 0
        return self._next_decision() - self.history.unchanged

    def rest_at_first(self) -> int:
        """Begin a text, before its first token; return how many steps are plain unless a copy pays."""
        if self._padded or not self._adaptive or self._plain_is_due():
            return 0
        self.history.begin()
        return WAITS[1] if self._decide(0, 0.0) is PLAIN else 0

    def copy_pays(self, copied: int, probability: float) -> bool:
        """Return whether a copy of what prompt lookup found may pay, by the last decision's costs."""
        if self.history.steps >= self._copies_until:
            return True
        return any(
            _copied_tokens(min(rows, copied + 1), probability) > MARGIN * steps
            and _shortfall(steps, probability) <= self.history.usual.credit
            for rows, steps in self._copies
        )

    def rested(self, steps: int) -> None:
        """Count plain steps that were not planned one by one."""
        self.history.begin_steps(steps)
        self.mixes.step(steps)
        self.history.end_steps(steps)
        self.settle(steps, steps)

    def settle(self, tokens: int, plain_steps: float) -> None:
        """Count the tokens of plain steps or of a copy, and the plain steps that take as long.

        A copy may lose a share of all time so far, and what copies have gained.
        """
        self.history.usual.credit += tokens - (1 - TEXT_SHARE) * plain_steps

    def _decide(self, copied: int, probability: float) -> Plan:
        largest = self.sizes[-1]
        if not self._adaptive:
            self.history.mix = self.mixes.last
            return Plan(largest, self._drafts > 0, lookup=not self._drafts and copied > 0)
        drafts = self._drafts > 0 and self._draft_is_due()
        copied = copied if self.copy_pays(copied, probability) else 0
        if self._plain_is_due() or not (drafts or copied):
            return PLAIN
        history = self.history
        history.mix = self.mixes.best(self.costs.of, self.costs.draft_call)
        rates = PlanRates(self)
        best, speed = PLAIN, MARGIN / rates.plain_s
        if not self._padded:
            self._copies, self._copies_until = rates.copies(), history.steps + HOPELESS_INTERVAL
        if drafts:
            best, speed = rates.best_draft(best, speed)
            history.hopeless = history.unchanged + max(rates.hopeless_for(), -history.unchanged)
        if copied:
            best, speed = rates.best_lookup(best, speed, copied, probability)
        if drafts and best.rows == 1 and rates.least_loss() <= TEXT_SHARE * history.steps:
            probe, loss = rates.probe()
            if self._pays_to_know(loss):
                return probe
        return best

    def _draft_is_due(self) -> bool:
        """Return whether to decide about the draft."""
        return self._padded or self._next_decision() == self.history.unchanged

    def _next_decision(self) -> int:
        """Return after how many plain steps the draft is next decided about on a CPU."""
        unchanged = self.history.unchanged
        if unchanged <= self.history.hopeless:
            return self.history.hopeless
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

    def _pays_to_know(self, loss: float) -> bool:
        """Return whether the plain steps that a draft call may lose are a small share of the time."""
        usual = self.history.usual
        share = max(PROBE_SHARE, TEXT_SHARE / (1 + usual.outcomes))
        due = usual.unasked + 1 >= max(loss / share, PROBE_INTERVAL)
        return due and TEXT_SHARE * self.history.steps >= loss
