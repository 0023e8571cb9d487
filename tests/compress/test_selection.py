"""The price of units is what the kept text grows by: their tokens, and the lines of gaps around them."""

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from bough.compress.selection import Passage, Selection, choose
from bough.compress.units import Unit

COUNTS = st.lists(st.integers(1, 30), min_size=1, max_size=12)
GAP = 9


def passage(costs: list[int]) -> Passage:
    units = [Unit(index, index + 1, "line", (0,) if index % 4 == 2 else ()) for index in range(len(costs))]
    return Passage("x" * len(costs), tuple(units), tuple(costs))


def tokens(costs: list[int], kept: set[int]) -> int:
    gaps = [keep for keep, _ in groupby(range(len(costs)), key=kept.__contains__)].count(False)
    return sum(costs[index] for index in kept) + GAP * gaps


@given(costs=COUNTS, data=st.data())
def test_prices_add_up(costs: list[int], data: st.DataObject) -> None:
    selection = Selection(passage(costs), GAP)
    assert selection.cost == tokens(costs, set())
    for _ in range(4):
        some = data.draw(st.lists(st.integers(0, len(costs) - 1), unique=True, max_size=3))
        price = selection.price(some)
        selection.add(some, data.draw(st.sampled_from([price, None])))
        assert selection.cost == tokens(costs, selection.kept)


@given(costs=COUNTS, data=st.data())
def test_what_is_chosen_fits(costs: list[int], data: st.DataObject) -> None:
    scores = data.draw(st.lists(st.floats(0, 1), min_size=len(costs), max_size=len(costs)))
    room = data.draw(st.integers(0, 200))
    kept = choose([passage(costs)], [scores], room=room, gap_cost=GAP)
    assert kept is None if room < GAP else kept is not None and tokens(costs, set(kept[0])) <= room
