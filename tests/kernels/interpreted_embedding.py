"""The embedding kernel against the decoders of the types, in Triton's interpreter."""

import pytest
import torch

from bough.gguf.quants import dequantise
from bough.gguf.types import QuantType
from bough.kernels.embedding import triton_kernels
from tests.kernels.test_quant_matmul_layout import random_blocks

torch.set_num_threads(1)


@pytest.mark.parametrize("type", triton_kernels.TYPES, ids=lambda type: type.name)
@pytest.mark.parametrize("columns", [256, 768, 96])
def test_rows_are_what_their_blocks_say(type: QuantType, columns: int) -> None:
    if columns % type.block_elements:
        columns = 512
    data = random_blocks(type, 9, columns)
    tokens = torch.tensor([[8, 0, 3], [3, 1, 7]])
    assert torch.equal(triton_kernels.embed(data, type, tokens), dequantise(data[tokens], type))
