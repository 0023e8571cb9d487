"""The gather from a table in the host's pinned memory, which a GPU reads over the bus; can be captured."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512  # words of a program: a packed row of a 27B model is one


@triton.jit
def gather_kernel(table, rows, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(rows + row)
    inside = columns < width
    data = tl.load(table + source * width + columns, mask=inside)
    tl.store(out + row * width + columns, data, mask=inside)


def gather_rows(table: Tensor, rows: Tensor) -> Tensor:
    """See the package's `gather_rows`; table and rows contiguous."""
    assert table.dtype == torch.uint8 and table.is_contiguous(), (table.dtype, table.stride())
    assert rows.dtype == torch.int64, rows.dtype
    # Whole words if a row has a multiple of them: fewer and wider reads over the bus.
    words = next(
        kind for kind in (torch.int64, torch.int32, torch.uint8) if not table.shape[1] % kind.itemsize
    )
    table, flat = table.view(words), rows.reshape(-1)
    out = torch.empty(len(flat), table.shape[1], dtype=words, device=rows.device)
    if len(flat):
        grid = (len(flat), triton.cdiv(table.shape[1], _BLOCK))
        gather_kernel[grid](table, flat, out, table.shape[1], BLOCK=_BLOCK, num_warps=4)
    return out.view(torch.uint8).unflatten(0, rows.shape)
