"""Trees [B, T], or ragged rows [1, N], as the rows that kernels take."""

from collections.abc import Callable

from torch import Tensor

from bough.kernels.kv_cache.format import HeadPool
from bough.kernels.tree import MAX_ROWS


def tree_rows(
    ragged: Callable[..., Tensor],
    q: Tensor,
    keys: HeadPool,
    values: HeadPool,
    page_table: Tensor,
    lengths: Tensor,
    ancestors: Tensor,
    first: Tensor | None = None,
    *,
    window: int | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """See cpu.paged_attention; for trees of at most MAX_ROWS rows, by a kernel's ragged_attention."""
    assert q.shape[1] <= MAX_ROWS, f"{q.shape[1]} rows, at most {MAX_ROWS}"
    out = ragged(
        q.flatten(0, 1),
        *(keys, values, page_table, lengths, ancestors.flatten(), first),
        window=window,
        gate=None if gate is None else gate.flatten(0, 1),
    )
    return out.view(q.shape)
