"""Pinned memory of experts: registered whole, and let go before it is unmapped."""

import gc
import mmap

import pytest
import torch

from bough.errors import ResourceError
from bough.models import pinned


class FakeRuntime:
    def __init__(self, error: int = 0):
        self.error, self.registered = error, dict[int, tuple[int, int]]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.registered[address] = (size, flags)
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        del self.registered[address]


def test_memory_is_registered_until_its_last_view_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    data = pinned.pinned_memory((3, 1000), torch.device("cuda"))
    assert runtime.registered == {data.data_ptr(): (3000, 3)} and data.data_ptr() % mmap.PAGESIZE == 0
    data.fill_(7)
    view = data[1:].view(-1)[:10]
    del data
    gc.collect()
    assert runtime.registered and view.tolist() == [7] * 10
    del view
    gc.collect()
    assert not runtime.registered


def test_what_the_driver_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(error=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(ResourceError, match="does not pin 3,000 bytes of host memory for experts: CUDA err"):
        pinned.pinned_memory((3, 1000), torch.device("cuda"))
    assert runtime.registered  # and is not let go: nothing was pinned


def test_a_cpu_has_ordinary_memory() -> None:
    assert pinned.pinned_memory((2, 3), torch.device("cpu")).shape == (2, 3)
