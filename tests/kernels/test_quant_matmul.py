"""Products with packed weights against the expanded ones, over the slicing of large matrices."""

import pytest
import torch

from treeflash.gguf.quantise import quantise
from treeflash.gguf.quants import dequantise
from treeflash.gguf.types import QuantType
from treeflash.kernels.quant_matmul import dense_matmul, quant_matmul
from treeflash.kernels.quant_matmul.reference import SLICE


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (1, 7), (2, 4), (1, 16), (1, 17), (3, 20), (1, 0)])
def test_any_number_of_rows(shape: tuple[int, int]) -> None:
    weight, x = torch.randn(70, 48), torch.randn(*shape, 48)
    assert torch.allclose(dense_matmul(x, weight), x @ weight.T, rtol=1e-5, atol=1e-5)


def test_packed_product_is_the_expanded_product() -> None:
    rows = SLICE // 512 + 3  # one full slice and a rest
    packed = quantise(torch.randn(rows, 512), QuantType.Q8_0)
    x = torch.randn(2, 3, 512)
    expected = x @ dequantise(packed, QuantType.Q8_0).T
    assert torch.allclose(quant_matmul(x, packed, QuantType.Q8_0), expected, rtol=1e-5, atol=1e-4)
