"""Fixtures that more than one layer uses."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from treeflash.convert.tiny import make_tiny

# Two workers share two cores; more threads than that only get in each other's way.
torch.set_num_threads(1)

# The gate tries the same examples every time; `pytest --hypothesis-profile=search` looks for new ones.
settings.register_profile("gate", derandomize=True)
settings.register_profile("search", derandomize=False, print_blob=True)
settings.load_profile("gate")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a tiny random GGUF of a family, once a session."""
    folder = tmp_path_factory.mktemp("tiny")

    def make(family: str = "qwen35", **options) -> Path:
        name = "-".join([family, *(f"{key}={value}" for key, value in sorted(options.items()))])
        path = folder / f"{name}.gguf"
        if not path.exists():
            make_tiny(path, family=family, **options)
        return path

    return make
