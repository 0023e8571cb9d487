"""experts.cu on a CPU."""

import ctypes
import re
from pathlib import Path

import torch
from torch import Tensor

from bough.kernels.experts import cuda
from bough.kernels.experts.stack import ExpertStack
from bough.kernels.quant_matmul.rows import PackedRows, empty_rows
from bough.kernels.runtime.device import Card
from tests.kernels.emulator import BODIES, compiled, pointers, with_bodies

_RUN = """
extern "C" void run(int ctas, const u8* w, const u8* cold, const float* row_scale, const u8* x,
                    const float* x_scale, float* y, const int4* chunks, const int* count, const int* order,
                    int blocks, int depth, int rows, int expert_tiles, int each, long long group_stride,
                    long long row_stride) {
  launch(ctas, THREADS, [=] {
    experts(w, cold, row_scale, x, x_scale, y, chunks, count, order, blocks, depth, rows, expert_tiles, each,
            group_stride, row_stride);
  });
}
"""


def emulated_source() -> str:
    text = with_bodies(cuda.source(), BODIES)
    text = re.sub(r'asm volatile\("cp.async[^;]*;"[^;]*;', ";", text)
    text = text.replace("extern __shared__ __align__(128) u8 ring[];", "u8* ring = shared_memory;")
    return f"{text}{_RUN}"


class EmulatedExperts:
    """The variant of experts.cu for a card, a layout and chunks of `tokens` pairs."""

    def __init__(self, card: Card, stack: ExpertStack, tokens: int, folder: Path):
        self._stack, self._shape = stack, cuda.shape_of(card, stack.layout, tokens)
        macros = self._shape.defines(card, stack.layout)
        self._run = compiled(emulated_source(), folder, f"experts-{tokens}", macros).run

    def matmul(self, x: Tensor, order: Tensor, chunks: Tensor, *, ctas: int) -> Tensor:
        """Return [pairs, N]; the grid has `ctas` blocks."""
        stack, packed, pairs = self._stack, pack_rows(x), len(order)
        out = torch.full((pairs, stack.rows), torch.nan)
        tables = [chunks.int().contiguous(), torch.tensor([len(chunks)]).int(), order.int().contiguous()]
        tensors = [stack.data, stack.cold, stack.row_scale, packed.data, packed.scale, out, *tables]
        depth, expert_tiles = stack.data.shape[1:3]
        blocks = -(-stack.rows // (16 * self._shape.tiles))
        sizes = (blocks, depth, stack.rows, expert_tiles, pairs // len(x))
        strides = [ctypes.c_longlong(2 * stride) for stride in packed.strides]
        self._run(ctas, *pointers(*tensors), *sizes, *strides)
        return out


def pack_rows(x: Tensor) -> PackedRows:
    """Return the rows as the kernels read them; those of a bucket that no row fills hold NaN."""
    packed = empty_rows(*x.shape, x.device)
    packed.data.fill_(torch.nan)
    factor = 2.0 ** (15 - torch.frexp(x.abs().amax(1)).exponent).float()
    packed.scale.copy_(1 / factor)
    halves = torch.nn.functional.pad((x * factor[:, None]).half(), (0, packed.padded_columns - x.shape[1]))
    if packed.bucket is None:
        packed.data.copy_(halves)
    else:
        packed.data[:, : len(x)] = halves.view(len(x), -1, 32).transpose(0, 1)
    return packed
