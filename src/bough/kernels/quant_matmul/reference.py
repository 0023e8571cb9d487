"""The matmul with a weight matrix that stays quantised, in plain torch, a slice of rows at a time."""

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from bough.gguf.quants import dequantise
from bough.gguf.types import QuantType

SLICE = 1 << 22  # weights expanded at a time: 16 MiB of float32


# Up to this number of rows a CPU is faster with the weights on the left, by a power of two of columns.
# Two AMD EPYC cores, 155 MB of float32 weights, ms for 1 / 2 / 4 / 8 / 16 / 24 rows: `linear` takes
# 12.8 / 20.9 / 18.5 / 15.7 / 19.1 / 22.5, the other way round 4.3 / 4.3 / 7.5 / 11.8 / 15.6 / 20.8.
# With a single vector torch uses one core and a third of its bandwidth.
FEW_ROWS = 16


def dense_matmul(x: Tensor, weight: Tensor, *, exact: bool = False) -> Tensor:
    """Return x [..., K] times weight [N, K], transposed: [..., N] in its type, or float32 if `exact`."""
    x = x.to(weight.dtype)
    if exact and weight.dtype != torch.float32:
        # Sums are kept in float32 anyway; rounded to 16 bits, logits would tie.
        return torch.mm(x.reshape(-1, x.shape[-1]), weight.T, out_dtype=torch.float32).reshape(
            *x.shape[:-1], -1
        )
    flat = x.reshape(-1, x.shape[-1])
    rows = len(flat)
    if weight.device.type != "cpu" or not 0 < rows <= FEW_ROWS:
        return linear(x, weight)
    columns = pad(flat, (0, 0, 0, max(2, 1 << (rows - 1).bit_length()) - rows))
    return torch.mm(weight, columns.T).T[:rows].reshape(*x.shape[:-1], -1)


def quant_matmul(x: Tensor, weight: Tensor, type: QuantType) -> Tensor:
    """Return x [..., K] times packed weight [N, row bytes], transposed: [..., N]."""
    rows = max(1, SLICE // x.shape[-1])
    parts = [linear(x, dequantise(part, type, dtype=x.dtype)) for part in weight.split(rows)]
    return torch.cat(parts, -1)
