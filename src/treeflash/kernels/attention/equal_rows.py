"""Trees of equal sizes as rows of different sequences, for kernels that take any numbers of rows."""

from collections.abc import Callable

from torch import Tensor

from treeflash.kernels.kv_cache.format import HeadPool
from treeflash.kernels.tree import MAX_ROWS


def equal_rows(
    ragged: Callable[..., Tensor],
    q: Tensor,
    keys: HeadPool,
    values: HeadPool,
    *tables: Tensor,
    window: int | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """See reference.paged_attention; for trees of at most MAX_ROWS rows, by a kernel's ragged_attention."""
    assert q.shape[1] <= MAX_ROWS, f"{q.shape[1]} rows, at most {MAX_ROWS}"
    *tables_of_sequences, ancestors = tables
    out = ragged(
        q.flatten(0, 1),
        *(keys, values, *tables_of_sequences, ancestors.flatten()),
        window=window,
        gate=None if gate is None else gate.flatten(0, 1),
    )
    return out.view(q.shape)
