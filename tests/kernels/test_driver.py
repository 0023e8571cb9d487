"""Launches through the CUDA driver, with a driver that only records what is asked of it."""

from ctypes import c_void_p
from types import SimpleNamespace

import pytest
import torch

from bough.kernels.runtime import driver


def test_a_function_may_use_the_shared_memory_of_its_largest_launch_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """48 KiB of dynamic memory beside a little static one need to be asked for, too."""
    limits: list[int] = []

    def set_attribute(function: c_void_p, attribute: int, value: int) -> int:
        limits.append(getattr(value, "value", value))
        return 0

    fake = SimpleNamespace(cuModuleGetFunction=lambda out, handle, name: 0, cuFuncSetAttribute=set_attribute)
    monkeypatch.setattr(driver, "_driver", lambda: fake)
    module = driver.Module(lambda: b"", torch.device("cuda", 0))
    module._handle = c_void_p(1)
    module.kernel("rows", threads=32)
    module.function("rows")
    assert limits == []
    for shared in (48 << 10, 1 << 10):
        module.kernel("experts", threads=128, shared=shared)
        module.function("experts")
    assert limits == [48 << 10, 48 << 10]
