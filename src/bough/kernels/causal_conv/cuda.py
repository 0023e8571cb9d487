"""The CUDA C++ kernel of the short convolution over a path and a tree: what it takes, and its launch."""

from ctypes import c_float, c_int, c_longlong, c_void_p
from functools import cache

import torch
from torch import Tensor

from bough.kernels.causal_conv.records import ConvRows, ConvWeights, DeltaBuffers, DeltaHeads, empty_heads
from bough.kernels.causal_conv.reference import L2_EPS
from bough.kernels.runtime.device import card_of
from bough.kernels.runtime.driver import Kernel, cuda_module
from bough.kernels.runtime.sources import pdl_source
from bough.kernels.tree import MAX_ROWS

DIM = 128  # of a head
TAPS = 4


def source() -> str:
    return pdl_source("causal_conv", "tree.cu")


def takes_tree_conv(
    inputs: Tensor, alpha: Tensor, beta: Tensor, weights: ConvWeights, buffers: DeltaBuffers, rows: ConvRows
) -> bool:
    sizes = weights.head_dim == DIM and weights.taps.shape[1] == TAPS and inputs.shape[-2] <= MAX_ROWS
    return sizes and buffers.window.dtype in (torch.float16, torch.float32)


def warps_of(sequences: int) -> int:
    """Return the warps of a block: 16 are one block an SM, which is what one sequence needs."""
    return 16 if sequences == 1 else 8 if sequences <= 4 else 4


def defines(half: bool, warps: int, overlap: bool) -> dict[str, int]:
    return {"HALF": int(half), "WARPS": warps, "OVERLAP": int(overlap)}


@cache
def _kernel(half: bool, warps: int, device: torch.device) -> Kernel:
    card = card_of(device)
    module = cuda_module(source(), defines(half, warps, card.pdl), device)
    return module.kernel("tree_conv", threads=32 * warps, overlap=card.pdl)


def _strided(x: Tensor) -> Tensor:
    """Return [..., N] as rows of one stride, aligned to 16 bytes."""
    flat = x.flatten(0, -2)
    if flat.stride(1) == 1 and flat.stride(0) % 4 == 0 and flat.data_ptr() % 16 == 0:
        return flat
    return flat.contiguous()


def tree_conv(
    inputs: Tensor, alpha: Tensor, beta: Tensor, weights: ConvWeights, buffers: DeltaBuffers, rows: ConvRows
) -> DeltaHeads:
    """See reference.tree_conv; rows after a path, and padding, are not written."""
    batch, (count, channels), value_heads = len(rows.slots), inputs.shape[-2:], len(weights.decay)
    key_heads, length, saved = weights.key_heads, rows.path.shape[1], buffers.tree_inputs.shape[1]
    parameters = (weights.taps, weights.decay, weights.bias)
    saves = (buffers.window, buffers.tree_inputs, buffers.tree_gates)
    tables, first = (rows.slots, rows.path, rows.count, rows.index), rows.first
    assert channels == (2 * key_heads + value_heads) * DIM, f"{channels} channels"
    room = MAX_ROWS if first is not None else min(saved, MAX_ROWS)
    assert count <= room, f"{count} rows, room for {room}"
    for part in (*parameters, *saves, *tables):
        assert part.is_contiguous(), f"{part.shape}, strides {part.stride()}"
    half = buffers.window.dtype == torch.float16
    assert buffers.tree_inputs.dtype == buffers.window.dtype, f"{buffers.tree_inputs.dtype}"
    floats = (inputs, alpha, beta, *parameters, buffers.tree_gates)
    assert all(part.dtype == torch.float32 for part in floats)
    assert all(part.dtype == torch.int64 for part in tables)
    inputs = _strided(inputs)
    alpha, beta = (x.flatten(0, -2) for x in (alpha, beta))
    alpha, beta = (x if x.stride(1) == 1 else x.contiguous() for x in (alpha, beta))
    heads = empty_heads(inputs, weights, rows, count)
    strides = (inputs.stride(0), alpha.stride(0), beta.stride(0))
    numbers = (count, length, saved, key_heads, value_heads)
    _kernel(half, warps_of(batch), inputs.device)(
        (2 * key_heads + value_heads, batch),
        [
            *(inputs, alpha, beta, *parameters, *saves, *tables, c_void_p(None) if first is None else first),
            *heads,
            *map(c_longlong, strides),
            *map(c_int, numbers),
            *map(c_float, (L2_EPS, DIM**-0.5)),
        ],
    )
    return heads
