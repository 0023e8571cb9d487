"""Matmuls by warp-group mma: the order of their rows, and the kernel on a CPU."""

from pathlib import Path

import pytest
import torch

from bough.gguf.types import QuantType
from bough.kernels.quant_matmul.layout import pack, unpack
from tests.kernels.emulated_matmul import emulated_matmul, emulated_pack
from tests.kernels.emulator import needs_compiler
from tests.kernels.test_quant_matmul_layout import random_blocks

Q = QuantType


@needs_compiler
@pytest.mark.parametrize("rows", [1, 13, 64, 70])
def test_both_orders_hold_the_same_rows(rows: int, tmp_path: Path) -> None:
    """A pair of columns of each of four groups is where a thread has eight columns of a weight's row."""
    torch.manual_seed(rows)
    x = torch.randn(rows, 300) * torch.logspace(-3, 3, rows)[:, None]
    plain, grouped = (emulated_pack(x, tmp_path, grouped=each) for each in (False, True))
    assert torch.equal(plain.halves(), grouped.halves()) and torch.equal(plain.scale, grouped.scale)
    found = plain.halves().float() * plain.scale[:, None]
    assert not bool(found[:, 300:].any())
    assert (found[:, :300] - x).norm() <= 3e-4 * x.norm()
    if rows > 64:
        assert not grouped.grouped
        return
    assert plain.bucket is not None
    group = grouped.data.view(-1, 4, plain.bucket, 8)
    columns = plain.halves().view(rows, -1, 32)
    for place in range(4):
        wanted = [8 * q + 2 * place + e for q in range(4) for e in range(2)]
        assert torch.equal(group[:, place, :rows].transpose(0, 1), columns[..., wanted])


@needs_compiler
@pytest.mark.parametrize(
    ("type", "rows", "grid"), [(Q.Q4_K, 24, 3), (Q.Q6_K, 8, 2), (Q.Q8_0, 13, 1), (Q.Q5_K, 40, 4)]
)
def test_the_kernel_on_a_cpu(type: QuantType, rows: int, grid: int, tmp_path: Path) -> None:
    """Also where blocks of rows are split over several blocks of the grid."""
    torch.manual_seed(grid)
    weight = pack(random_blocks(type, 200, 768), type)
    x = torch.randn(rows, 768) * torch.logspace(-3, 3, rows)[:, None]
    found = emulated_matmul(emulated_pack(x, tmp_path, grouped=True), weight, tmp_path, grid=grid)
    expected = x.double() @ unpack(weight).double().T
    assert bool(found.isfinite().all())
    for row, other in zip(found.double(), expected, strict=True):
        assert (row - other).norm() <= 1e-3 * other.norm()
