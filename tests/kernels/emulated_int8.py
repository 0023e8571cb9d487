"""int8_hopper.cu and int8_weights.cu on a CPU: their assembly is replaced by C++ (cuda_on_cpu.h)."""

import ctypes
import re
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from bough.kernels.quant_matmul import cuda
from bough.kernels.quant_matmul.int8 import GROUP, Int8Matrix
from bough.kernels.quant_matmul.layout import PackedWeight
from bough.kernels.runtime.sources import source
from tests.kernels.emulated_experts import BODIES, COMPILER, with_bodies

# Barriers that count arrivals and bytes, and a warp group's mma: each thread computes its own sums from
# operands in the 128-byte swizzle, where address bits 4 to 6 are those of the row in eight.
BARRIER = """
struct Barrier {
  std::mutex lock;
  std::condition_variable changed;
  unsigned phase = 0;
  int expected = 0, pending = 0, bytes = 0;
  void update(int arrivals, int added) {
    std::unique_lock held(lock);
    pending -= arrivals, bytes += added;
    if (!pending && !bytes) phase ^= 1, pending = expected, changed.notify_all();
  }
};
static Barrier barriers[64];
static Barrier& barrier(unsigned address) { return barriers[address / 8 % 64]; }
"""
_PRELUDE = f"""
#include "cuda_on_cpu.h"
#include <cmath>
#include <condition_variable>
#include <mutex>
struct float2 {{ float x, y; }};
static float2 make_float2(float x, float y) {{ return {{x, y}}; }}
static int min(int a, int b) {{ return a < b ? a : b; }}
{BARRIER}
"""
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
BARRIERS = {
    "u32 shared_address": "return (u32)((const u8*)p - shared_memory);",
    "void barrier_init": "Barrier& m = barrier(b); m.phase = m.bytes = 0; m.expected = m.pending = n;",
    "void barrier_wait": "Barrier& m = barrier(b); std::unique_lock held(m.lock);"
    "m.changed.wait(held, [&] { return m.phase != phase; });",
    "void barrier_expect": "barrier(b).update(1, n);",
    "void barrier_arrive": "barrier(b).update(1, 0);",
    "void bulk_copy": "memcpy(shared_memory + to, from, n); barrier(b).update(0, -(int)n);",
}
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
    together = "of_warps[threadIdx.x / 32]->arrive_and_wait();"
    text = re.sub(r'asm volatile\("wgmma.wait_group[^"]*"[^;]*\);', together, text)
    text = re.sub(r'asm volatile\("(wgmma|fence|setmaxnreg)[^"]*"[^;]*\);', ";", text)
    text = text.replace("extern __shared__ __align__(1024) u8 ring[];", "u8* ring = shared_memory;")
    assert "asm" not in text, [line for line in text.splitlines() if "asm" in line]
    return f"{_PRELUDE}{_MMA}{text}{_RUN}"


class EmulatedInt8:
    """The kernel, compiled for this CPU."""

    def __init__(self, folder: Path):
        assert COMPILER is not None
        path, library = folder / "int8.cpp", folder / "int8.so"
        path.write_text(emulated_source())
        options = ["-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", "-w", f"-I{Path(__file__).parent}"]
        subprocess.run([COMPILER, *options, str(path), "-o", str(library)], check=True)
        self._run = ctypes.CDLL(str(library)).run

    def matmul(self, x: Int8Matrix, weight: Int8Matrix, out: Tensor, *, grid: int) -> None:
        """See int8_hopper.matmul; the grid has `grid` blocks."""
        assert x.tiled and weight.tiled
        tensors = [x.codes, x.scales, weight.codes, weight.scales, out]
        pointers = [ctypes.c_void_p(tensor.contiguous().data_ptr()) for tensor in tensors[:4]]
        pointers.append(ctypes.c_void_p(out.data_ptr()))
        sizes = (x.rows, weight.rows, x.scales.shape[1], weight.scales.shape[1], x.columns // GROUP)
        assert all(tensor.is_contiguous() for tensor in tensors[:4]) and out.dtype == torch.float32
        self._run(grid, *pointers, *sizes, ctypes.c_longlong(out.stride(0)))


_WEIGHTS_PRELUDE = """
#include "cuda_on_cpu.h"
#include <cmath>
static void __syncwarp() { of_warps[threadIdx.x / 32]->arrive_and_wait(); }
static unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
static float lanes[32][32];
"""
_WEIGHTS_BODIES = BODIES | {
    "float across": "float* own = lanes[threadIdx.x / 32]; own[threadIdx.x % 32] = x; __syncwarp();"
    "const float y = own[threadIdx.x % 32 ^ mask]; __syncwarp(); return y;",
    "float lower": "return half(pair);",
}
_WEIGHTS_RUN = """
extern "C" void run(int grid, const u8* w, const float* row_scale, u8* codes, float* scales, int first_tile,
                    int tiles, int all_tiles, int depth, int padded, int tiled) {
  for (int step = 0; step < depth; step++) {
    blockIdx.y = step;
    launch(grid, 256, [=] {
      requantise(w, row_scale, codes, scales, first_tile, tiles, all_tiles, depth, padded, tiled);
    });
  }
}
"""


def emulated_requantise(weight: PackedWeight, first: int, out: Int8Matrix, folder: Path) -> None:
    """See cuda.requantise."""
    assert COMPILER is not None
    text = with_bodies(cuda.int8_source(), _WEIGHTS_BODIES).replace('asm volatile("" ::: "memory");', "")
    text = re.sub(r"__shared__ __align__\(128\) u8 buffer\[.*?\];", "u8* buffer = shared_memory;", text)
    assert "asm" not in text, [line for line in text.splitlines() if "asm" in line]
    path, library = folder / "weights.cpp", folder / "weights.so"
    path.write_text(f"{_WEIGHTS_PRELUDE}{text}{_WEIGHTS_RUN}")
    macros = [f"-D{name}={value}" for name, value in cuda.int8_defines(weight.layout).items()]
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", f"-I{Path(__file__).parent}"]
    subprocess.run([COMPILER, *options, *macros, str(path), "-o", str(library)], check=True)
    tensors = (weight.data, weight.row_scale, out.codes, out.scales)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    tiles, depth = out.rows // 16, weight.data.shape[0]
    numbers = (first // 16, tiles, weight.data.shape[1], depth, out.scales.shape[1], int(out.tiled))
    ctypes.CDLL(str(library)).run(-(-tiles // 8), *pointers, *numbers)
