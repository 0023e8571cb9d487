"""Times the 27B's matmuls with each mma repeated, which makes the tensor cores as slow as a GeForce's.

    BOUGH_PRETEND_CARD=8.6 python -m workshop gpu.emulate_geforce 1,5

An H200 issues an m16n8k16 mma 5.1 times as fast, by SM and clock, as a GeForce: repeating each five times
shows what bounds the kernel there. Without BOUGH_PRETEND_CARD the rate of this card's mma is measured first.
"""

import ctypes
import os
import subprocess
from functools import partial
from typing import Annotated

import torch

from bough.bench.tuning import LAYERS_27B, Stack
from bough.kernels.quant_matmul import cuda
from bough.kernels.quant_matmul.tiling import built_in_tilings
from bough.kernels.runtime.device import card_of
from bough.kernels.runtime.driver import Module
from bough.kernels.runtime.nvrtc import compile_cubin
from workshop.case import case
from workshop.report import Report

ROWS = (8, 16, 24, 32)
_CALLS = ("mma(sums[first + n], a, b[n].x, b[n].y);", "mma(sums[first + n], a + 4, b[n].z, b[n].w);")
_CHAINS, _REPEATS, _THREADS = 8, 100_000, 256
_RATE_KERNEL = """
extern "C" __global__ void rate(float* out, long long* clocks, int repeats) {
  u32 a[4] = {threadIdx.x, 1, 2, 3};
  float sums[8][4] = {};
  long long start = clock64();
  for (int i = 0; i < repeats; i++)
    for (int j = 0; j < 8; j++) mma(sums[j], a, i, 5);
  clocks[0] = clock64() - start;
  float total = 0;
  for (int j = 0; j < 32; j++) total += sums[0][j];
  out[threadIdx.x] = total;
}
"""


def repeated(source: str, count: int) -> str:
    """Return the matmul's source with each mma issued `count` times; the copies' sums are not used."""
    if count == 1:
        return source
    source = source.replace(
        "u32 last = 0;", "u32 last=0;float dd[4][4];UNROLL for(int q=0;q<16;q++)dd[0][q]=0.f;"
    )
    for call in _CALLS:
        assert call in source, call
        copy = call.replace("sums[first + n]", "dd[q]")
        source = source.replace(call, f"{{{call}UNROLL for(int q=0;q<{count - 1};q++){copy}}}")
    used = "float z=0.f;UNROLL for(int q=0;q<16;q++)z+=dd[0][q];if(z==1.2345e30f)sums[0][0]+=1.f;"
    return source.replace("  return last;\n}", f"{used}return last;}}", 1)


def print_mma_rate(source: str, device: torch.device) -> None:
    helpers = source[source.index("DEVICE void mma") : source.index("DEVICE u32 word")]
    kernel = f"typedef unsigned u32;\n#define DEVICE __device__ __forceinline__\n{helpers}{_RATE_KERNEL}"
    module = Module(lambda: compile_cubin(kernel, defines={}, arch="sm_90", cached=False), device)
    launch = module.kernel("rate", threads=_THREADS)
    out, clocks = torch.zeros(512, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first one is slow
        begin.record()
        launch((132, 1), [out, clocks, ctypes.c_int(_REPEATS)])
        end.record()
        torch.cuda.synchronize()
    # Four schedulers issue the warps of a block.
    issued = _CHAINS * _REPEATS * _THREADS / 128
    clock_mhz = clocks.item() / begin.elapsed_time(end) / 1e3
    print(f"{clocks.item() / issued:.2f} clocks per mma and scheduler at {clock_mhz:.0f} MHz", flush=True)


@case()
def main(report: Report, repeats: Annotated[str, "how often each mma is issued, with commas"]) -> None:
    device, source = torch.device("cuda", 0), cuda.matmul_source()
    if "BOUGH_PRETEND_CARD" not in os.environ:
        print_mma_rate(source, device)
    stack = Stack(LAYERS_27B, device)
    weight_bytes = sum(weight.nbytes for step, _ in stack._steps for weight in step)
    tilings = built_in_tilings(card_of(device).arch)
    for count in map(int, repeats.split(",")):
        cuda.variant.cache_clear()
        cuda.matmul_source = partial(repeated, source, count)
        for rows in ROWS:
            seconds = next(iter(stack.measure([tilings[rows]], rows))).seconds
            speed = weight_bytes / seconds / 1e12
            print(f"{count}x {rows:2d} rows {seconds * 1e3:.4f} ms {speed:.3f} TB/s", flush=True)
    subprocess.run(["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"], check=True)
