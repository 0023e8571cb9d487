"""CUDA C++ kernels compiled for a CPU: their assembly is replaced by C++, the rest is the kernel itself."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

COMPILER = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++ or clang++")
_LIBRARIES: dict[object, ctypes.CDLL] = {}
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
    "u32 permute": "return permuted(a, b, selector);",
    "u32 scaled": _SCALED,
    "void mma": "warp_mma(c, a, b0, b1);",
    "void copy16": "memcpy(shared_memory + to, from, 16);",
    "void launch_dependents": "",
    "void wait_for_inputs": "",
}
# Barriers that count arrivals and bytes.
BARRIER = """
struct Barrier {
  unsigned phase = 0;
  int expected = 0, pending = 0, bytes = 0;
  void update(int arrivals, int added) {
    pending -= arrivals, bytes += added;
    if (!pending && !bytes) phase ^= 1, pending = expected, idle = 0;
  }
};
static Barrier barriers[64];
static Barrier& barrier(unsigned address) { return barriers[address / 8 % 64]; }
"""
BARRIERS = {
    "u32 shared_address": "return (u32)((const u8*)p - shared_memory);",
    "void barrier_init": "Barrier& m = barrier(b); m.phase = m.bytes = 0; m.expected = m.pending = n;",
    "void barrier_wait": "while (barrier(b).phase == phase) yield();",
    "void barrier_expect": "barrier(b).update(1, n);",
    "void barrier_arrive": "barrier(b).update(1, 0);",
    "void bulk_copy": "memcpy(shared_memory + to, from, n); barrier(b).update(0, -(int)n);",
}


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


def compiled(
    text: str, folder: Path, name: str, macros: Mapping[str, int] | None = None, *, optimise: str = "-O1"
) -> ctypes.CDLL:
    """Return the library of a source without assembly; the same one for the same source."""
    key = text, tuple(sorted((macros or {}).items()))
    if key not in _LIBRARIES:
        _LIBRARIES[key] = _compiled(text, folder, name, macros or {}, optimise)
    return _LIBRARIES[key]


def _compiled(text: str, folder: Path, name: str, macros: Mapping[str, int], optimise: str) -> ctypes.CDLL:
    assert COMPILER is not None
    assert "asm" not in text, [line for line in text.splitlines() if "asm" in line]
    path, library = folder / f"{name}.cpp", folder / f"{name}.so"
    path.write_text(f'#include "cuda_on_cpu.h"\n{text}')
    options = ["-std=c++20", optimise, "-march=native", "-ffp-contract=off", "-shared", "-fPIC", "-w"]
    options += [
        f"-I{Path(__file__).parent}",
        *(f"-D{name}={value}" for name, value in (macros or {}).items()),
    ]
    done = subprocess.run([COMPILER, *options, str(path), "-o", str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:5000]
    return ctypes.CDLL(str(library))


def pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]
