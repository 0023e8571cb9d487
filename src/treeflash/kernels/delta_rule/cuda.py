"""The CUDA C++ kernel of a tree's delta rule: its sizes and its launch."""

from ctypes import c_int
from functools import cache

import torch
from torch import Tensor

from treeflash.kernels.quant_matmul.rows import bucket_of
from treeflash.kernels.runtime.device import card_of, usable
from treeflash.kernels.runtime.driver import Kernel, Module
from treeflash.kernels.runtime.nvrtc import compile_cubin
from treeflash.kernels.runtime.sources import pdl_source

DIM = 128  # of a head
COLUMNS = 64  # of a head's state, a block
_THREADS = 256
_PATH_STEP = 8


def source() -> str:
    return pdl_source("delta_rule", "tree.cu")


def shared_bytes(bucket: int) -> int:
    """Return the bytes of shared memory of a block, as tree.cu lays it out."""
    rows = 2 * bucket * (DIM + 16 + COLUMNS + 8 + bucket + 4)
    path = _PATH_STEP * (DIM + COLUMNS + 2)
    return 4 * (rows + path + 4 * bucket) + 8 * bucket


def takes(state: Tensor, rows: int) -> bool:
    """Return whether the kernel takes such heads and `rows` rows on this card."""
    bucket = bucket_of(rows)
    if state.shape[-1] != DIM or bucket is None or not usable(state.device):
        return False
    return shared_bytes(bucket) <= card_of(state.device).shared_per_block


@cache
def _kernel(bucket: int, device: torch.device) -> Kernel:
    card = card_of(device)
    macros = {"ROWS": bucket, "OVERLAP": int(card.pdl)}
    module = Module(compile_cubin(source(), defines=macros, arch=card.arch), device)
    return module.kernel("tree_delta", threads=_THREADS, shared=shared_bytes(bucket), overlap=card.pdl)


def tree_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    slots: Tensor,
    count: Tensor,
    ancestors: Tensor,
) -> Tensor:
    """See reference.tree_delta."""
    batch, rows, key_heads, dim = q.shape
    value_heads, bucket = v.shape[2], bucket_of(rows)
    assert bucket is not None and dim == DIM, f"{rows} rows of heads of {dim}"
    assert state.shape[1:] == (value_heads, dim, dim), f"{state.shape}, {value_heads} heads of {dim}"
    for part in (q, k, v, g, beta, state, slots, count, ancestors):
        assert part.is_contiguous(), f"{part.shape}, strides {part.stride()}"
        wanted = torch.int64 if part is slots or part is count or part is ancestors else torch.float32
        assert part.dtype == wanted, f"{part.dtype}, needed {wanted}"
    out = torch.empty(batch, rows, value_heads, dim, dtype=torch.float32, device=q.device)
    numbers = (rows, k.shape[1] - rows, key_heads, value_heads)
    _kernel(bucket, q.device)(
        (dim // COLUMNS, batch * value_heads),
        [q, k, v, g, beta, state, slots, count, ancestors, out, *map(c_int, numbers)],
    )
    return out
