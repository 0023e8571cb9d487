"""The matmul by warp-group mma on a CPU."""

import ctypes
import re
from pathlib import Path

import torch
from torch import Tensor

from bough.kernels.quant_matmul import cuda
from bough.kernels.quant_matmul.layout import PackedWeight
from bough.kernels.quant_matmul.rows import PackedRows, empty_rows
from bough.kernels.quant_matmul.tiling import Tiling
from bough.kernels.runtime.sources import source
from tests.kernels.cards import CARDS
from tests.kernels.emulator import BARRIER, BARRIERS, BODIES, compiled, pointers, with_bodies

CARD = CARDS["H200"]
# A warp group's mma: weights in registers, x found by its descriptor, whose fields are in 16 bytes: from one
# half of the 16 columns to the other, and from eight rows to the next.
_MMA = """
static void group_mma(float* c, const unsigned* a, unsigned b, int more) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned at = (b & 0x3fff) << 4, halves = (b >> 16) << 4, eights = EIGHT_ROWS << 4;
  memcpy(fragments[warp][lane], a, 16);
  __syncwarp();
  for (int i = 0; i < TOKENS / 2; i++) {
    const int row = lane / 4 + i / 2 % 2 * 8, token = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double sum = 0;
    for (int k = 0; k < 16; k++) {
      unsigned short y;
      memcpy(&y, shared_memory + at + k / 8 * halves + token / 8 * eights + token % 8 * 16 + k % 8 * 2, 2);
      sum += (double)of_fragment(fragments[warp], row, k, false) * half(y);
    }
    c[i] = (more ? c[i] : 0) + (float)sum;
  }
  __syncwarp();
}
"""
_BODIES = BODIES | {
    "void group_fence": "",
    "void group_commit": "",
    "void group_wait": "",
    "uint4 load_part": "return *p;",
    "void store_part": "*p = v;",
    "void copy8": "memcpy(shared_memory + to, from, 8);",
}
_RUN = """
extern "C" void run(int grid, const u8* w, const float* row_scale, const u8* x, const float* x_scale,
                    float* y, uint4* parts, int tiles, int depth, int rows, int stride, int tokens,
                    int share, int extra) {
  launch(grid, THREADS, [=] {
    matmul(w, row_scale, x, x_scale, y, parts, tiles, depth, rows, stride, tokens, share, extra, 0, 0);
  });
}
"""
_PACK_RUN = """
extern "C" void run(int rows, const float* x, unsigned short* out, float* scale, long long x_stride,
                    int columns, int padded, long long group_stride, long long row_stride) {
  launch(rows, 512, [=] { pack_rows(x, out, scale, x_stride, columns, padded, group_stride, row_stride); });
}
"""


def emulated_matmul(x: PackedRows, weight: PackedWeight, folder: Path, *, grid: int) -> Tensor:
    """Return x times weight, transposed, by `grid` blocks."""
    assert x.grouped and x.bucket is not None
    mma, text = cuda.grouped_source(x.bucket).split("\n// How a warp", 1)
    assert "void group_mma(float* c, const unsigned* a, unsigned b, int more)" in mma
    text = with_bodies(f"{source('runtime', 'pdl.cu')}\n// How a warp{text}", _BODIES | BARRIERS)
    text = re.sub(r'asm volatile\("(createpolicy|fence|cp.async)[^\n]*;\n', "\n", text)
    text = re.sub(r'asm volatile\("griddepcontrol[^"]*"[^)]*\)', "(void)0", text)
    text = text.replace("extern __shared__ __align__(128) u8 ring[];", "u8* ring = shared_memory + 1024;")
    text = re.sub(
        r"__shared__ __align__\(8\) u64 barriers\[.*?\];", "u64* barriers = (u64*)shared_memory;", text
    )
    expand = text.index("#if HALVES == 1\n// Rows of tiles")
    macros = cuda.defines(CARD, weight.layout, x.bucket, Tiling(3, halfway=True), grouped=True)
    macros |= {"EIGHT_ROWS": cuda.EIGHT_ROWS}
    library = compiled(f"{BARRIER}{_MMA}{text[:expand]}{_RUN}", folder, "matmul", macros)
    out = torch.full((x.rows, weight.rows), torch.nan)
    parts = torch.full((grid, 128 * x.bucket), cuda._UNWRITTEN, dtype=torch.int32)
    depth, tiles = weight.data.shape[:2]
    units = depth * tiles // 8
    tensors = pointers(weight.data, weight.row_scale, x.data, x.scale, out, parts)
    library.run(grid, *tensors, tiles, depth, weight.rows, out.stride(0), x.rows, units // grid, units % grid)
    assert bool((parts == cuda._UNWRITTEN).all())
    return out


def emulated_pack(x: Tensor, folder: Path, *, grouped: bool) -> PackedRows:
    """See cuda.pack_rows."""
    text = cuda.rows_source()
    half2 = r'asm\("[^"]*cvt.rn.f16x2[^"]*" : "=r"\(([^)]*)\) : "f"\((.*?)\), "f"\((.*?)\), "f"\(times\)\);'
    text = re.sub(half2, r"\1 = two_halves(\2 * times, \3 * times);", text)
    text = re.sub(r'asm volatile\("griddepcontrol[^"]*"[^)]*\)', "(void)0", text)
    library = compiled(f"{text}{_PACK_RUN}", folder, f"pack{int(grouped)}", {"OVERLAP": 0})
    packed = empty_rows(*x.shape, x.device, grouped=grouped)
    packed.data.fill_(torch.nan)
    sizes = (ctypes.c_longlong(x.stride(0)), x.shape[1], packed.padded_columns)
    library.run(
        len(x), *pointers(x, packed.data, packed.scale), *sizes, *map(ctypes.c_longlong, packed.strides)
    )
    return packed
