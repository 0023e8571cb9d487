"""The commit of one sequence on a CPU does what the reference does."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from treeflash.kernels.commit import host, reference


@given(st.integers(1, 64), st.integers(0, 2**32), st.integers(0, 90))
def test_host_is_the_reference(rows: int, seed: int, start: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(0, limit, (1,), generator=generator))

    ancestors = [1]
    for row in range(1, rows):
        ancestors.append(ancestors[below(row)] | 1 << row)
    signed = torch.tensor([[bits - 2**64 if bits >= 2**63 else bits for bits in ancestors]])
    last, slots = torch.tensor([below(rows + 1) - 1]), torch.tensor([1])
    table = torch.randperm(6, generator=generator).view(2, 3)
    found = []
    for way in (host, reference):
        state = {
            "path": torch.full((2, 64), 9),
            "count": torch.tensor([5, 6]),
            "lengths": torch.tensor([3, start]),
        }
        planes = [torch.arange(2 * 6 * 64 * 2.0).view(1, 6, 2, 64, 2) * sign for sign in (1, -1)]
        kept = way.commit_path(signed, last, slots, **state)
        way.move_rows(planes, kept, slots, table)
        found.append([kept.counts, kept.starts, kept.source, *state.values(), *planes])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype
