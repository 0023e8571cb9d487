"""Rows of a table by number, on the numbers' device; the table may lie in the host's pinned memory."""

from torch import Tensor

__all__ = ["gather_rows"]


def gather_rows(table: Tensor, rows: Tensor) -> Tensor:
    """table uint8 [V, n], rows int64 [...] within it, to [..., n] beside the rows."""
    if table.device == rows.device:
        return table[rows]
    from treeflash.kernels.gather_rows import triton_kernels as kernel

    return kernel.gather_rows(table, rows)
