"""The draft's own keys and values: a ring a layer, as long as the layer can look back."""

import torch

from treeflash.errors import UsageError
from treeflash.models.dflash import DraftBuffers
from treeflash.models.draft_spec import DraftSpec

# Full-attention layers look back no further than this unless asked: acceptance gains nothing from more.
DEFAULT_CONTEXT = 16384


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
        raise UsageError(
            f"the draft's context is {context}, needed at least 1 position", "give --draft-ctx N"
        )
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
