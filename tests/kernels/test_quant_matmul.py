"""Products with packed weights against the expanded ones, over the slicing of large matrices."""

import pytest
import torch

from bough.gguf.quantise import quantise
from bough.gguf.quants import dequantise
from bough.gguf.types import QuantType
from bough.kernels.quant_matmul import dense_matmul, pack, packed_matmul, packed_matmuls, quant_matmul
from bough.kernels.quant_matmul.reference import SLICE
from bough.models.weights import Matrix, Projections


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (1, 7), (2, 4), (1, 16), (1, 17), (3, 20), (1, 0)])
def test_any_number_of_rows(shape: tuple[int, int]) -> None:
    weight, x = torch.randn(70, 48), torch.randn(*shape, 48)
    assert torch.allclose(dense_matmul(x, weight), x @ weight.T, rtol=1e-5, atol=1e-5)


def test_packed_matmul_equals_the_expanded_one() -> None:
    rows = SLICE // 512 + 3  # one full slice and a rest
    packed = quantise(torch.randn(rows, 512), QuantType.Q8_0)
    x = torch.randn(2, 3, 512)
    expected = x @ dequantise(packed, QuantType.Q8_0).T
    assert torch.allclose(quant_matmul(x, packed, QuantType.Q8_0), expected, rtol=1e-5, atol=1e-4)


def test_a_matrix_in_tiles_is_the_matrix() -> None:
    packed = quantise(torch.randn(70, 512), QuantType.Q4_K)
    x = torch.randn(2, 3, 512)
    in_tiles, in_blocks = Matrix(pack(packed, QuantType.Q4_K), None), Matrix(packed, QuantType.Q4_K)
    assert torch.allclose(in_tiles(x), in_blocks(x), rtol=1e-5, atol=1e-4)
    assert in_tiles(x[:, :0]).shape == (2, 0, 70)


def test_matrices_side_by_side_in_tiles() -> None:
    types, sizes = (QuantType.Q4_K, QuantType.Q8_0), (40, 24)
    packed = [quantise(torch.randn(rows, 256), type) for rows, type in zip(sizes, types, strict=True)]
    tiles = [pack(data, type) for data, type in zip(packed, types, strict=True)]
    x, bias = torch.randn(1, 5, 256), torch.randn(64)
    projections = Projections(tuple(Matrix(tile, None) for tile in tiles), sizes, bias)
    for found, data, type, added in zip(projections(x), packed, types, bias.split(sizes), strict=True):
        expected = x @ dequantise(data, type).T + added
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-4)
    out = torch.full((5, 70), float("nan"))
    packed_matmul(x[0], tiles[0], out[:, 10:50])
    assert torch.equal(out[:, 10:50], packed_matmuls(x[0], tiles)[:, :40])
    assert bool(out[:, :10].isnan().all()) and bool(out[:, 50:].isnan().all())
