"""Rows of a quantised table as floats; `gguf.quants.dequantise` says what they are."""

from torch import Tensor

from treeflash.gguf.quants import dequantise
from treeflash.gguf.types import QuantType

__all__ = ["embed"]


def embed(data: Tensor, type: QuantType, tokens: Tensor) -> Tensor:
    """Rows `tokens` [...] of data [V, row bytes]: float32 [..., K]."""
    if data.is_cuda:
        from treeflash.kernels.embedding import triton_kernels as kernel

        if type in kernel.TYPES:
            return kernel.embed(data, type, tokens)
    return dequantise(data[tokens], type)
