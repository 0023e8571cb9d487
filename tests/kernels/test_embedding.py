"""Embedding rows; the kernel runs in its own process: Triton chooses the interpreter at import."""

import torch

from bough.gguf.quants import dequantise
from bough.gguf.types import QuantType
from bough.kernels.embedding import embed
from tests.kernels.test_quant_matmul_layout import random_blocks


def test_any_shape_of_tokens() -> None:
    data = random_blocks(QuantType.Q4_0, 5, 64)
    tokens = torch.tensor([[4, 0], [1, 1]])
    assert torch.equal(embed(data, QuantType.Q4_0, tokens)[1, 0], dequantise(data[1:2], QuantType.Q4_0)[0])
