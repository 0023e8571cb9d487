"""What the estimator expects of a draft call, from accepted paths of trees of any size."""

import pytest

from bough.spec.acceptance import WAITS, AcceptanceEstimator

BUCKETS = (1, 8, 16, 24)  # as on a GPU, where smaller steps cost the same


def chain(rows: int, claim: float) -> list[float]:
    return [claim**depth for depth in range(rows)]


@pytest.mark.parametrize("rows", [2, 3, 5, 7])
def test_small_trees_that_are_accepted_are_worth_something(rows: int) -> None:
    """A grammar leaves few rows of a tree: fewer than the smallest size."""
    estimator = AcceptanceEstimator(BUCKETS)
    for _ in range(50):
        estimator.step(new_text=False)
        estimator.observe(chain(rows, 0.9), list(range(rows)), verified=rows, waited=WAITS[-1])
    assert estimator.expected(WAITS[-1])[1:] == pytest.approx([rows - 1] * 3, rel=0.01)


@pytest.mark.parametrize("rows", [2, 3, 5, 7])
def test_of_a_tree_that_was_cut_short_more_is_expected(rows: int) -> None:
    """By a request's own limit, or where the context ends."""
    estimator, weights = AcceptanceEstimator(BUCKETS), chain(16, 0.9)
    for _ in range(50):
        estimator.step(new_text=False)
        estimator.observe(weights, list(range(rows)), verified=rows, waited=WAITS[-1])
    accepted = estimator.expected(WAITS[-1])
    assert accepted[1] == pytest.approx((rows - 1) * sum(weights[1:8]) / sum(weights[1:rows]), rel=0.05)
    assert accepted[1] <= accepted[2] <= accepted[3]


@pytest.mark.parametrize("rows", [2, 5, 8, 20])
def test_nothing_is_expected_of_what_is_never_accepted(rows: int) -> None:
    estimator = AcceptanceEstimator(BUCKETS)
    for _ in range(100):
        estimator.step(new_text=False)
        estimator.observe(chain(rows, 0.9), [0], verified=rows, waited=WAITS[-1])
        estimator.observe(chain(24, 0.9), [0], verified=rows, waited=WAITS[-1])
    assert max(estimator.expected(WAITS[-1])) < 0.05
