"""CUDA C++ kernels compiled for a CPU: their assembly is replaced by C++, the rest is the kernel itself."""

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from bough.kernels.runtime.device import Card

COMPILER = shutil.which("g++") or shutil.which("clang++") if sys.platform == "linux" else None
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs Linux and g++ or clang++")
_LIBRARIES: dict[object, ctypes.CDLL] = {}
_SCALED = (
    "const u32 x = S ? s >> 16 : s & 0xffff, y = M ? m >> 16 : m & 0xffff;"
    "return fma_halves(codes, x << 16 | x, y << 16 | y);"
)
# Blocks run one after the other: a launch runs twice; the second time the results of all blocks are there.
EXCHANGE = {
    "u64 load_word": "return *p;",
    "void store_word": "*p = (u64)launch << 32 | __float_as_uint(value);",
    "float wait_for": "return __uint_as_float((u32)*p);",
}
# Functions whose bodies are assembly.
PDL = {"void launch_dependents": "", "void wait_for_inputs": ""}
HALVES = {
    "u32 to_half2": "return two_halves(low, high);",
    "float2 from_half2": "return {half(x & 0xffff), half(x >> 16)};",
    "void store": "memcpy(to, &first, 4), memcpy(to + 2, &second, 4);",
}
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
    **PDL,
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
    # A fortified longjmp refuses another stack.
    options = ["-std=c++20", optimise, "-march=native", "-ffp-contract=off", "-U_FORTIFY_SOURCE"]
    options += ["-shared", "-fPIC", "-w"]
    options += [f"-I{Path(__file__).parent}", *(f"-D{macro}={value}" for macro, value in macros.items())]
    command = [COMPILER, *options, str(path), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:5000]
    return ctypes.CDLL(str(library))


# Copies and launches, wherever they stand.
_STATEMENTS = {
    r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];": r"\1* \2 = (\1*)shared_memory;",
    r'asm volatile\("cp.async.commit_group;"[^;]*\);': "commit_copies();",
    r'asm volatile\("cp.async.wait_group (\d+);"[^;]*\);': r"wait_for_copies(\1);",
    # A function of `sources.warp_group_mma`.
    r"__device__ __forceinline__ (void \w+\([^)]*\)) \{\n  asm volatile\((?:(?!\n\}).)*"
    r"m64n(\d+)k16\.f32\.(b?)f16(?:(?!\n\}).)*\n\}": (
        r'static \1 { group_mma<\2, sizeof("\3") == 2>(c, a, b, more); }'
    ),
    # Blocks of a row meet through memory.
    r"#if CLUSTER > 1 && OVERLAP\n.*?#elif (CLUSTER > 1\n)": r"#if \1",
    r'asm volatile\("griddepcontrol[^"]*"[^;]*\);': ";",
}
_SIGNATURE = re.compile(
    r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\)|OF_CLUSTER|\s)*(\w+)\(([^)]*)\) *\{'
)
_RUN = """
extern "C" void run_%s(int grid_x, int grid_y, int threads, int shared, void** values) {
  launch_grid(grid_x, grid_y, threads, shared, [=] { %s(%s); });
}
"""


class EmulatedModule:
    """Stands for `driver.Module`: its source is compiled for the CPU."""

    def __init__(self, text: str, macros: Mapping[str, int], bodies: Mapping[str, str], folder: Path):
        text = with_bodies(text, bodies)
        for pattern, statement in _STATEMENTS.items():
            text = re.sub(pattern, statement, text, flags=re.DOTALL)
        for name, parameters in _SIGNATURE.findall(text):
            types = [parameter.strip().rpartition(" ")[0] for parameter in parameters.split(",")]
            values = (f"*({type}*)values[{place}]" for place, type in enumerate(types))
            text += _RUN % (name, name, ", ".join(values))
        self.library = compiled(text, folder, f"module{len(_LIBRARIES)}", macros)
        self._runs = 2 if macros.get("CLUSTER", 1) > 1 else 1

    def kernel(
        self, name: str, *, threads: int, shared: int = 0, overlap: bool = False
    ) -> Callable[[tuple[int, int], Sequence[Any]], None]:
        def launch(grid: tuple[int, int], arguments: Sequence[Any]) -> None:
            values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
            addresses = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
            for _ in range(self._runs):
                getattr(self.library, f"run_{name}")(*grid, threads, shared, addresses)
            self.library.failed.restype = ctypes.c_char_p
            failure = self.library.failed().decode()
            assert not failure, f"{name}, {failure}"

        return launch


class Emulation:
    """Has the CUDA kernels of a module of ours run on a CPU, as on a card, by their own launch code."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path):
        self._patch, self._folder = patch, folder

    def __call__(
        self, module: ModuleType, card: Card, bodies: Mapping[str, str], *caches: Any, backwards: bool = False
    ) -> None:
        """`caches`: the cached functions of the module that hold kernels."""

        def made(text: str, macros: Mapping[str, int], *_: Any, **__: Any) -> EmulatedModule:
            emulated = EmulatedModule(text, macros, bodies, self._folder)
            emulated.library.run_backwards(int(backwards))
            return emulated

        self._patch.setattr(module, "cuda_module", made)
        self._patch.setattr(module, "card_of", lambda _: card)
        self._patch.setattr(module, "runs", lambda *_: True, raising=False)
        for cached in caches:
            self._patch.setattr(module, cached.__name__, cache(cached.__wrapped__))


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Emulation:
    return Emulation(monkeypatch, tmp_path)


def pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]
