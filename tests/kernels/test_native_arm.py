"""The native sources for ARM: compiled by the ziglang package; where an emulator runs them, x86 bits."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from bough.kernels.native import build

PROGRAM = Path(__file__).parent / "native_bits.c"
needs_zig = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_zig
@pytest.mark.parametrize(
    "platform", [name for name, (variants, *_) in build.PLATFORMS.items() if "neon" in variants]
)
def test_the_library_compiles(platform: tuple[str, str], tmp_path: Path) -> None:
    _, target, _ = build.PLATFORMS[platform]
    made = tmp_path / "libbough-neon.so"
    assert build.build(build.zig(target), "neon", made, ("-Werror",)) is None
    assert made.stat().st_size > 50_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_zig
@pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="qemu-aarch64 is not installed")
def test_arm_gives_the_bits_of_x86(tmp_path: Path) -> None:
    """Every type of weights, and a small model's prompt, tree and plain steps, with the same libm."""
    found = []
    for variant, target, runner in (
        ("avx2", "x86_64-linux-musl", []),
        ("neon", "aarch64-linux-musl", ["qemu-aarch64"]),
    ):
        program = tmp_path / variant
        flags = [build.ZIG_NAMES.get(flag, flag) for flag in build.VARIANTS[variant]]
        flags += ["-std=gnu11", "-O2", "-ffp-contract=off", "-pthread", "-static", '-DDIGEST=""']
        sources = [PROGRAM, *(build.FOLDER / name for name in build.SOURCES)]
        call = [*build.zig(target), *flags, f"-I{build.FOLDER}", *map(str, sources), "-o", str(program)]
        subprocess.run(call, check=True)
        found.append(
            subprocess.run([*runner, str(program)], check=True, capture_output=True, text=True).stdout
        )
    assert found[0] == found[1]
    assert found[0].count("plain as in the tree: yes, refused: 0") == 6
