"""Packed rows in the place of floats, in Triton's interpreter; see test_interpreted."""

from dataclasses import replace

import torch

from bough.gguf.types import QuantType
from bough.kernels.quant_matmul import packed, triton_kernels
from bough.kernels.quant_matmul.layout import LAYOUTS, pack, unpack
from bough.models.weights import Matrix, Projections
from tests.kernels.interpreter import sum_in_order
from tests.kernels.test_quant_matmul_layout import random_blocks

sum_in_order()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def test_packed_rows_in_the_place_of_x() -> None:
    x = torch.randn(5, 512) * 1e4
    tiles = [pack(random_blocks(type, 130, 512), type) for type in (QuantType.Q4_K, QuantType.Q8_0)]
    matrices, rows = tuple(Matrix(tile, None) for tile in tiles), triton_kernels.pack_rows(x)
    assert rows.padded_columns == 512
    parts = Projections(matrices, (130, 130), None)(rows)
    for matrix, tile, part in zip(matrices, tiles, parts, strict=True):
        assert error(matrix(rows), x.double() @ unpack(tile).double().T) < 1e-3
        assert torch.equal(matrix(rows), part)
    rows_in_parts(matrices, x[:1] * torch.randn(61, 1))


def rows_in_parts(matrices: tuple[Matrix, ...], x: torch.Tensor) -> None:
    """A card with little shared memory multiplies some layouts in parts: the bits are the same."""
    whole = packed.max_rows
    rows = triton_kernels.pack_rows(x)
    joined = Projections(matrices, (130, 130), None)
    for count in (61, 50, 49):
        some = replace(rows, rows=count, scale=rows.scale[:count])
        expected = joined(some)
        packed.max_rows = lambda layout, device: 48 if layout.scales == LAYOUTS[QuantType.Q4_K].scales else 64
        found = joined(some)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        packed.max_rows = whole
