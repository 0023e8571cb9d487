"""The row policy replayed on recorded outcomes: what it decides, and how fast that is on two machines.

recorded_outcomes.json holds, for five texts of the embedded pair, what a draft call would give at every
position (workshop/mixed_replay.py --outcomes). A replay walks a text with a machine's measured costs: a plain
step advances by one token, a tree by what was accepted of its first rows.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from bough.spec.costs import StepCosts
from bough.spec.policy import EAGER_SIZES, Plan, RowPolicy

TEXTS = json.loads((Path(__file__).parent / "recorded_outcomes.json").read_text())
ROUNDS = 12  # each text follows itself and the others so often


@dataclass(frozen=True)
class Machine:
    """Milliseconds of a step by rows, and of a draft call with its tree."""

    step: dict[int, float]
    draft: float

    def cost(self, rows: int) -> float:
        return next(cost for size, cost in self.step.items() if rows <= size)


# 27B shapes on an H200 (benchmarks/results/step.jsonl), and the embedded pair on two CPU cores.
H200 = Machine({1: 6.41, 8: 6.53, 16: 7.44, 24: 8.56}, 1.25)
CPU = Machine({1: 12.7, 2: 21.6, 4: 24.1, 6: 26.7, 8: 29.2, 12: 34.3, 16: 39.4, 24: 49.5}, 20.3)


@dataclass
class Outcome:
    milliseconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    draft_calls: int = 0

    @property
    def throughput(self) -> float:
        return self.tokens / self.milliseconds


def replay(machine: Machine, texts: list, *, fixed: int | None = None, sizes=EAGER_SIZES) -> Outcome:
    """Return what the policy, or trees of a fixed number of rows at every step, would have taken."""
    policy = RowPolicy(StepCosts(), max_rows=24, drafts=True, sizes=sizes)
    total = Outcome()
    for text in texts * ROUNDS:
        policy = policy.fork()
        position = 0
        while position < len(text):
            weights, path = text[position]
            plan = policy.plan() if fixed is None else Plan(fixed, fixed > 1)
            cost, accepted = machine.cost(plan.rows), 0
            policy.costs.observe_step(plan.rows, cost)
            total.milliseconds += cost
            total.steps += 1
            if plan.draft:
                total.draft_calls += 1
                total.milliseconds += machine.draft
                policy.costs.observe_draft(machine.draft)
                verified = plan.rows if plan.rows > 1 else len(weights)
                kept = [row for row in path if row < verified]
                policy.history.observe(weights, kept, verified=verified, waited=plan.waited)
                accepted = len(kept) - 1 if plan.rows > 1 else 0
            position += 1 + accepted
            total.tokens += 1 + accepted
    return total


@pytest.mark.parametrize(
    ("machine", "sizes", "speed_up"), [(H200, (1, 8, 16, 24), 4.0), (CPU, EAGER_SIZES, 1.4)]
)
def test_the_policy_is_near_the_best_fixed_size_and_beats_plain_decoding(
    machine: Machine, sizes: tuple[int, ...], speed_up: float
) -> None:
    plain = replay(machine, TEXTS, fixed=1)
    best = max(replay(machine, TEXTS, fixed=rows).throughput for rows in (4, 8, 16, 24))
    found = replay(machine, TEXTS, sizes=sizes)
    assert found.throughput / plain.throughput > speed_up
    assert found.throughput > 0.95 * max(best, plain.throughput)


@pytest.mark.parametrize(("machine", "sizes"), [(H200, (1, 8, 16, 24)), (CPU, EAGER_SIZES)])
def test_a_draft_that_is_never_accepted_loses_little(machine: Machine, sizes: tuple[int, ...]) -> None:
    rejected = [[[weights, [0]] for weights, _ in text] for text in TEXTS]
    plain, found = replay(machine, rejected, fixed=1), replay(machine, rejected, sizes=sizes)
    assert found.throughput > 0.97 * plain.throughput
    assert found.draft_calls < found.steps / 6


def test_the_decisions_are_those_recorded() -> None:
    """A change of the policy shows here: look at the throughput before the numbers are replaced."""
    found = {
        name: replay(machine, TEXTS, sizes=sizes)
        for name, machine, sizes in (
            ("H200", H200, (1, 8, 16, 24)),
            ("CPU", CPU, EAGER_SIZES),
        )
    }
    assert {name: (each.steps, each.draft_calls, each.tokens) for name, each in found.items()} == {
        "H200": (301, 300, 2052),
        "CPU": (340, 228, 2052),
    }


@dataclass(frozen=True)
class SlowPhase(Machine):
    """A machine whose steps take `factor` times as long while `slow` says so."""

    slow: list[bool]
    factor: float = 8.0

    def cost(self, rows: int) -> float:
        return super().cost(rows) * (self.factor if self.slow[0] else 1.0)


@pytest.mark.parametrize("machine", [H200, CPU])
@pytest.mark.parametrize("only_trees", [False, True])
def test_speculation_comes_back_after_a_slow_phase(machine: Machine, only_trees: bool) -> None:
    """Costs of what is not used age: else trees stay off for hundreds of tokens after the machine has calmed.

    only_trees: the slow phase ends while trees are still in use, so that plain steps were never seen slow.
    """
    slow = [False]
    machine = SlowPhase(machine.step, machine.draft, slow)
    policy = RowPolicy(StepCosts(), max_rows=24, drafts=True, sizes=tuple(machine.step))

    def run(tokens: int) -> tuple[float, int]:
        """Return tokens per millisecond and draft calls over a text that the draft always gets right."""
        done, spent, calls = 0, 0.0, 0
        while done < tokens:
            plan = policy.plan()
            cost = machine.cost(plan.rows) + plan.draft * machine.draft * (machine.factor if slow[0] else 1)
            accepted = min(plan.rows - 1, 15) if plan.draft else 0
            policy.costs.observe_step(plan.rows, machine.cost(plan.rows))
            if plan.draft:
                policy.costs.observe_draft(cost - machine.cost(plan.rows))
                verified = plan.rows if plan.rows > 1 else 16
                policy.history.observe([1.0] * 16, list(range(16)), verified=verified, waited=plan.waited)
                calls += 1
            done, spent = done + 1 + accepted, spent + cost
        return done / spent, calls

    policy = policy.fork()
    before, _ = run(600)
    slow[0] = True
    if only_trees:
        for _ in range(120):  # as far as costs may rise, without a plain step between
            policy.costs.observe_step(24, machine.cost(24))
            policy.costs.observe_step(16, machine.cost(16))
            policy.costs.observe_step(8, machine.cost(8))
            policy.costs.observe_draft(machine.draft * machine.factor)
    else:
        run(600)
    slow[0] = False
    run(250)
    after, calls = run(600)
    assert after > 0.9 * before and calls > 0


def test_a_size_that_has_become_slower_is_tried_seldom() -> None:
    """Aging must not cost more than the never-slower rule allows."""
    costs = StepCosts()
    policy = RowPolicy(costs, max_rows=24, drafts=True, sizes=(1, 8, 16, 24))
    policy = policy.fork()
    for rows, cost in H200.step.items():
        costs.observe_step(rows, cost)
    costs.observe_draft(H200.draft)
    spent = tokens = 0.0
    for number in range(6000):
        if number == 2000:  # costs rise slowly, so that a hiccup does no harm: that is learnt by now
            spent = tokens = 0.0
        plan = policy.plan()
        # From now on a tree takes five plain steps, and the draft gets two tokens right.
        cost = H200.cost(1) if plan.rows == 1 else 5 * H200.cost(1)
        costs.observe_step(plan.rows, cost)
        if plan.draft:
            costs.observe_draft(H200.draft)
            verified = plan.rows if plan.rows > 1 else 24
            weights = [0.7**row for row in range(24)]
            policy.history.observe(weights, [0, 1, 2], verified=verified, waited=plan.waited)
            cost += H200.draft
        spent, tokens = spent + cost, tokens + 1 + (2 if plan.rows > 1 else 0)
    plain = 1 / H200.cost(1)
    assert tokens / spent > 0.96 * plain
