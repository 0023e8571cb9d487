"""Compiles the native CPU library for each kind of CPU: for the wheel's build hook, or `python build.py`.

Imports nothing of the package: the hook runs it before the package is installed.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = ("matmul.c", "pool.c", "step.c", "tree.c")
HEADERS = ("native.h", "neon.h", "simd.h")
# The same sources for CPUs with AVX2, and with dot products of integers in AVX or AVX-512 encoding; for ARM
# with NEON and its dot products.
VARIANTS = {
    "avx2": ("-march=x86-64-v3",),
    "avxvnni": ("-march=x86-64-v3", "-mavxvnni"),
    "avx512vnni": ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=256"),
    "neon": ("-march=armv8.2-a+dotprod",),
}
# What zig calls these CPUs.
ZIG_NAMES = {
    "-march=x86-64-v3": "-march=x86_64_v3",
    "-march=x86-64-v4": "-march=x86_64_v4",
    "-march=armv8.2-a+dotprod": "-mcpu=generic+v8_2a+dotprod",
}
# By system and machine: the variants, zig's target, and the platform in a wheel's name.
PLATFORMS = {
    ("linux", "x86_64"): (("avx2", "avxvnni", "avx512vnni"), "x86_64-linux-gnu.2.28", "linux_x86_64"),
    ("linux", "aarch64"): (("neon",), "aarch64-linux-gnu.2.28", "linux_aarch64"),
    ("darwin", "arm64"): (("neon",), "aarch64-macos", "macosx_11_0_arm64"),
}
# Contraction to FMA would be the compiler's choice: the sources say where they want one.
FLAGS = (
    "-std=c11",
    "-O3",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=default",
    "-Wall",
)


def digest() -> str:
    """Return what identifies the sources: a library made from others is not used."""
    files = [FOLDER / name for name in (*SOURCES, *HEADERS)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def library_path(variant: str, folder: Path = FOLDER) -> Path:
    return folder / f"libbough-{variant}.so"


def skip_reason() -> str | None:
    """Return why there is nothing to build here; None: the sources are for this platform."""
    if os.environ.get("BOUGH_NATIVE", "").strip() == "0":
        return "BOUGH_NATIVE is 0"
    if here() not in PLATFORMS:
        return f"there is no native code for {sys.platform} on {platform.machine()} yet"
    return None


def here() -> tuple[str, str]:
    """Return this machine's key in `PLATFORMS`, if it is there."""
    return sys.platform, platform.machine()


def compiler() -> list[str] | None:
    """Return the command of a C compiler: $CC, the system's, or that of the ziglang package."""
    named = os.environ.get("CC", "").split()
    if named and shutil.which(named[0]):
        return named
    for name in ("clang", "cc", "gcc"):  # clang makes the faster code: a step of 8 rows takes 5 to 10% less
        if shutil.which(name):
            return [name]
    return None if find_spec("ziglang") is None else zig(PLATFORMS[here()][1])


def zig(target: str) -> list[str]:
    """Return the command of the ziglang package's compiler, for this machine or another."""
    return [sys.executable, "-m", "ziglang", "cc", "-target", target]


def build(command: Sequence[str], variant: str, out: Path, extra: Sequence[str] = ()) -> str | None:
    """Compile one variant to `out`; return the compiler's message if it fails."""
    sources = [str(FOLDER / name) for name in SOURCES]
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        built = Path(folder) / out.name
        names = ZIG_NAMES if "ziglang" in command else {}
        flags = [names.get(flag, flag) for flag in VARIANTS[variant]]
        call = [*command, *FLAGS, *flags, f'-DDIGEST="{digest()}"', *extra, *sources, "-o", str(built), "-lm"]
        done = subprocess.run(call, capture_output=True, text=True)
        if done.returncode:
            return done.stderr.strip() or f"exit code {done.returncode}"
        built.replace(out)  # a library that a process has mapped stays as it is
    return None


def build_all(folder: Path = FOLDER, *, only: Sequence[str] = ()) -> tuple[list[Path], str]:
    """Compile what this machine's compiler can; return the libraries, and why some or all are missing."""
    if (reason := skip_reason()) is not None:
        return [], reason
    command = compiler()
    if command is None:
        return [], "no C compiler was found"
    only = only or PLATFORMS[here()][0]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = list(pool.map(lambda name: build(command, name, library_path(name, folder)), only))
    libraries = [
        library_path(name, folder) for name, problem in zip(only, problems, strict=True) if problem is None
    ]
    failed = [f"{name}: {problem}" for name, problem in zip(only, problems, strict=True) if problem]
    return libraries, "; ".join(failed)


if __name__ == "__main__":
    libraries, why = build_all(only=sys.argv[1:])
    print("\n".join([*map(str, libraries), *([f"not built: {why}"] if why else [])]))
    sys.exit(0 if libraries else 1)
