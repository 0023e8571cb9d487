"""The product with a weight matrix that stays quantised, in plain torch, a slice of rows at a time."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from treeflash.gguf.quants import dequantise
from treeflash.gguf.types import QuantType

SLICE = 1 << 22  # weights expanded at a time: 16 MiB of float32


def quant_matmul(x: Tensor, weight: Tensor, type: QuantType) -> Tensor:
    """x [..., K] times packed weight [N, row bytes], transposed: [..., N]."""
    rows = max(1, SLICE // x.shape[-1])
    parts = [linear(x, dequantise(part, type, dtype=x.dtype)) for part in weight.split(rows)]
    return torch.cat(parts, -1)
