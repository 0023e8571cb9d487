"""The row policy replayed on recorded outcomes: what it decides, and how fast that is on two machines.

recorded_outcomes.json holds, for five texts of the embedded pair, what a draft call would give at every
position (benchmarks/record_outcomes.py). A replay walks a text with a machine's measured costs: a plain step
advances by one token, a tree by what was accepted of its first rows.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from treeflash.spec.policy import EAGER_SIZES, Plan, RowPolicy, StepCosts

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
        policy.begin()
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
                policy.observe(weights, kept, verified=verified, waited=plan.waited)
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
        "CPU": (332, 235, 2052),
    }
