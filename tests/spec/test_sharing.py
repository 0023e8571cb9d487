"""Rows shared between texts: by expected gain, as many as pay, and drafts only for those that they help."""

import itertools
import time
from collections.abc import Sequence

import numpy as np
import pytest

from bough.spec.costs import StepCosts
from bough.spec.policy import PROBE_INTERVAL
from bough.spec.sharing import REPLAN, BatchCosts, Offer, RowSharing

SIZES = (1, 8, 16, 24, 32, 48, 64)
# An H200 with a 27B: milliseconds of a step by rows, and of a draft call for one text.
STEP = {1: 6.4, 8: 6.5, 16: 7.6, 24: 8.5, 32: 9.7, 48: 12.4, 64: 15.3}
GOOD = [0.0, 4.2, 6.0, 6.6]  # tokens accepted of 1, 8, 16 and 23 rows
POOR = [0.0, 0.3, 0.35, 0.4]


def sharing(step: dict[int, float] = STEP, draft: float = 1.2, **options) -> RowSharing:
    costs = BatchCosts(StepCosts(dict(step), {0: draft}))
    for asked in range(1, 17):
        costs.observe_draft(asked, draft * (0.6 + 0.4 * asked))
    return RowSharing(costs, sizes=SIZES, max_rows=23, **options)


def offer(expected: list[float], slot: int, *, copied: int = 0, since: int = 0, rows: int = 23) -> Offer:
    return Offer(expected, copied, 0.95, rows, since, slot)


def asked(made: RowSharing, *offers: Offer) -> list[int]:
    return made.asked(offers, padded=True)


def falling(first: float, decay: float, count: int = 22) -> np.ndarray:
    return first * decay ** np.arange(count)


def shares(made: RowSharing, weights: Sequence[np.ndarray], *, padded: bool = True) -> list[int]:
    return made.shares(weights, padded=padded)


def test_the_best_rows_of_all_trees_are_taken() -> None:
    rows = shares(sharing(), [falling(0.95, 0.95), falling(0.5, 0.6), falling(0.9, 0.9)])
    assert rows[0] > rows[2] > rows[1] >= 1 and sum(rows) in SIZES
    # A prefix of each tree: whatever is left out weighs no more than what was taken.
    weights = [falling(0.95, 0.95), falling(0.5, 0.6), falling(0.9, 0.9)]
    least = min(each[count - 2] for each, count in zip(weights, rows, strict=True) if count > 1)
    assert all(each[count - 1] <= least for each, count in zip(weights, rows, strict=True) if count < 23)


def test_everyone_has_a_row_and_rows_that_do_not_pay_are_left_out() -> None:
    dear = {rows: float(rows) for rows in (1, 2, *SIZES)}
    assert shares(sharing(dear), [falling(0.2, 0.5)] * 5, padded=False) == [1] * 5
    assert shares(sharing(dear), [falling(0.999, 0.999)] * 2) == [4, 4]
    # Padding is free: the rows of the next size are used.
    assert sum(shares(sharing(dear), [falling(0.2, 0.5)] * 5)) == 8


def test_64_texts_have_one_row_each() -> None:
    assert shares(sharing(), [falling(0.9, 0.9)] * 64) == [1] * 64
    assert shares(sharing(), [np.zeros(0)] * 3) == [1, 1, 1]


def test_only_those_are_asked_whom_the_draft_helps() -> None:
    made = sharing()
    assert asked(made, offer(GOOD, 0), offer(POOR, 1), offer(GOOD, 2), offer(POOR, 3)) == [0, 2]
    assert asked(made, offer(POOR, 0), offer(POOR, 1)) == []
    # A text that may have one row only, as at the end of the context, is not asked.
    assert asked(made, offer(GOOD, 0, rows=1), offer(GOOD, 1)) == [1]


def test_texts_of_which_nothing_is_known_are_asked() -> None:
    assert asked(sharing(), offer([], 0), offer([], 1)) == [0, 1]
    assert asked(sharing(), offer(POOR, 0), offer([], 1)) == [1]


def test_what_prompt_lookup_finds_needs_no_draft() -> None:
    copying = offer(GOOD, 0, copied=15)
    assert asked(sharing(draft=5.0), copying, offer(POOR, 1)) == []
    assert asked(sharing(), offer(GOOD, 0), offer(POOR, 1)) == [0]


def test_those_that_do_not_pay_are_probed_in_turn_and_seldom() -> None:
    made, since, probes = sharing(), [0, 0, 0], []
    for step in range(400):
        chosen = asked(made, *(offer(POOR, slot, since=since[slot]) for slot in range(3)))
        since = [0 if slot in chosen else since[slot] + 1 for slot in range(3)]
        probes += [(step, slot) for slot in chosen]
    assert {slot for _, slot in probes} == {0, 1, 2}
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(probes)]
    assert min(gaps) >= PROBE_INTERVAL
    # The time that they lose is a small share of all.
    assert len(probes) * 1.2 < 0.02 * 400 * STEP[8]


def test_a_choice_holds_for_some_steps_and_not_for_other_texts() -> None:
    made = sharing()
    first = asked(made, offer(GOOD, 0), offer(POOR, 1))
    for _ in range(REPLAN - 1):
        assert asked(made, offer(POOR, 0), offer(GOOD, 1)) == first == [0]
    assert asked(made, offer(POOR, 0), offer(GOOD, 1)) == [1]
    assert asked(made, offer(GOOD, 2), offer(POOR, 1)) == [0]


def test_without_adaptation_all_are_asked_and_all_rows_used() -> None:
    made = sharing(adaptive=False)
    assert asked(made, offer(POOR, 0), offer([], 1), offer(GOOD, 2, rows=1)) == [0, 1]
    assert sum(shares(made, [falling(0.1, 0.5)] * 3)) == 64


def test_costs_of_several_texts_are_learnt() -> None:
    costs = BatchCosts(StepCosts({1: 1.0, 8: 1.2}, {0: 0.5}))
    assert costs.step(4, 8) == 1.2 and costs.draft(2) == 0.5 and costs.draft(0) == 0.0
    costs.observe_step(4, 16, 3.0)
    costs.observe_draft(2, 0.7)
    assert costs.step(4, 16) == costs.step(5, 16) == 3.0 and costs.draft(2) == 0.7


@pytest.mark.parametrize("texts", [8, 16])
def test_sharing_is_quick(texts: int) -> None:
    made = sharing()
    weights = [falling(0.9, 0.9)] * texts
    offers = [offer(GOOD if slot % 2 else POOR, slot) for slot in range(texts)]
    times = []
    for _ in range(20):
        start = time.perf_counter()
        shares(made, weights)
        asked(made, *offers)
        times.append(time.perf_counter() - start)
    # 15 us a text on an idle machine; this one may be busy.
    assert min(times) < texts * 60e-6
