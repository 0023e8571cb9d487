"""What is expected of a question to the draft, from walks of trees of any size."""

import pytest

from treeflash.spec.acceptance import WAITS, Outlook

BUCKETS = (1, 8, 16, 24)  # as on a GPU, where smaller steps cost the same


def chain(rows: int, claim: float) -> list[float]:
    return [claim**depth for depth in range(rows)]


@pytest.mark.parametrize("rows", [2, 3, 5, 7])
def test_small_trees_that_come_true_are_worth_something(rows: int) -> None:
    """A grammar leaves few rows of a tree: fewer than the smallest step that is asked about."""
    outlook = Outlook(BUCKETS)
    for _ in range(50):
        outlook.step(new_text=False)
        outlook.learn(chain(rows, 0.9), list(range(rows)), verified=rows, waited=WAITS[-1])
    assert outlook.accepted(WAITS[-1])[1:] == pytest.approx([rows - 1] * 3, rel=0.01)


@pytest.mark.parametrize("rows", [2, 3, 5, 7])
def test_of_a_tree_that_was_cut_short_more_is_expected(rows: int) -> None:
    """By a request's own limit, or where the context ends."""
    outlook, weights = Outlook(BUCKETS), chain(16, 0.9)
    for _ in range(50):
        outlook.step(new_text=False)
        outlook.learn(weights, list(range(rows)), verified=rows, waited=WAITS[-1])
    accepted = outlook.accepted(WAITS[-1])
    assert accepted[1] == pytest.approx((rows - 1) * sum(weights[1:8]) / sum(weights[1:rows]), rel=0.05)
    assert accepted[1] <= accepted[2] <= accepted[3]


@pytest.mark.parametrize("rows", [2, 5, 8, 20])
def test_nothing_is_expected_of_what_never_comes_true(rows: int) -> None:
    outlook = Outlook(BUCKETS)
    for _ in range(100):
        outlook.step(new_text=False)
        outlook.learn(chain(rows, 0.9), [0], verified=rows, waited=WAITS[-1])
        outlook.learn(chain(24, 0.9), [0], verified=rows, waited=WAITS[-1])
    assert max(outlook.accepted(WAITS[-1])) < 0.05
