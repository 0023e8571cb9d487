"""Triton kernels of embedding rows, for the common types of tables: one launch where torch takes thirty.

And of a gather from a table in the host's pinned memory, which a GPU reads over the bus; can be captured.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.gguf.types import QuantType

TYPES = {QuantType.Q4_K: 4, QuantType.Q5_K: 5, QuantType.Q6_K: 6, QuantType.Q8_0: 8}
_COLUMNS = 256
_BLOCK = 512  # words of a program: a packed row of a 27B model is one


@triton.jit
def _byte(at, mask):
    return tl.load(at, mask=mask, other=0).to(tl.int32)


@triton.jit
def _half(at, mask):
    bits = _byte(at, mask) | (_byte(at + 1, mask) << 8)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _signed(byte):
    return byte - ((byte & 128) << 1)


@triton.jit
def _embed_kernel(
    data, tokens, out, row_bytes, WIDTH: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, COLUMNS)
    column = tl.program_id(0) * COLUMNS + dims
    inside = column < WIDTH
    base = data + tl.load(tokens + row) * row_bytes
    if BITS == 8:
        block = base + column // 32 * 34
        value = _signed(_byte(block + 2 + column % 32, inside)).to(tl.float32) * _half(block, inside)
    elif BITS == 6:
        block = base + tl.program_id(0) * 210 + dims * 0
        low = _byte(block + dims // 128 * 64 + dims % 64, inside) >> (dims % 128 // 64 * 4)
        high = _byte(block + 128 + dims // 128 * 32 + dims % 32, inside) >> (dims % 128 // 32 * 2)
        scale = _half(block + 208, inside) * _signed(_byte(block + 192 + dims // 16, inside)).to(tl.float32)
        value = (((low & 15) | ((high & 3) << 4)) - 32).to(tl.float32) * scale
    else:
        block = base + tl.program_id(0) * (144 if BITS == 4 else 176) + dims * 0
        group = dims // 32
        first, second, rest = (
            _byte(block + 4 + group % 4, inside),
            _byte(block + 8 + group % 4, inside),
            _byte(block + 12 + group % 4, inside),
        )
        scale = tl.where(group < 4, first & 63, (rest & 15) | ((first >> 6) << 4)).to(tl.float32)
        minimum = tl.where(group < 4, second & 63, (rest >> 4) | ((second >> 6) << 4)).to(tl.float32)
        nibbles = block + (16 if BITS == 4 else 48)
        code = (_byte(nibbles + group // 2 * 32 + dims % 32, inside) >> (group % 2 * 4)) & 15
        if BITS == 5:
            code += ((_byte(block + 16 + dims % 32, inside) >> group) & 1) << 4
        value = code.to(tl.float32) * (_half(block, inside) * scale) - _half(block + 2, inside) * minimum
    tl.store(out + row * WIDTH + column, value, mask=inside)


def embed(data: Tensor, type: QuantType, tokens: Tensor) -> Tensor:
    assert data.is_contiguous() and data.dtype == torch.uint8, f"{data.dtype}, strides {data.stride()}"
    width = data.shape[1] // type.block_bytes * type.block_elements
    out = torch.empty(*tokens.shape, width, dtype=torch.float32, device=data.device)
    _embed_kernel[(triton.cdiv(width, _COLUMNS), tokens.numel())](
        data, tokens.contiguous(), out, data.shape[1],
        WIDTH=width, BITS=TYPES[type], COLUMNS=_COLUMNS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


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
