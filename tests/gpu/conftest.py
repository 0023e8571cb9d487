"""Fixtures of the tests that need a CUDA device.

    PYTHONPATH=src pytest -m "gpu and not slow" tests/gpu     kernels and the embedded pair
    PYTHONPATH=src pytest -m "gpu and slow" tests/gpu         models of 27B size

They need torch, Triton, pytest and the engine's dependencies only; pytest-timeout and pytest-xdist may be
missing. Most of the time goes into compiling: with `--shard I/N` several processes each run a part. Tests of
27B size come first and run in fresh processes, one after the other: a memory limit holds for a whole device.
"""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.inputs import DEVICE, INTERPRETED
from workshop.grow.grow import grow

if INTERPRETED:
    from tests.kernels.interpreter import sum_in_order

    sum_in_order()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip without a device, before any fixture writes a large model; order slow tests first."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        on_cpu = INTERPRETED and item.get_closest_marker("interpreted")
        if item.get_closest_marker("gpu") and DEVICE.type == "cpu" and not on_cpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def cuda_memory() -> Iterator[None]:
    """Seed torch, and release the memory of a test."""
    torch.manual_seed(0)
    yield
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


def _grown(request: pytest.FixtureRequest, option: str, random: bool) -> Path:
    given = request.config.getoption(option)
    if given is not None:
        return given
    folder = request.getfixturevalue("tmp_path_factory").mktemp("model-27b")
    grow(folder, "27b", random=random, force=True)
    return folder


@pytest.fixture(scope="session")
def grown_27b(request: pytest.FixtureRequest) -> Path:
    """Return a folder with the embedded pair grown to 27B: it computes what the small pair computes."""
    return _grown(request, "--grown-27b", random=False)


@pytest.fixture(scope="session")
def random_27b(request: pytest.FixtureRequest) -> Path:
    """Return a folder with a pair of 27B shapes and random weights."""
    return _grown(request, "--random-27b", random=True)
