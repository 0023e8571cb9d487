"""What runs before the first request, so that none does anything for the first time, leaves no trace."""

import pytest

from bough.config import SpecConfig
from bough.engine.engine import Engine
from bough.session.requests import TextRequest
from bough.spec.costs import StepCosts
from bough.spec.dflash import DFlashModel
from bough.spec.speculator import Speculator
from bough.state.draft_ring import draft_buffers
from tests.engine.test_embedded_pair import SAMPLINGS, session
from tests.engine.test_runner import events, tokens_of


@pytest.mark.parametrize("sampling", ["greedy", "T 0.7"])
def test_a_request_after_a_rehearsal_is_as_without_one(sampling: str) -> None:
    made = session(SpecConfig(adaptive=False))
    target, draft = made.engine.target, made.engine.drafter._draft._draft  # ty: ignore[unresolved-attribute]
    prompt = made.encode(TextRequest(messages=[{"role": "user", "content": "def fibonacci(n):"}]))
    answers, accepted = [], []
    for rehearsed in (False, True):
        costs, rings = StepCosts(), draft_buffers(draft.spec, max_ctx=512)
        drafter = Speculator(DFlashModel(draft, target, rings), SpecConfig(adaptive=False), costs)
        engine = Engine(target, max_ctx=512, drafter=drafter, max_rows=23, runner="graph")
        if rehearsed:
            engine.warmup.rehearse()
            assert costs == StepCosts() and engine.states.free_slots == 1
            times = engine.warmup.measure_steps()
            assert list(times) == [1, 8, 16, 23]
            assert all(each.draft_s > 0 and each.verify_s > 0 for each in times.values())
        found = events(engine, prompt, SAMPLINGS[sampling], max_tokens=40)
        answers.append(tokens_of(found))
        accepted.append(found[-1].stats.acceptance_length)
    assert answers[0] == answers[1] and accepted[0] == accepted[1]


def test_steps_are_measured_on_a_slot_of_their_own() -> None:
    """The pages that another slot had before may hold a cached prefix."""
    target = session(None).engine.target
    engine = Engine(target, max_ctx=256, slots=3, runner="graph")
    for slot in (0, 1, 2):
        before = engine.states.buffers.lengths.clone()
        assert engine.warmup.measure_steps()
        changed = (engine.states.buffers.lengths != before).nonzero().flatten().tolist()
        assert changed == [slot]


def test_costs_that_are_known_are_kept() -> None:
    costs = StepCosts({1: 0.005}, draft={0: 0.0})
    costs.fill({1: 0.1, 8: 0.2}, 0.01)
    assert costs.step == {1: 0.005, 8: 0.2} and costs.draft == {0: 0.01}
    costs.fill({8: 0.3}, 0.02)
    assert costs.step[8] == 0.2 and costs.draft == {0: 0.01}
