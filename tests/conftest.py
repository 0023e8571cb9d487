"""Fixtures that more than one layer uses.

Imports nothing beyond torch and the engine's dependencies: the GPU machine has neither Hypothesis nor
pytest-timeout.
"""

import contextlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from workshop.tiny import make_tiny

# Two workers share two cores; more threads than that only get in each other's way.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of programs that tests start: their text must not depend on the load

# The gate tries the same examples every time; `pytest --hypothesis-profile=search` looks for new ones.
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import settings

    settings.register_profile("gate", derandomize=True)
    settings.register_profile("search", derandomize=False, print_blob=True)
    settings.load_profile("gate")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "tests marked gpu")
    group.addoption("--shard", default="0/1", metavar="I/N", help="run part I of N of the selected tests")
    group.addoption(
        "--grown-27b", type=Path, metavar="DIR", help="target.gguf and draft.gguf of `bough grow` 27b"
    )
    group.addoption("--random-27b", type=Path, metavar="DIR", help="the same shapes with random weights")
    group.addoption("--humaneval", type=Path, metavar="DIR", help="folder of humaneval/test.jsonl.gz")
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "seconds a test may take; needs pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeout(seconds): needs pytest-timeout")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep every N-th test from the I-th on, so that N processes compile kernels side by side."""
    part, parts = (int(number) for number in config.getoption("--shard").split("/"))
    dropped = [item for index, item in enumerate(items) if index % parts != part]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = items[part::parts]


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
