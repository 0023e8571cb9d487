"""The CUDA C++ kernel of a tree's delta rule: its sizes and its launch."""

from ctypes import c_int, c_void_p
from functools import cache
from math import prod

import torch
from torch import Tensor

from bough.kernels.causal_conv.records import DeltaHeads
from bough.kernels.delta_rule.cpu import saved_states
from bough.kernels.delta_rule.records import DeltaRows
from bough.kernels.runtime.device import Card, card_of
from bough.kernels.runtime.driver import Kernel, Module, cuda_module
from bough.kernels.runtime.sources import pdl_source

COLUMNS = 8  # of a head's state, a warp
MOST_WARPS = 8  # of a block, with columns
_RING_ROWS = 24
_REGISTERS, _THREAD_REGISTERS = 65536, 128  # of an SM, of a thread
_RESERVED = 1024  # bytes of shared memory that the driver reserves for each block


def source() -> str:
    return pdl_source("delta_rule", "tree.cu")


def shared_bytes(dim: int, warps: int, saved: int) -> int:
    """Return the bytes of shared memory of a block, as tree.cu lays it out."""
    return 4 * (_RING_ROWS * (2 * dim + MOST_WARPS * (COLUMNS + 4)) + saved * warps * COLUMNS * dim)


def warps_of(card: Card, dim: int, saved: int, *, groups: int, units: int) -> int:
    """Return the warps with columns of a block, for the fewest rounds and the least work of the busiest SM.

    groups: key heads of all sequences; units: warps of columns of a group. A row's bits do not depend on it.
    """

    def cost(warps: int) -> tuple[int, int, int]:
        blocks, all_warps = groups * -(-units // warps), warps + 1  # one more for the warp that copies rows
        shared = shared_bytes(dim, warps, saved) + _RESERVED
        resident = min(
            _REGISTERS // (32 * all_warps * _THREAD_REGISTERS), card.shared_per_processor // shared
        )
        rounds = -(-blocks // (card.processors * max(1, resident)))
        return rounds, -(-blocks // card.processors) * all_warps, -warps

    fitting = [n for n in range(1, MOST_WARPS + 1) if shared_bytes(dim, n, saved) <= card.shared_per_block]
    return min(fitting, key=cost)


def takes_tree_delta(heads: DeltaHeads, state: Tensor, rows: DeltaRows) -> bool:
    dim = state.shape[-1]
    return dim == 16 or (dim % 32 == 0 and dim <= 256)


@cache
def _module(dim: int, device: torch.device) -> Module:
    return cuda_module(source(), {"D": dim, "OVERLAP": int(card_of(device).pdl)}, device)


def spread(card: Card, shared: int, blocks: int) -> int:
    """Return the shared memory with which an SM holds no more blocks than its share.

    With PDL the blocks start while other kernels run, and where SMs are free two would come to one.
    """
    share = -(-blocks // card.processors)
    least = card.shared_per_processor // (share + 1) - 1023  # with the 1 KiB that each block takes besides
    return min(max(shared, -(-least // 16) * 16), card.shared_per_block)


@cache
def _kernel(dim: int, saved: int, groups: int, units: int, device: torch.device) -> tuple[Kernel, int]:
    """Return the kernel and the warps with columns of a block."""
    card = card_of(device)
    warps = warps_of(card, dim, saved, groups=groups, units=units)
    shared = spread(card, shared_bytes(dim, warps, saved), groups * -(-units // warps))
    threads = 32 * (warps + 1)
    return _module(dim, device).kernel("tree_delta", threads=threads, shared=shared, overlap=card.pdl), warps


def tree_delta(heads: DeltaHeads, state: Tensor, rows: DeltaRows) -> Tensor:
    (key_heads, dim), value_heads, batch = heads.q.shape[-2:], heads.v.shape[-2], len(rows.slots)
    order, count = rows.order, rows.order.shape[-1]  # of each sequence, or of all
    path = (prod(heads.k.shape[:-2]) - order.numel()) // batch
    assert takes_tree_delta(heads, state, rows) and state.shape[1:] == (value_heads, dim, dim), (
        f"{state.shape}, heads of {dim}"
    )
    types = {torch.float32: (*heads, state), torch.int64: (rows.slots, rows.count), torch.int32: (order,)}
    for dtype, parts in types.items():
        for part in parts:
            assert part.is_contiguous(), f"{part.shape}, strides {part.stride()}"
            assert part.dtype == dtype, f"{part.dtype}, needed {dtype}"
    out = torch.empty(*heads.q.shape[:-2], value_heads, dim, dtype=torch.float32, device=state.device)
    groups, units = batch * key_heads, value_heads // key_heads * dim // COLUMNS
    kernel, warps = _kernel(dim, saved_states(min(count, rows.most)), groups, units, state.device)
    begins = c_void_p(None) if rows.first is None else rows.first
    numbers = (count, path, key_heads, value_heads)
    kernel(
        (-(-units // warps), groups),
        [*heads, state, rows.slots, rows.count, order, begins, out, *map(c_int, numbers)],
    )
    return out
