"""The walk against a plain search for the longest matching path."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from treeflash.spec.verify import walk


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    rows = draw(st.integers(1, 24))
    parents = [-1] + [draw(st.integers(0, row - 1)) for row in range(1, rows)]
    tokens: list[int] = []
    for row in range(rows):
        # Siblings carry different tokens, as every tree builder makes them.
        taken = {tokens[other] for other in range(row) if parents[other] == parents[row]}
        tokens.append(draw(st.sampled_from([token for token in range(rows + 1) if token not in taken])))
    chosen = [draw(st.sampled_from(tokens)) for _ in range(rows)]
    return tokens, parents, chosen


@given(trees())
def test_walk_is_the_longest_path_of_the_targets_choices(
    tree: tuple[list[int], list[int], list[int]],
) -> None:
    tokens, parents, chosen = tree
    result = walk(tokens, parents, chosen)
    # Depth of every row whose whole path agrees with the choices above it.
    agreeing = {0: 1}
    for row in range(1, len(tokens)):
        if parents[row] in agreeing and chosen[parents[row]] == tokens[row]:
            agreeing[row] = agreeing[parents[row]] + 1
    assert len(result.rows) == max(agreeing.values())
    assert agreeing[result.rows[-1]] == len(result.rows)
    assert all(parents[child] == parent for parent, child in itertools.pairwise(result.rows))
    assert result.next_token == chosen[result.rows[-1]]
