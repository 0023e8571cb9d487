"""The matmul by warp-group mma on a CPU: its assembly is replaced by C++ (cuda_on_cpu.h)."""

import ctypes
import re
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from bough.kernels.quant_matmul import cuda
from bough.kernels.quant_matmul.layout import PackedWeight
from bough.kernels.quant_matmul.rows import PackedRows, empty_rows
from bough.kernels.quant_matmul.tiling import Tiling
from tests.kernels.cards import CARDS
from tests.kernels.emulated_experts import BODIES, COMPILER, with_bodies
from tests.kernels.emulated_int8 import BARRIER, BARRIERS

CARD = CARDS["H200"]
_PRELUDE = """
#include "cuda_on_cpu.h"
#include <cmath>
#include <condition_variable>
#include <mutex>
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
static void __syncwarp() { of_warps[threadIdx.x / 32]->arrive_and_wait(); }
static float lanes[32][32];
static float across(float x, int mask) {
  float* own = lanes[threadIdx.x / 32];
  own[threadIdx.x % 32] = x;
  __syncwarp();
  const float y = own[threadIdx.x % 32 ^ mask];
  __syncwarp();
  return y;
}
static unsigned two_halves(float low, float high) {
  const _Float16 values[2] = {(_Float16)low, (_Float16)high};
  unsigned bits;
  memcpy(&bits, values, 4);
  return bits;
}
"""
# A warp group's mma: weights in registers, x found by its descriptor, whose fields are in 16 bytes: from one
# half of the 16 columns to the other, and from eight rows to the next.
_MMA = """
static void group_mma(float* c, const unsigned* a, unsigned b, int more) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned at = (b & 0x3fff) << 4, halves = (b >> 16) << 4, eights = EIGHT_ROWS << 4;
  memcpy(operands[warp][lane].a, a, 16);
  of_warps[warp]->arrive_and_wait();
  for (int i = 0; i < TOKENS / 2; i++) {
    const int row = lane / 4 + i / 2 % 2 * 8, token = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double sum = 0;
    for (int k = 0; k < 16; k++) {
      const unsigned x = operands[warp][4 * (row % 8) + k % 8 / 2].a[row / 8 + 2 * (k / 8)];
      unsigned short y;
      memcpy(&y, shared_memory + at + k / 8 * halves + token / 8 * eights + token % 8 * 16 + k % 8 * 2, 2);
      sum += (double)half(x >> 16 * (k % 2)) * half(y);
    }
    c[i] = (more ? c[i] : 0) + (float)sum;
  }
  of_warps[warp]->arrive_and_wait();
}
"""
_BODIES = BODIES | {
    "void group_fence": "",
    "void group_commit": "",
    "void group_wait": "",
    "uint4 load_part": "return *p;",
    "void store_part": "*p = v;",
}
_RUN = """
extern "C" void run(int grid, const u8* w, const float* row_scale, const u8* x, const float* x_scale,
                    float* y, uint4* parts, int blocks, int depth, int rows, int stride, int tokens,
                    int share, int extra) {
  launch(grid, THREADS, [=] {
    matmul(w, row_scale, x, x_scale, y, parts, blocks, depth, rows, stride, tokens, share, extra, 0, 0);
  });
}
"""
_PACK_RUN = """
extern "C" void run(int rows, const float* x, unsigned short* out, float* scale, long long x_stride,
                    int columns, int padded, long long group_stride, long long row_stride) {
  launch(rows, 512, [=] { pack_rows(x, out, scale, x_stride, columns, padded, group_stride, row_stride); });
}
"""


def _library(text: str, folder: Path, name: str, macros: dict[str, int]) -> ctypes.CDLL:
    assert COMPILER is not None
    assert "asm" not in text, [line for line in text.splitlines() if "asm" in line]
    path, library = folder / f"{name}.cpp", folder / f"{name}.so"
    path.write_text(text)
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", f"-I{Path(__file__).parent}"]
    options += [f"-D{name}={value}" for name, value in macros.items()]
    subprocess.run([COMPILER, *options, str(path), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def emulated_matmul(x: PackedRows, weight: PackedWeight, folder: Path, *, grid: int) -> Tensor:
    """Return x times weight, transposed, by `grid` blocks."""
    assert x.grouped and x.bucket is not None
    mma, text = cuda.grouped_source(x.bucket).split("\n// How a warp", 1)
    assert "void group_mma(float* c, const unsigned* a, unsigned b, int more)" in mma
    text = with_bodies(f"// How a warp{text}", _BODIES | BARRIERS)
    text = re.sub(r'asm volatile\("(createpolicy|fence|cp.async)[^\n]*;\n', "\n", text)
    text = re.sub(r'asm volatile\("griddepcontrol[^"]*"[^)]*\)', "(void)0", text)
    text = text.replace("extern __shared__ __align__(128) u8 ring[];", "u8* ring = shared_memory + 1024;")
    text = re.sub(
        r"__shared__ __align__\(8\) u64 barriers\[.*?\];", "u64* barriers = (u64*)shared_memory;", text
    )
    expand = text.index('extern "C" __global__ void __launch_bounds__(256)\nexpand')
    macros = cuda.defines(CARD, weight.layout, x.bucket, Tiling(3, wide=True, halfway=True), grouped=True)
    macros |= {"EIGHT_ROWS": cuda.EIGHT_ROWS}
    library = _library(f"{_PRELUDE}{BARRIER}{_MMA}{text[:expand]}{_RUN}", folder, "matmul", macros)
    out = torch.full((x.rows, weight.rows), torch.nan)
    parts = torch.full((grid, 128 * x.bucket), cuda._UNWRITTEN, dtype=torch.int32)
    depth, blocks = weight.data.shape[0], weight.padded_rows // 128
    units = depth * blocks
    tensors = [weight.data, weight.row_scale, x.data, x.scale, out, parts]
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    library.run(
        grid, *pointers, blocks, depth, weight.rows, out.stride(0), x.rows, units // grid, units % grid
    )
    assert bool((parts == cuda._UNWRITTEN).all())
    return out


def emulated_pack(x: Tensor, folder: Path, *, grouped: bool) -> PackedRows:
    """See cuda.pack_rows."""
    text = cuda.rows_source().replace("__shfl_xor_sync(0xffffffffu, peak, o)", "across(peak, o)")
    half2 = r'asm\("[^"]*cvt.rn.f16x2[^"]*" : "=r"\(([^)]*)\) : "f"\((.*?)\), "f"\((.*?)\), "f"\(times\)\);'
    text = re.sub(half2, r"\1 = two_halves(\2 * times, \3 * times);", text)
    text = re.sub(r'asm volatile\("griddepcontrol[^"]*"[^)]*\)', "(void)0", text)
    text = text.replace("__launch_bounds__(512)", "")
    floats = "struct float4 { float x, y, z, w; };\n"
    library = _library(f"{_PRELUDE}{floats}{text}{_PACK_RUN}", folder, f"pack{int(grouped)}", {"BULK": 0})
    packed = empty_rows(*x.shape, x.device, grouped=grouped)
    packed.data.fill_(torch.nan)
    tensors = [x, packed.data, packed.scale]
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    sizes = (ctypes.c_longlong(x.stride(0)), x.shape[1], packed.padded_columns)
    library.run(len(x), *pointers, *sizes, *map(ctypes.c_longlong, packed.strides))
    return packed
