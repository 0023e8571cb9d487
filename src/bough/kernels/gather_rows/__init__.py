"""Rows of a table by index, on the indices' device; the table may be in the host's pinned memory."""

from torch import Tensor


def gather_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Return rows int64 [...] of table uint8 [V, n]: [..., n] on the device of `rows`."""
    if table.device == rows.device:
        return table[rows]
    from bough.kernels.gather_rows import triton_kernels

    return triton_kernels.gather_rows(table, rows)
