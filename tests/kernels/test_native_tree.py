"""The native tree builder gives the rows and weights of the reference."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from bough.kernels.tree import Candidates, Correction, TreeForm, pack_tree
from bough.kernels.tree.cpu import native_tree
from bough.kernels.tree.reference import best_first
from tests.kernels.native_library import needs_native

pytestmark = needs_native


@given(
    depths=st.integers(1, 15),
    width=st.integers(1, 24),
    chains=st.integers(0, 3),
    nodes=st.integers(0, 63),
    edges=st.booleans(),
    correct=st.booleans(),
    spine=st.sampled_from([1.0, -4.0, -1.0]),
    seed=st.integers(0, 2**32),
)
def test_native_is_the_reference(
    depths: int, width: int, chains: int, nodes: int, edges: bool, correct: bool, spine: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        """Return log probabilities of few values: many are equal, some minus infinity."""
        values = -torch.randint(0, 9, shape, generator=generator).float() / 4
        return values.masked_fill(values == -2.0, -torch.inf)

    # Ids of a depth differ; those of chains may be among them, and end with -1.
    ids = torch.stack([torch.randperm(40, generator=generator)[:width] for _ in range(depths)])
    scores = numbers(depths, width + 1, width) if edges else numbers(depths, width)
    tokens = torch.randint(-1, 40, (chains, depths), generator=generator)
    gains = numbers(chains, depths)
    correction = Correction(
        torch.tensor([-1.5, -0.6, -0.1]),
        torch.randn(2, 4, generator=generator) / 4,
        torch.randint(0, 2, (16,), generator=generator),
    )
    candidates = Candidates(ids, scores, tokens, gains)
    form = TreeForm(nodes, spine=spine, correction=correction if correct else None)
    found = native_tree(7, candidates, form)
    assert found is not None
    corrected = candidates._replace(scores=correction.applied(scores) if correct else scores)
    expected, parents, weights = best_first(7, corrected, nodes=nodes, spine=spine)
    packed, found_weights = found
    assert torch.equal(packed, pack_tree(expected, parents))
    assert found_weights.tolist() == weights + [-torch.inf] * (64 - len(weights))


def test_what_it_does_not_build() -> None:
    ids, empty = torch.arange(65)[None], torch.empty(0, 1)
    parts = Candidates(ids, torch.zeros(1, 65), empty.long(), empty)
    assert native_tree(7, parts, TreeForm(8)) is None  # too many columns
    parts = Candidates(ids[:, :8], torch.zeros(1, 8), empty.long(), empty)
    assert native_tree(7, parts, TreeForm(64)) is None
