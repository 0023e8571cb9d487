"""What other tests are skipped without: where it can be had, it has to be there."""

import sys

from bough.kernels.native import unavailable
from bough.kernels.native.build import skip_reason
from bough.kernels.native.library import usable_variants
from tests.kernels.emulator import COMPILER
from tests.kernels.native_library import variants


def test_the_native_library_is_there() -> None:
    """Every variant that this CPU runs; `python build.py` beside the sources makes them."""
    expected = usable_variants() if skip_reason() is None else []
    assert set(variants()) >= set(expected), unavailable()


def test_there_is_a_compiler_for_emulated_kernels() -> None:
    assert COMPILER is not None or sys.platform != "linux", "install g++ or clang++"
