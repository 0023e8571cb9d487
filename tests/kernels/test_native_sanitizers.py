"""The native tests with address and undefined-behaviour sanitizers; skipped without a compiler for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bough.kernels.native.build import build
from bough.kernels.native.library import usable_variants
from tests.kernels.native_library import needs_native

ROOT = Path(__file__).parents[2]
TESTS = (
    "kernels/test_native_matmul.py",
    "models/test_native.py",
    "models/test_native_damaged.py",
    "models/test_native_draft.py",
)
FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SEED = """
#include <stdlib.h>
int tf_try(int n) { volatile char *block = malloc(8); return block[n]; }
"""


def runtime() -> str:
    """Return the path of gcc's address sanitizer, to be loaded before Python."""
    try:
        named = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no gcc")
    path = named.stdout.strip()
    if not os.path.isabs(path):
        pytest.skip("gcc has no address sanitizer")
    return os.path.realpath(path)


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "LD_PRELOAD": runtime(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "BOUGH_SANITIZED": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_native
def test_native_tests_with_sanitizers(tmp_path: Path) -> None:
    child = environment(tmp_path)
    for variant in usable_variants():
        assert build(["gcc"], variant, tmp_path / f"{variant}.so", FLAGS) is None
    call = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.kernels.sanitized_native"]
    call += ["-p", "no:cacheprovider", *(str(ROOT / "tests" / name) for name in TESTS)]
    done = subprocess.run(call, env=child, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "ERROR: AddressSanitizer" not in done.stderr, done.stdout + done.stderr
    assert " passed" in done.stdout and "runtime error" not in done.stderr, done.stdout + done.stderr


@pytest.mark.slow
@needs_native
def test_the_sanitizer_would_notice(tmp_path: Path) -> None:
    """A read behind a block of memory in a library of this kind ends the process."""
    (tmp_path / "seed.c").write_text(SEED)
    call = ["gcc", *FLAGS, "-fPIC", "-shared", "seed.c", "-o", "seed.so"]
    child = environment(tmp_path)
    subprocess.run(call, cwd=tmp_path, check=True)
    for place, stops in ((7, False), (9, True)):
        program = f"import ctypes; ctypes.CDLL({str(tmp_path / 'seed.so')!r}).tf_try({place})"
        done = subprocess.run([sys.executable, "-c", program], env=child, capture_output=True)
        assert bool(done.returncode) == stops
