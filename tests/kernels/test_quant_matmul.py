"""Products with packed weights against the expanded ones, over the slicing of large matrices."""

import torch

from treeflash.gguf.quantise import quantise
from treeflash.gguf.quants import dequantise
from treeflash.gguf.types import QuantType
from treeflash.kernels.quant_matmul import quant_matmul
from treeflash.kernels.quant_matmul.reference import SLICE


def test_packed_product_is_the_expanded_product() -> None:
    rows = SLICE // 512 + 3  # one full slice and a rest
    packed = quantise(torch.randn(rows, 512), QuantType.Q8_0)
    x = torch.randn(2, 3, 512)
    expected = x @ dequantise(packed, QuantType.Q8_0).T
    assert torch.allclose(quant_matmul(x, packed, QuantType.Q8_0), expected, rtol=1e-5, atol=1e-4)
