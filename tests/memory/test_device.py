"""The limit of torch's allocator, without a GPU."""

import pytest
import torch

from bough.memory.device import CUDA_LIBRARIES, MemoryBudget, limit_allocator

GIB = 1 << 30


def test_a_limit_counts_what_torch_holds_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scorer of prompts is loaded before the plan is made: its memory stays torch's."""
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, index: shares.append(share)
    )
    limit_allocator(MemoryBudget(24 * GIB, 4 * GIB), torch.device("cuda", 0))
    assert shares == [(22 * GIB - CUDA_LIBRARIES) / (80 * GIB)]
