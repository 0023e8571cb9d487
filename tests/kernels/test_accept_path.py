"""The accepted path against a plain search for the longest matching path."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from bough.kernels.tree.reference import accept_path


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    rows = draw(st.integers(1, 24))
    parents = [-1] + [draw(st.integers(0, row - 1)) for row in range(1, rows)]
    tokens: list[int] = []
    for row in range(rows):
        # Siblings carry different tokens, as every tree builder makes them.
        taken = {tokens[other] for other in range(row) if parents[other] == parents[row]}
        tokens.append(draw(st.sampled_from([token for token in range(rows + 1) if token not in taken])))
    sampled = [draw(st.sampled_from(tokens)) for _ in range(rows)]
    return tokens, parents, sampled


@given(trees())
def test_the_path_is_the_longest_that_the_target_sampled(
    tree: tuple[list[int], list[int], list[int]],
) -> None:
    tokens, parents, sampled = tree
    path = accept_path(tokens, parents, sampled)
    # Depth of every row whose whole path agrees with the samples above it.
    agreeing = {0: 1}
    for row in range(1, len(tokens)):
        if parents[row] in agreeing and sampled[parents[row]] == tokens[row]:
            agreeing[row] = agreeing[parents[row]] + 1
    assert len(path) == max(agreeing.values())
    assert agreeing[path[-1]] == len(path)
    assert all(parents[child] == parent for parent, child in itertools.pairwise(path))
