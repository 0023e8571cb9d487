"""The launch of int8_hopper.cu."""

from ctypes import c_int, c_longlong
from functools import cache, partial

import torch
from torch import Tensor

from bough.kernels.quant_matmul.int8 import GROUP, Int8Matrix
from bough.kernels.runtime.device import card_of
from bough.kernels.runtime.driver import Kernel, Module
from bough.kernels.runtime.nvrtc import compile_cubin
from bough.kernels.runtime.sources import source

_STAGES, _STAGE = 4, 3 * 128 * 128
SHARED = _STAGES * (_STAGE + 16)
_BLOCK = (128, 256)  # rows and columns of the output


def _mma() -> str:
    """Return a CUDA function that adds one step of 32 columns to a warp group's sums [16][4] in int32.

    `more` = 0 starts new sums. Both operands are in shared memory: rows of 128 bytes, groups of eight rows
    1024 bytes apart, in the hardware's 128-byte swizzle.
    """
    sums = ",".join(f"%{i}" for i in range(64))
    outputs = ",".join(f'"+r"(c[{i}])' for i in range(64))
    layout = 1024 >> 4 | 1 << 30
    return (
        "__device__ __forceinline__ void mma(int* c, unsigned a, unsigned b, int more) {\n"
        '  asm volatile("{.reg .pred p; .reg .b64 d,e; setp.ne.b32 p,%66,0; "\n'
        f'    "mov.b64 d,{{%64,{layout}}}; mov.b64 e,{{%65,{layout}}}; "\n'
        f'    "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {{{sums}}},d,e,p;}}"\n'
        f'    : {outputs}\n    : "r"(a), "r"(b), "r"(more));\n}}\n'
    )


def hopper_source() -> str:
    return _mma() + source("quant_matmul", "int8_hopper.cu")


@cache
def _kernel(device: torch.device) -> Kernel:
    build = partial(compile_cubin, hopper_source(), defines={}, arch=f"{card_of(device).target}a")
    return Module(build, device).kernel("int8_matmul", threads=384, shared=SHARED)


def matmul(x: Int8Matrix, weight: Int8Matrix, out: Tensor) -> None:
    """Write x [M, K] times weight [N, K], transposed, both in tiles, to out [M, N] float32."""
    assert x.tiled and weight.tiled and out.stride(1) == 1, (x.tiled, weight.tiled, out.stride())
    blocks = -(-x.rows // _BLOCK[0]) * -(-weight.rows // _BLOCK[1])
    numbers = (x.rows, weight.rows, x.scales.shape[1], weight.scales.shape[1], x.columns // GROUP)
    arguments = [x.codes, x.scales, weight.codes, weight.scales, out, *map(c_int, numbers)]
    grid = min(blocks, card_of(out.device).processors)
    _kernel(out.device)((grid, 1), [*arguments, c_longlong(out.stride(0))])
