"""int8_hopper.cu and int8_weights.cu on a CPU."""

import ctypes
import re
from pathlib import Path

import torch
from torch import Tensor

from bough.kernels.quant_matmul import cuda
from bough.kernels.quant_matmul.int8 import GROUP, Int8Matrix
from bough.kernels.quant_matmul.layout import PackedWeight
from bough.kernels.runtime.sources import source
from tests.kernels.emulator import BARRIER, BARRIERS, BODIES, compiled, pointers, with_bodies

# A warp group's mma: each thread computes its own sums from operands in the 128-byte swizzle, where address
# bits 4 to 6 are those of the row in eight.
_MMA = """
static void mma(int* c, unsigned a, unsigned b, int more) {
  const auto value = [](unsigned descriptor, int row, int k) {
    const unsigned at = ((descriptor & 0x3fff) << 4) + row * 128 + k;
    return (int)(signed char)shared_memory[at ^ (at >> 7 & 7) << 4];
  };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  for (int i = 0; i < 64; i++) {
    const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    int sum = more ? c[i] : 0;
    for (int k = 0; k < 32; k++) sum += value(a, row, k) * value(b, column, k);
    c[i] = sum;
  }
}
"""
_BODIES = BARRIERS | {
    "float2 load_scales": "return {p[0], p[1]};",
}
_RUN = """
extern "C" void run(int grid, const u8* x, const float* x_scales, const u8* w, const float* w_scales,
                    float* out, int rows, int columns, int x_padded, int w_padded, int depth,
                    long long stride) {
  launch(grid, 384, [=] {
    int8_matmul(x, x_scales, w, w_scales, out, rows, columns, x_padded, w_padded, depth, stride);
  });
}
"""


def emulated_source() -> str:
    text = with_bodies(source("quant_matmul", "int8_hopper.cu"), _BODIES)
    text = re.sub(r'asm volatile\("mov.u32 %0,%1;" : "=r"\((\w+)\) : "r"\((.*)\)\);', r"\1 = \2;", text)
    # The lanes of a warp go on together, as they do there.
    together = "__syncwarp();"
    text = re.sub(r'asm volatile\("wgmma.wait_group[^"]*"[^;]*\);', together, text)
    text = re.sub(r'asm volatile\("(wgmma|fence|setmaxnreg)[^"]*"[^;]*\);', ";", text)
    text = text.replace("extern __shared__ __align__(1024) u8 ring[];", "u8* ring = shared_memory;")
    return f"{BARRIER}{_MMA}{text}{_RUN}"


class EmulatedInt8:
    """The kernel, compiled for this CPU."""

    def __init__(self, folder: Path):
        self._run = compiled(emulated_source(), folder, "int8", optimise="-O2").run

    def matmul(self, x: Int8Matrix, weight: Int8Matrix, out: Tensor, *, grid: int) -> None:
        """See int8_hopper.matmul; the grid has `grid` blocks."""
        assert x.tiled and weight.tiled
        tensors = [x.codes, x.scales, weight.codes, weight.scales, out]
        sizes = (x.rows, weight.rows, x.scales.shape[1], weight.scales.shape[1], x.columns // GROUP)
        assert all(tensor.is_contiguous() for tensor in tensors[:4]) and out.dtype == torch.float32
        self._run(grid, *pointers(*tensors), *sizes, ctypes.c_longlong(out.stride(0)))


_WEIGHTS_BODIES = BODIES | {
    "float across": "return __shfl_xor_sync(0xffffffffu, x, mask);",
    "float lower": "return half(pair);",
}
_WEIGHTS_RUN = """
extern "C" void run(int grid, const u8* w, const float* row_scale, u8* codes, float* scales, int first_tile,
                    int tiles, int all_tiles, int depth, int padded, int tiled) {
  launch_grid(grid, depth, 256, sizeof shared_memory, [=] {
    requantise(w, row_scale, codes, scales, first_tile, tiles, all_tiles, depth, padded, tiled);
  });
}
"""


def emulated_requantise(weight: PackedWeight, first: int, out: Int8Matrix, folder: Path) -> None:
    """See cuda.requantise."""
    text = with_bodies(cuda.int8_source(), _WEIGHTS_BODIES).replace('asm volatile("" ::: "memory");', "")
    text = re.sub(r"__shared__ __align__\(128\) u8 buffer\[.*?\];", "u8* buffer = shared_memory;", text)
    library = compiled(f"{text}{_WEIGHTS_RUN}", folder, "weights", cuda.int8_defines(weight.layout))
    tiles, depth = out.rows // 16, weight.data.shape[0]
    numbers = (first // 16, tiles, weight.data.shape[1], depth, out.scales.shape[1], int(out.tiled))
    library.run(-(-tiles // 8), *pointers(weight.data, weight.row_scale, out.codes, out.scales), *numbers)
