"""A draft's KV ring: one ring buffer a layer, as long as the layer's attention reaches."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bough.errors import UsageError
from bough.models.dflash import DraftBuffers
from bough.models.draft_spec import DraftSpec
from bough.models.mtp import MTPBuffers
from bough.models.newest import NewestHidden
from bough.models.spec import ModelSpec
from bough.state.snapshots import host_copies, wait_for_copies

# Full-attention layers reach no further than this unless asked: acceptance gains nothing from more.
DEFAULT_CONTEXT = 16384


@dataclass(frozen=True, slots=True)
class SavedRings:
    """One slot's rings at one moment, as far as they were filled; nothing writes to it."""

    length: int
    start: int
    rings: list[tuple[Tensor, Tensor]]  # keys and values of a layer

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.rings)


def save_rings(buffers: DraftBuffers, slot: int) -> SavedRings:
    length, start = int(buffers.lengths[slot]), int(buffers.starts[slot])
    pools = [pool for pair in zip(buffers.keys, buffers.values, strict=True) for pool in pair]
    copies = host_copies([pool[slot, :length] for pool in pools])
    return SavedRings(length, start, list(zip(copies[::2], copies[1::2], strict=True)))


def restore_rings(buffers: DraftBuffers, slot: int, saved: SavedRings) -> None:
    wait_for_copies(buffers.lengths.device)
    buffers.lengths[slot] = saved.length
    buffers.starts[slot] = saved.start
    pairs = zip(buffers.keys, buffers.values, strict=True)
    for rings, saved_rings in zip(pairs, saved.rings, strict=True):
        for ring, filled in zip(rings, saved_rings, strict=True):
            ring[slot, : len(filled)].copy_(filled, non_blocking=True)


def draft_buffers(
    spec: DraftSpec,
    *,
    max_ctx: int,
    context: int | None = None,
    slots: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> DraftBuffers:
    """`context` limits the full layers; sliding layers hold their window."""
    if context is not None and context < 1:
        raise UsageError(f"the draft's context is {context}, needed at least 1 position", "set `draft_ctx`")
    full = min(max_ctx, DEFAULT_CONTEXT if context is None else context)

    def ring(kind: str) -> torch.Tensor:
        size = min(spec.window, max_ctx) if kind == "sliding" else full
        return torch.zeros(slots, size, spec.kv_heads, spec.head_dim, dtype=dtype, device=device)

    return DraftBuffers(
        keys=tuple(ring(kind) for kind in spec.layers),
        values=tuple(ring(kind) for kind in spec.layers),
        lengths=torch.zeros(slots, dtype=torch.int64, device=device),
        starts=torch.zeros(slots, dtype=torch.int64, device=device),
    )


def mtp_buffers(
    spec: ModelSpec,
    *,
    max_ctx: int,
    slots: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> MTPBuffers:
    """Return the buffers of a target's MTP block."""

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(slots, *shape, dtype=dtype, device=device)

    ring = (min(max_ctx, DEFAULT_CONTEXT), spec.kv_heads, spec.head_dim)
    return MTPBuffers(
        ring=DraftBuffers(
            keys=(zeros(*ring, dtype=dtype),),
            values=(zeros(*ring, dtype=dtype),),
            lengths=zeros(dtype=torch.int64),
            starts=zeros(dtype=torch.int64),
        ),
        newest=NewestHidden.empty(slots, spec.width, device),
    )
