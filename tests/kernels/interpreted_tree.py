"""The tree kernels against their references, in Triton's interpreter; run by test_tree_triton."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treeflash.kernels.tree import Correction, accept_path, best_tree, triton_kernels

torch.set_num_threads(1)
Built = tuple[torch.Tensor, torch.Tensor]  # packed tree, weights
ROWS = 24


@st.composite
def built(draw: st.DrawFn) -> tuple[Built, Built]:
    """The kernel's tree and the reference's."""
    depths, width, count = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(0, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ids = torch.stack([torch.randperm(8, generator=generator)[:width] for _ in range(depths)])
    scores = torch.randn(depths, width, generator=generator).log_softmax(-1)
    if draw(st.booleans()):
        scores = (scores * 2).round() / 2
    chains = torch.randint(-1, 8, (count, depths), generator=generator)
    chain_scores = -torch.randint(0, 4, (count, depths), generator=generator).float() / 2
    correction = None
    if draw(st.booleans()):
        table = torch.randn(2, 3, generator=generator)
        correction = Correction(torch.tensor([-2.0, -1.0]), table, torch.arange(depths).clamp(max=1))
    rows, spine = draw(st.sampled_from([ROWS, 64])), draw(st.sampled_from([1.0, -1.5, -6.0]))
    nodes = draw(st.integers(1, rows - 1))
    parts = (torch.tensor([99]), ids, scores, chains, chain_scores)
    options = {"nodes": nodes, "rows": rows, "spine": spine, "correction": correction}
    return triton_kernels.best_tree(*parts, **options), best_tree(*parts, **options)


@settings(max_examples=20, deadline=None)
@given(built())
def test_best_tree(trees: tuple[Built, Built]) -> None:
    found, wanted = trees
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_accept_path(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, ROWS))
    parents = [-1] + [data.draw(st.integers(-1, row - 1)) for row in range(1, rows)]
    tokens: list[int] = []
    for row in range(rows):
        taken = {tokens[other] for other in range(row) if parents[other] == parents[row]}
        tokens.append(data.draw(st.sampled_from([token for token in range(rows + 1) if token not in taken])))
    sampled = [data.draw(st.sampled_from(tokens)) for _ in range(rows)]
    ancestors = [1]
    for row in range(1, rows):
        ancestors.append((ancestors[parents[row]] if parents[row] >= 0 else 0) | 1 << row)
    stops = torch.tensor(data.draw(st.lists(st.sampled_from(tokens), max_size=2)), dtype=torch.int64)
    limit = torch.tensor([data.draw(st.sampled_from([1, 2, 64]))])
    parts = [torch.tensor(part) for part in (tokens, parents, ancestors, sampled)]
    counts = torch.zeros(2, rows + 1)
    found = triton_kernels.accept_path(*parts, stops=stops, limit=limit, counts=counts[0])
    wanted = accept_path(*parts, stops=stops, limit=limit, counts=counts[1])
    assert torch.equal(found, wanted.flat)
    assert torch.equal(*counts)
