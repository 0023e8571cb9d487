"""Rows of a quantised embedding table as floats, as `gguf.quants.dequantise` specifies."""

from torch import Tensor

from bough.gguf.quants import dequantise
from bough.gguf.types import QuantType
from bough.kernels.runtime.backends import runs


def embed(data: Tensor, type: QuantType, tokens: Tensor) -> Tensor:
    """Return rows `tokens` [...] of data [V, row bytes]: float32 [..., K]."""
    if runs("embedding", "triton", data.device):
        from bough.kernels.embedding import triton_kernels

        if type in triton_kernels.TYPES:
            return triton_kernels.embed(data, type, tokens)
    return dequantise(data[tokens], type)


def gather_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Return rows int64 [...] of table uint8 [V, n]: [..., n] on the device of `rows`.

    The table may be in the host's pinned memory.
    """
    if table.device == rows.device:
        return table[rows]
    from bough.kernels.embedding import triton_kernels

    return triton_kernels.gather_rows(table, rows)
