"""Chunk ends depend on the text before them only, so that prompts with a common prefix share snapshots."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bough.prefix_cache.boundaries import GRID, SnapshotKind, chunk_ends, snapshot_positions

CHUNKS = st.sampled_from([1, 7, 64, 512, 2048])
TURNS = st.sets(st.integers(1, 30_000), max_size=60)


def turns(positions: set[int], **kinds: int) -> dict[int, SnapshotKind]:
    found: dict[int, SnapshotKind] = dict.fromkeys(sorted(positions), "turn")
    return found | {position: kind for kind, position in kinds.items()}  # ty: ignore[invalid-return-type]


@given(TURNS, TURNS, st.integers(1, 30_000), st.integers(1, 30_000), st.integers(1, 30_000), CHUNKS)
def test_a_common_prefix_is_split_the_same_way(
    one: set[int], other: set[int], common: int, longer: int, further: int, chunk: int
) -> None:
    shared = {position for position in one if position <= common}
    first = chunk_ends(common + longer, turns(shared | {common + position for position in one}), chunk)
    second = chunk_ends(common + further, turns(shared | {common + position for position in other}), chunk)
    # Whether a chunk ends after the last common token depends on the next one.
    assert [end for end in first if end < common] == [end for end in second if end < common]


@given(TURNS, st.integers(1, 30_000), CHUNKS)
def test_lengths_of_chunks(positions: set[int], length: int, chunk: int) -> None:
    found = chunk_ends(length, turns(positions), chunk)
    assert found == sorted(set(found)) and found[-1] == length
    assert all(after - before <= chunk for before, after in pairwise([0, *found]))
    assert set(range(chunk, length, chunk)) <= set(found)
    for before, after in pairwise([0, *found[:-1]]):
        assert after % chunk == 0 or after - before >= max(chunk // 16, after // 16)
        assert after % chunk == 0 or after in positions


@given(TURNS, st.integers(1, 30_000), st.integers(1, 30_000), st.integers(1, 30_000), CHUNKS)
def test_snapshots_are_at_chunk_ends_and_never_rounded_up(
    positions: set[int], head: int, question: int, length: int, chunk: int
) -> None:
    boundaries = turns(positions, head=head, question=question) if head != question else turns(positions)
    ends = chunk_ends(length, boundaries, chunk)
    kept = snapshot_positions(ends, boundaries)
    assert set(kept) <= set(ends[:-1])
    of_kind = {kind: end for end, kind in kept.items()}
    assert all(
        of_kind[kind] <= position
        for position, kind in boundaries.items()
        if kind in of_kind and kind != "turn"
    )
    if len(ends) > 1:
        assert ends[-2] in kept
    # No stretch without a snapshot is much longer than the grid.
    assert all(after - before < GRID + chunk for before, after in pairwise([0, *sorted(kept)]))


def test_a_growing_conversation() -> None:
    short = turns({100, 700, 760, 1500}, head=100, question=1500)
    ends = chunk_ends(1510, short, 512)
    assert ends == [100, 512, 700, 760, 1024, 1500, 1510]
    assert snapshot_positions(ends, short) == {100: "head", 1500: "question"}
    longer = short | turns({1800, 1830, 2600}, question=2600)
    ends = chunk_ends(2610, longer, 512)
    assert ends == [100, 512, 700, 760, 1024, 1500, 1536, 1800, 2048, 2560, 2610]
    assert snapshot_positions(ends, longer) == {100: "head", 2560: "question"}
