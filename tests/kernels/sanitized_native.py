"""A pytest plugin: native tests run a library built with sanitizers, from the folder BOUGH_SANITIZED."""

import os
from pathlib import Path

import torch

from bough.kernels import native
from bough.kernels.native import build, library

_FOLDER = Path(os.environ["BOUGH_SANITIZED"])


class HeapMemory:
    """Weights in blocks of their own, so that a sanitizer sees where one ends."""

    def take(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)


def library_path(variant: str) -> Path:
    return _FOLDER / f"{variant}.so"


def pytest_configure() -> None:
    build.library_path = library.library_path = library_path
    native.WeightMemory = HeapMemory
    library.find_library.cache_clear()
    found, variant = library.find_library()
    assert found is not None, variant
