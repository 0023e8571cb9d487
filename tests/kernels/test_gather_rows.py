"""Rows of a table that may lie in the host's memory."""

import torch

from bough.gguf.quants import dequantise
from bough.gguf.types import QuantType
from bough.kernels.embedding import embed, gather_rows
from bough.models.weights import Embedding
from tests.kernels.test_quant_matmul_layout import random_blocks


def test_an_embedding_beside_its_tokens_is_indexed() -> None:
    table = torch.randint(0, 256, (7, 68), dtype=torch.uint8)
    table.view(-1, 34)[:, :2] = torch.tensor([0.5], dtype=torch.float16).view(torch.uint8)
    tokens = torch.tensor([[3, 0, 6]])
    assert torch.equal(gather_rows(table, tokens), table[tokens])
    found = Embedding(table, QuantType.Q8_0)(tokens)
    assert torch.equal(found, dequantise(table[tokens], QuantType.Q8_0))


def test_embedding_of_any_shape_of_tokens() -> None:
    data, tokens = random_blocks(QuantType.Q4_0, 5, 64), torch.tensor([[4, 0], [1, 1]])
    assert torch.equal(embed(data, QuantType.Q4_0, tokens)[1, 0], dequantise(data[1:2], QuantType.Q4_0)[0])
