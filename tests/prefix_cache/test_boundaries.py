"""Where prompts are cut: as their beginnings say, so that states at cuts can be shared."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from treeflash.prefix_cache.boundaries import GRID, Kind, cuts, worth_keeping

CHUNKS = st.sampled_from([1, 7, 64, 512, 2048])
TURNS = st.sets(st.integers(1, 30_000), max_size=60)


def turns(places: set[int], **kinds: int) -> dict[int, Kind]:
    found: dict[int, Kind] = dict.fromkeys(sorted(places), "turn")
    return found | {place: kind for kind, place in kinds.items()}  # ty: ignore[invalid-return-type]


@given(TURNS, TURNS, st.integers(1, 30_000), st.integers(1, 30_000), st.integers(1, 30_000), CHUNKS)
def test_what_begins_alike_is_cut_alike(
    one: set[int], other: set[int], alike: int, longer: int, further: int, chunk: int
) -> None:
    begun = {place for place in one if place <= alike}
    first = cuts(alike + longer, turns(begun | {alike + place for place in one}), chunk)
    second = cuts(alike + further, turns(begun | {alike + place for place in other}), chunk)
    # Whether there is a cut behind the last token they share is said by the next one.
    assert [cut for cut in first if cut < alike] == [cut for cut in second if cut < alike]


@given(TURNS, st.integers(1, 30_000), CHUNKS)
def test_chunks_are_never_too_long_and_seldom_short(places: set[int], length: int, chunk: int) -> None:
    found = cuts(length, turns(places), chunk)
    assert found == sorted(set(found)) and found[-1] == length
    assert all(after - before <= chunk for before, after in pairwise([0, *found]))
    assert set(range(chunk, length, chunk)) <= set(found)
    for before, after in pairwise([0, *found[:-1]]):
        assert after % chunk == 0 or after - before >= max(chunk // 16, after // 16)
        assert after % chunk == 0 or after in places


@given(TURNS, st.integers(1, 30_000), st.integers(1, 30_000), st.integers(1, 30_000), CHUNKS)
def test_what_is_kept_is_a_cut_and_never_rounded_up(
    places: set[int], head: int, question: int, length: int, chunk: int
) -> None:
    boundaries = turns(places, head=head, question=question) if head != question else turns(places)
    ends = cuts(length, boundaries, chunk)
    kept = worth_keeping(ends, boundaries)
    assert set(kept) <= set(ends[:-1])
    of_kind = {kind: cut for cut, kind in kept.items()}
    assert all(
        of_kind[kind] <= place for place, kind in boundaries.items() if kind in of_kind and kind != "turn"
    )
    if len(ends) > 1:
        assert ends[-2] in kept
    # No stretch of the prompt goes without for much longer than the grid.
    assert all(after - before < GRID + chunk for before, after in pairwise([0, *sorted(kept)]))


def test_a_growing_conversation_in_numbers() -> None:
    short = turns({100, 700, 760, 1500}, head=100, question=1500)
    ends = cuts(1510, short, 512)
    assert ends == [100, 512, 700, 760, 1024, 1500, 1510]
    assert worth_keeping(ends, short) == {100: "head", 1500: "question"}
    longer = short | turns({1800, 1830, 2600}, question=2600)
    ends = cuts(2610, longer, 512)
    assert ends == [100, 512, 700, 760, 1024, 1500, 1536, 1800, 2048, 2560, 2610]
    assert worth_keeping(ends, longer) == {100: "head", 2560: "question"}
