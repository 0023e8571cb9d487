"""Budgets, reserves and the limit of torch's allocator, without a GPU."""

import platform
from types import SimpleNamespace

import pytest
import torch

from bough.memory import device as memory
from bough.memory.device import CUDA_CONTEXT, CUDA_LIBRARIES, MemoryBudget, limit_allocator, memory_budget

GIB = 1 << 30
MIB = 1 << 20
GPU = torch.device("cuda", 0)
CARD = int(23.69 * GIB)


def pretend(monkeypatch: pytest.MonkeyPatch, free: int, total: int, *, integrated: bool = False) -> None:
    """Have torch report a GPU's memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    properties = SimpleNamespace(is_integrated=integrated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_a_limit_counts_what_torch_holds_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scorer of prompts is loaded before the plan is made: its memory stays torch's."""
    shares: list[float] = []
    pretend(monkeypatch, 60 * GIB, 80 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, index: shares.append(share)
    )
    limit_allocator(MemoryBudget(24 * GIB, 4 * GIB), GPU)
    assert shares == [(22 * GIB - CUDA_LIBRARIES) / (80 * GIB)]


@pytest.mark.parametrize(
    ("system", "release", "others", "spare"),
    [
        ("Linux", "6.8.0-generic", 0, 256 * MIB),
        ("Linux", "6.8.0-generic", GIB, int(0.03 * CARD)),  # a desktop
        ("Linux", "5.15.167.4-microsoft-standard-WSL2", 0, GIB),
        ("Windows", "11", GIB, GIB),
    ],
)
def test_what_stays_free(
    monkeypatch: pytest.MonkeyPatch, system: str, release: str, others: int, spare: int
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    pretend(monkeypatch, CARD - CUDA_CONTEXT - others, CARD)
    budget = memory_budget(GPU)
    assert (budget.limit, budget.in_use) == (CARD - spare, CUDA_CONTEXT + others)
    assert memory_budget(GPU, 8 * GIB).limit == 8 * GIB  # what was asked for is meant


def test_the_page_cache_of_shared_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GB10's driver counts a file that was just read as in use."""
    monkeypatch.setattr(memory, "available_memory", lambda device: 100 * GIB)
    pretend(monkeypatch, 70 * GIB, 120 * GIB, integrated=True)
    assert memory_budget(GPU).in_use == 20 * GIB
    pretend(monkeypatch, 70 * GIB, 120 * GIB)
    assert memory_budget(GPU).in_use == 50 * GIB
