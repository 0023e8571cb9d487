"""The native library for tests, or why there is none."""

import pytest

from bough.kernels.native import Library, unavailable
from bough.kernels.native.build import library_path
from bough.kernels.native.library import usable_variants

needs_native = pytest.mark.skipif(
    unavailable() is not None, reason=f"no native CPU code here: {unavailable()}"
)


def variants() -> list[str]:
    """Return the variants of the library that are built and run on this CPU."""
    return [name for name in usable_variants() if library_path(name).exists()] if not unavailable() else []


def opened(threads: int = 1, variant: str | None = None) -> Library:
    return Library(threads, variant=variant)
