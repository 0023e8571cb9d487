"""rows.cu on a CPU, by its own launch code: rows that a matmul reads next, against the reference."""

import pytest
import torch
from torch import Tensor

from bough.kernels.norm_rope import cuda, reference
from bough.kernels.quant_matmul import PackedRows
from tests.kernels.cards import CARDS
from tests.kernels.emulator import EXCHANGE, HALVES, Emulation, emulate, needs_compiler

__all__ = ["emulate"]
pytestmark = needs_compiler
EPS = 1e-6


def check(found: PackedRows, expected: Tensor) -> None:
    """Compare packed rows with floats [..., K], row by row; what fills a row up is zero."""
    expected = expected.flatten(0, -2).double()
    halves = found.halves().double()
    assert not bool(halves[:, expected.shape[1] :].any())
    rows = halves[:, : expected.shape[1]] * found.scale[: found.rows, None].double()
    assert float(((rows - expected).norm(dim=1) / expected.norm(dim=1)).max()) < 5e-4


@pytest.mark.parametrize(("rows", "width"), [(3, 100), (5, 1024)])
def test_rows_before_a_matmul(emulate: Emulation, rows: int, width: int) -> None:
    emulate(cuda, CARDS["RTX 4090"], HALVES | EXCHANGE, cuda.kernel_of, backwards=width == 100)
    torch.manual_seed(rows)
    x, y = (torch.randn(1, rows, width) * torch.logspace(-4, 4, rows)[:, None] for _ in range(2))
    weight = torch.randn(width)
    total, packed = cuda.add_rms_norm(x, y, weight, EPS)
    expected_total, expected = reference.add_rms_norm(x, y, weight, EPS)
    assert torch.equal(total, expected_total)
    check(packed, expected)
    check(cuda.add_rms_norm(x, None, weight, EPS)[1], reference.rms_norm(x, weight, EPS))
    check(cuda.silu_mul(x, y), reference.silu_mul(x, y))


@pytest.mark.parametrize(("heads", "dim"), [(5, 32), (3, 128)])
def test_gated_heads(emulate: Emulation, heads: int, dim: int) -> None:
    emulate(cuda, CARDS["RTX 4090"], HALVES | EXCHANGE, cuda.kernel_of)
    torch.manual_seed(heads)
    x, gate, weight = torch.randn(1, 9, heads, dim), torch.randn(1, 9, heads * dim), torch.randn(dim)
    check(cuda.gated_rms_norm(x, gate, weight, EPS), reference.gated_rms_norm(x, gate, weight, EPS))
