"""The commit of one sequence on a CPU does what the reference does."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from bough.kernels.commit import host, reference


@given(st.integers(1, 64), st.integers(0, 2**32), st.integers(0, 90))
def test_host_is_the_reference(rows: int, seed: int, start: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(0, limit, (1,), generator=generator))

    ancestors = [1]
    for row in range(1, rows):
        ancestors.append(ancestors[below(row)] | 1 << row)
    signed = torch.tensor([[bits - 2**64 if bits >= 2**63 else bits for bits in ancestors]])
    last, slots = below(rows), torch.tensor([1])
    path = [row for row in range(rows) if ancestors[last] >> row & 1]
    table = torch.randperm(6, generator=generator).view(2, 3)
    states = [
        {
            "path": torch.full((2, 64), 9),
            "count": torch.tensor([5, 6]),
            "lengths": torch.tensor([3, start]),
        }
        for _ in range(2)
    ]
    planes = [
        [torch.arange(2 * 6 * 64 * 2.0).view(1, 6, 2, 64, 2) * sign for sign in (1, -1)] for _ in range(2)
    ]
    kept = reference.commit_path(signed, torch.tensor([last]), slots, **states[0])
    reference.move_rows(planes[0], kept, slots, table)
    before = host.commit_rows(path, 1, size=rows, **states[1])
    host.move_rows(planes[1], path, before, table[1])
    assert before == int(kept.starts) and len(path) == int(kept.counts)
    for one, other in zip([*states[0].values(), *planes[0]], [*states[1].values(), *planes[1]], strict=True):
        assert torch.equal(one, other)
