"""Rows shared between texts: by expected gain, as many as pay, and drafts only for those that they help."""

import itertools
import math
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.kernels.tree import MAX_ROWS
from bough.kernels.tree.share import share_rows
from bough.spec.costs import StepCosts
from bough.spec.draft_call import TREE_WORDS, word_bits
from bough.spec.policy import PROBE_INTERVAL
from bough.spec.sharing import REPLAN, BatchCosts, DeviceSharing, Offer, RowSharing, SharedPart
from bough.spec.tree import Tree

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


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.floats(0.001, 1), max_size=63), min_size=1, max_size=16), st.integers(0, 48))
def test_rows_shared_on_the_device_are_those_shared_on_the_host(gains: list[list[float]], extra: int) -> None:
    """For a size that is known; all of the same rows, with equal gains in any places."""
    texts = len(gains)
    made, size = sharing(adaptive=False), min(texts + extra, MAX_ROWS)
    made._step_sizes = [size]
    expected = made.shares([np.array(own, np.float32) for own in gains], padded=True)
    padded = torch.tensor([own + [0.0] * (63 - len(own)) for own in gains])
    trees = torch.arange(texts * 5 * MAX_ROWS).view(texts, 5, MAX_ROWS)
    present = torch.ones(texts, dtype=torch.int64)
    rows, first, best = share_rows(trees, padded, present, torch.tensor([size - texts]))
    assert first.diff().tolist() == expected
    falling = sorted((gain for own in gains for gain in itertools.accumulate(own, min)), reverse=True)[:64]
    assert best.tolist() == pytest.approx([*falling, *[0.0] * (len(best) - len(falling))])
    for text, (begin, end) in enumerate(itertools.pairwise(first.tolist())):
        assert torch.equal(rows[:, begin:end], trees[text, :, : end - begin])


def test_trees_on_the_device_and_on_the_host_share_a_step() -> None:
    """A drafted tree, what prompt lookup found, a root alone, and a piece of a prompt, which is whole."""
    forest = torch.zeros(8, TREE_WORDS, dtype=torch.int64)
    drafted = Tree.of([7, 8, 9, 10, 11], [-1, 0, 0, 1, 3])
    forest[5, : 4 * MAX_ROWS] = drafted.packed.flatten()
    weights = torch.full((MAX_ROWS,), -torch.inf)
    weights[:5] = torch.tensor([1.0, 0.9, 0.5, 0.4, 0.3]).log()
    forest[5, 4 * MAX_ROWS :] = word_bits(weights)
    parts = [
        SharedPart(5, 16, promise=0.8),
        SharedPart(2, 3, tree=Tree.chain([1, 2, 3]), score=math.log(0.7)),
        SharedPart(0, 16, tree=Tree.root(4)),
        SharedPart(1, 3, tree=Tree.chain([20, 21, 22]), given=True),
    ]
    call = DeviceSharing(forest)
    for size, counts in ((6, [1, 1, 1, 3]), (8, [2, 2, 1, 3]), (10, [3, 3, 1, 3]), (64, [5, 3, 1, 3])):
        shared = call(parts, size)
        assert shared.first.diff().tolist() == counts and (shared.size, shared.most) == (size, 16)
        bounds = shared.first.tolist()
        for part, begin, end in zip(parts, bounds, bounds[1:], strict=False):
            tree = drafted if part.tree is None else part.tree
            assert torch.equal(shared.rows[:, begin:end], tree.packed[:, : end - begin])
        assert shared.given[: bounds[-1]].tolist() == [-1] * (bounds[-1] - 3) + [21, 22, -1]
    texts, gains = call.gains()
    assert texts == 3 and gains[:4] == pytest.approx([0.72, 0.7, 0.49, 0.4]) and gains.sum() < 2.9
    assert call(parts[:1], 16).first.tolist() == [0, 5, 5, 5, 5]


def test_a_size_is_planned_by_what_the_best_rows_gained() -> None:
    """Some texts are likelier than the average of all says, and the rows are theirs."""
    made = sharing()
    offers, asked = [offer(POOR, slot) for slot in range(8)], [True] * 8
    assert made.planned_size(offers, asked, []) <= 16
    for _ in range(30):
        made.observe_gains(8, np.sort(np.concatenate([falling(0.95, 0.95)] * 3))[::-1][:64])
    assert made.planned_size(offers, asked, []) >= 48
    assert made.planned_size(offers[:7], asked[:7], []) <= 16
    assert made.planned_size(offers, asked, [16, 16]) >= 48
