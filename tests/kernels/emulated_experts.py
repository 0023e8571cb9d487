"""experts.cu on a CPU: its assembly is replaced by C++ (cuda_on_cpu.h), the rest is the kernel itself."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from bough.kernels.experts import cuda
from bough.kernels.experts.stack import ExpertStack
from bough.kernels.quant_matmul.rows import PackedRows, empty_rows
from bough.kernels.runtime.device import Card

COMPILER = shutil.which("g++")
_PERMUTE = (
    "u64 v = (u64)b << 32 | a; u32 d = 0;"
    "for (int i = 0; i < 4; i++) d |= (u32)(v >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i; return d;"
)
_SCALED = (
    "const u32 x = S ? s >> 16 : s & 0xffff, y = M ? m >> 16 : m & 0xffff;"
    "return fma_halves(codes, x << 16 | x, y << 16 | y);"
)
# Functions whose bodies are assembly.
BODIES = {
    "u32 shared_address": "return (u32)((const u8*)p - shared_memory);",
    "uint4 load128": "uint4 v; memcpy(&v, shared_memory + a, 16); return v;",
    "uint2 load64": "uint2 v; memcpy(&v, shared_memory + a, 8); return v;",
    "u32 load32": "u32 v; memcpy(&v, shared_memory + a, 4); return v;",
    "u32 fma2": "return fma_halves(a, b, c);",
    "u32 mul2": "return fma_halves(a, b, 0x80008000u);",
    "u32 add2": "return fma_halves(a, 0x3c003c00u, b);",
    "u32 permute": _PERMUTE,
    "u32 scaled": _SCALED,
    "void mma": "warp_mma(c, a, b0, b1);",
    "void copy16": "memcpy(shared_memory + to, from, 16);",
    "void launch_dependents": "",
    "void wait_for_inputs": "",
}
_RUN = """
extern "C" void run(int ctas, const u8* w, const float* row_scale, const u8* x, const float* x_scale,
                    float* y, const int4* chunks, const int* count, const int* order, int blocks,
                    int depth, int rows, int all_tiles, int expert_tiles, int each, long long group_stride,
                    long long row_stride) {
  launch(ctas, THREADS, [=] {
    experts(w, row_scale, x, x_scale, y, chunks, count, order, blocks, depth, rows, all_tiles, expert_tiles,
            each, group_stride, row_stride);
  });
}
"""


def with_bodies(text: str, bodies: Mapping[str, str]) -> str:
    """Return CUDA code with other bodies of the functions that it has of these."""
    for name, body in bodies.items():
        if f"DEVICE {name}(" not in text:
            continue
        begin = text.index("{", text.index(f"DEVICE {name}(")) + 1
        end, depth = begin, 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        text = f"{text[:begin]}{body}}}{text[end:]}"
    text = text.replace('asm volatile("mov.b32 %0,0x5464;" : "=r"(c.magic));', "c.magic = 0x5464;")
    return re.sub(r'asm volatile\("mov.b32 %0,%1;" : "=r"\((\S+)\) : "n"\((\w+)\)\);', r"\1 = \2;", text)


def emulated_source() -> str:
    text = with_bodies(cuda.source(), BODIES)
    text = re.sub(r'asm volatile\("cp.async[^;]*;"[^;]*;', ";", text)
    text = text.replace("extern __shared__ __align__(128) u8 ring[];", "u8* ring = shared_memory;")
    assert "asm" not in text, [line for line in text.splitlines() if "asm" in line]
    return f'#include "cuda_on_cpu.h"\n{text}{_RUN}'


class EmulatedExperts:
    """The variant of experts.cu for a card, a layout and chunks of `tokens` pairs."""

    def __init__(self, card: Card, stack: ExpertStack, tokens: int, folder: Path):
        assert COMPILER is not None
        self._stack, self._shape = stack, cuda.shape_of(card, stack.layout, tokens)
        source, library = folder / "experts.cpp", folder / f"experts-{tokens}.so"
        source.write_text(emulated_source())
        macros = [f"-D{name}={value}" for name, value in self._shape.defines(card, stack.layout).items()]
        options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", f"-I{Path(__file__).parent}"]
        subprocess.run([COMPILER, *options, *macros, str(source), "-o", str(library)], check=True)
        self._run = ctypes.CDLL(str(library)).run

    def matmul(self, x: Tensor, order: Tensor, chunks: Tensor, *, ctas: int) -> Tensor:
        """Return [pairs, N]; the grid has `ctas` blocks."""
        stack, packed, pairs = self._stack, pack_rows(x), len(order)
        out = torch.full((pairs, stack.rows), torch.nan)
        tables = [chunks.int().contiguous(), torch.tensor([len(chunks)]).int(), order.int().contiguous()]
        tensors = [stack.data, stack.row_scale, packed.data, packed.scale, out, *tables]
        depth, all_tiles = stack.data.shape[:2]
        blocks = -(-stack.rows // (16 * self._shape.tiles))
        sizes = (blocks, depth, stack.rows, all_tiles, stack.expert_tiles, pairs // len(x))
        strides = [ctypes.c_longlong(2 * stride) for stride in packed.strides]
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        self._run(ctas, *pointers, *sizes, *strides)
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
