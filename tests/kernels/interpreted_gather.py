"""The gather of rows from host memory against indexing, in Triton's interpreter."""

import pytest
import torch

from bough.kernels.gather_rows import triton_kernels


@pytest.mark.parametrize("width", [1, 34, 36, 144, 2880, 4104])
@pytest.mark.parametrize("shape", [(0,), (1,), (2, 3), (1, 64)])
def test_rows_are_the_tables(width: int, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(width)
    table = torch.randint(0, 256, (11, width), dtype=torch.uint8, generator=generator)
    rows = torch.randint(0, 11, shape, generator=generator)
    found = triton_kernels.gather_rows(table, rows)
    assert found.dtype == torch.uint8 and torch.equal(found, table[rows])
