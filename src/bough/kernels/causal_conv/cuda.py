"""The CUDA C++ kernel of the short convolution over a path and a tree: what it takes, and its launch."""

from ctypes import c_float, c_int, c_longlong, c_void_p
from functools import cache, partial

import torch
from torch import Tensor

from bough.kernels.causal_conv.reference import L2_EPS
from bough.kernels.runtime.backends import runs
from bough.kernels.runtime.device import card_of
from bough.kernels.runtime.driver import Kernel, Module
from bough.kernels.runtime.nvrtc import compile_cubin
from bough.kernels.runtime.sources import pdl_source
from bough.kernels.tree import MAX_ROWS

DIM = 128  # of a head
TAPS = 4


def source() -> str:
    return pdl_source("causal_conv", "tree.cu")


def takes(inputs: Tensor, weight: Tensor, alpha: Tensor, window: Tensor, key_heads: int) -> bool:
    """Return whether the kernel takes such heads and types on this card."""
    dim = weight.shape[0] // (2 * key_heads + alpha.shape[-1])
    return (
        dim == DIM
        and weight.shape[1] == TAPS
        and inputs.shape[-2] <= MAX_ROWS
        and window.dtype in (torch.float16, torch.float32)
        and runs("tree convolution", "cuda", inputs.device)
    )


def warps_of(sequences: int) -> int:
    """Return the warps of a block: 16 are one block an SM, which is what one sequence needs."""
    return 16 if sequences == 1 else 8 if sequences <= 4 else 4


def defines(half: bool, warps: int, overlap: bool) -> dict[str, int]:
    """Return the macros of tree.cu."""
    return {"HALF": int(half), "WARPS": warps, "OVERLAP": int(overlap)}


@cache
def _kernel(half: bool, warps: int, device: torch.device) -> Kernel:
    card = card_of(device)
    build = partial(compile_cubin, source(), defines=defines(half, warps, card.pdl), arch=card.target)
    return Module(build, device).kernel("tree_conv", threads=32 * warps, overlap=card.pdl)


def _strided(x: Tensor) -> Tensor:
    """Return [..., N] as rows of one stride, aligned to 16 bytes."""
    flat = x.flatten(0, -2)
    if flat.stride(1) == 1 and flat.stride(0) % 4 == 0 and flat.data_ptr() % 16 == 0:
        return flat
    return flat.contiguous()


def tree_conv(
    inputs: Tensor,
    alpha: Tensor,
    beta: Tensor,
    weight: Tensor,
    decay: Tensor,
    bias: Tensor,
    *,
    window: Tensor,
    tree_inputs: Tensor,
    tree_gates: Tensor,
    slots: Tensor,
    path: Tensor,
    count: Tensor,
    index: Tensor,
    key_heads: int,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See reference.tree_conv; rows after a path, and padding, are not written."""
    batch, (rows, channels) = len(slots), inputs.shape[-2:]
    length, value_heads, saved = path.shape[1], alpha.shape[-1], tree_inputs.shape[1]
    assert channels == (2 * key_heads + value_heads) * DIM, f"{channels} channels"
    assert rows <= (MAX_ROWS if first is not None else min(saved, MAX_ROWS)), f"{rows} rows, room for {saved}"
    for part in (weight, decay, bias, window, tree_inputs, tree_gates, slots, path, count, index):
        assert part.is_contiguous(), f"{part.shape}, strides {part.stride()}"
    assert window.dtype == tree_inputs.dtype, f"{window.dtype}, {tree_inputs.dtype}"
    assert all(x.dtype == torch.float32 for x in (inputs, alpha, beta, weight, decay, bias, tree_gates))
    assert all(x.dtype == torch.int64 for x in (slots, path, count, index))
    inputs = _strided(inputs)
    alpha, beta = (x.flatten(0, -2) for x in (alpha, beta))
    alpha, beta = (x if x.stride(1) == 1 else x.contiguous() for x in (alpha, beta))

    def new(*shape: int) -> Tensor:
        lead = (batch,) if first is None else ()
        return torch.empty(*lead, *shape, dtype=torch.float32, device=inputs.device)

    joined = rows + (length if first is None else batch * length)
    q, k, v = new(rows, key_heads, DIM), new(joined, key_heads, DIM), new(joined, value_heads, DIM)
    g, strength = new(joined, value_heads), new(joined, value_heads)
    strides = (inputs.stride(0), alpha.stride(0), beta.stride(0))
    numbers = (rows, length, saved, key_heads, value_heads)
    _kernel(window.dtype == torch.float16, warps_of(batch), inputs.device)(
        (2 * key_heads + value_heads, batch),
        [
            *(inputs, alpha, beta, weight, decay, bias, window, tree_inputs, tree_gates),
            *(slots, path, count, index, c_void_p(None) if first is None else first),
            *(q, k, v, g, strength),
            *map(c_longlong, strides),
            *map(c_int, numbers),
            *map(c_float, (L2_EPS, DIM**-0.5)),
        ],
    )
    return q, k, v, g, strength
