"""A draft and an MTP block in one tree, replayed on recorded steps: never worse than the better one alone.

recorded_mixed.json holds one text of each of three suites: the embedded pair and an MTP block trained for it
(workshop/mixed_replay.py).
"""

import json
from pathlib import Path

import pytest

from workshop.mixed_replay import MACHINES, chosen, fixed

SUITES = json.loads((Path(__file__).parent / "recorded_mixed.json").read_text())


@pytest.mark.parametrize("rows", [8, 16, 23])
def test_the_tree_of_both_accepts_no_less(rows: int) -> None:
    texts = [text for suite in SUITES.values() for text in suite]
    draft, mtp, both = (fixed(texts, source, rows) for source in range(3))
    assert draft > mtp > 2 and both > 0.97 * draft


@pytest.mark.parametrize("machine", MACHINES)
def test_the_policy_is_near_the_better_source(machine: str) -> None:
    texts, on = [text for suite in SUITES.values() for text in suite], MACHINES[machine]
    alone = max(chosen(texts, [source], on)[0] for source in range(2))
    speed, calls = chosen(texts, [0, 1, 2], on)
    assert speed > 0.95 * max(alone, 1e3 / on.step[1])
    assert calls[0] > calls[2] > 0


def test_a_draft_that_knows_nothing_is_left_to_the_block() -> None:
    texts = [
        [[[step[0][0], [0]], step[1], step[1]] for step in text]
        for suite in SUITES.values()
        for text in suite
    ]
    for on in MACHINES.values():
        speed, calls = chosen(texts, [0, 1, 2], on)
        assert speed > 0.93 * max(chosen(texts, [1], on)[0], 1e3 / on.step[1])
        assert calls[1] > 3 * calls[0]
