"""The tree kernels against their references, in Triton's interpreter."""

from itertools import chain

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.kernels.tree import Acceptance, Correction, accept_path, best_tree, triton_kernels

torch.set_num_threads(1)
Built = tuple[torch.Tensor, torch.Tensor]  # packed tree, weights
ROWS = 24


@st.composite
def built(draw: st.DrawFn) -> tuple[Built, Built]:
    """The kernel's tree and the reference's."""
    depths, width, count = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(0, 2))
    sequences = draw(st.sampled_from([1, 1, 2, 3]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ids = torch.stack([torch.randperm(8, generator=generator)[:width] for _ in range(sequences * depths)])
    ids = ids.view(sequences, depths, width)
    shape = (sequences, depths, width + 1, width) if draw(st.booleans()) else (sequences, depths, width)
    scores = torch.randn(shape, generator=generator).log_softmax(-1)
    if draw(st.booleans()):
        scores = (scores * 2).round() / 2
    chains = torch.randint(-1, 8, (sequences, count, depths), generator=generator)
    chain_scores = -torch.randint(0, 4, (sequences, count, depths), generator=generator).float() / 2
    correction = None
    if draw(st.booleans()):
        table = torch.randn(2, 3, generator=generator)
        correction = Correction(torch.tensor([-2.0, -1.0]), table, torch.arange(depths).clamp(max=1))
    rows, spine = draw(st.sampled_from([ROWS, 64])), draw(st.sampled_from([1.0, -1.5, -6.0]))
    nodes = draw(st.integers(1, rows - 1))
    parts = (99 + torch.arange(sequences), ids, scores, chains, chain_scores)
    options = {"nodes": nodes, "rows": rows, "spine": spine, "correction": correction}
    return triton_kernels.best_tree(*parts, **options), best_tree(*parts, **options)


@settings(max_examples=20, deadline=None)
@given(built())
def test_best_tree(trees: tuple[Built, Built]) -> None:
    found, wanted = trees
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


def drawn_tree(data: st.DataObject, rows: int) -> tuple[list[int], ...]:
    """Tokens, parents, ancestor bits and what is sampled after each row."""
    parents = [-1] + [data.draw(st.integers(-1, row - 1)) for row in range(1, rows)]
    tokens: list[int] = []
    for row in range(rows):
        taken = {tokens[other] for other in range(row) if parents[other] == parents[row]}
        tokens.append(data.draw(st.sampled_from([token for token in range(rows + 1) if token not in taken])))
    sampled = [data.draw(st.sampled_from(tokens)) for _ in range(rows)]
    ancestors = [1]
    for row in range(1, rows):
        ancestors.append((ancestors[parents[row]] if parents[row] >= 0 else 0) | 1 << row)
    return tokens, parents, ancestors, sampled


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_accept_path(data: st.DataObject) -> None:
    """One tree, or ragged rows of several with padding after them."""
    sizes = [data.draw(st.integers(1, ROWS))]
    if data.draw(st.booleans()):
        sizes = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=4))
    trees = [drawn_tree(data, size) for size in sizes if size]
    spare = [[0] * data.draw(st.integers(0, 3))] * 4 if len(sizes) > 1 else [[]] * 4
    parts = [torch.tensor([*chain(*part)], dtype=torch.int64) for part in zip(*trees, spare, strict=True)]
    if not trees:
        parts = [torch.zeros(3, dtype=torch.int64)] * 4
    first = torch.tensor([0, *sizes]).cumsum(0) if len(sizes) > 1 else None
    stops = torch.tensor([data.draw(st.integers(-1, ROWS)) for _ in range(8)]).view(4, 2)
    limits = torch.tensor([data.draw(st.sampled_from([1, 2, 64])) for _ in sizes])
    slots = torch.randperm(4)[: len(sizes)]
    counts = torch.zeros(2, 4, ROWS + 2)
    tables = {"first": first, "slots": slots, "stops": stops, "limits": limits}
    found = Acceptance(triton_kernels.accept_path(*parts, **tables, counts=counts[0]))
    wanted = accept_path(*parts, **tables, counts=counts[1])
    for name in ("counts", "last_rows", "rows", "tokens", "source"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    some = wanted.counts > 0
    for name in ("next_tokens", "path_bits"):
        assert torch.equal(getattr(found, name)[some], getattr(wanted, name)[some]), name
    assert torch.equal(*counts)
