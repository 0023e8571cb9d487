"""What the memory plan says of a GPU, where weights are held in tiles."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from treeflash.engine.memory import MemoryPlan, plan_memory, tile_sizes
from treeflash.gguf.reader import GGUFFile
from treeflash.kernels.quant_matmul import pack
from treeflash.models.spec import ModelSpec


def test_the_plan_of_a_gpu_counts_tiles(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treeflash.engine.memory.available_memory", lambda device: 1 << 40)
    with GGUFFile.open(tiny_model(mix="q8_0")) as file:
        spec = ModelSpec.from_gguf(file)
        expected = 0
        for name, info in file.tensors.items():
            embedding = name == "token_embd.weight"
            expected += info.nbytes if embedding else 0
            if len(info.shape) == 1 or "conv1d" in name:
                expected += info.elements * 4
            elif not embedding or spec.tied_head:
                rows = torch.from_numpy(file.raw(name).copy())
                expected += pack(rows.reshape(info.elements // info.shape[-1], -1), info.type).nbytes
        plan = plan_memory(
            file, spec, torch.device("cuda"), dtype=torch.bfloat16, max_ctx=None, weights="auto"
        )
        assert plan.expanded and plan.weights == expected == tile_sizes(file, spec)[0]
        assert plan.notes() == []


def test_types_without_a_kernel_are_named() -> None:
    plan = MemoryPlan(True, 1 << 30, 0, 0, 1, 256, 1 << 40, {"Q2_K": 3 << 30, "IQ2_XS": 1 << 30})
    (note,) = plan.notes()
    assert "Q2_K, IQ2_XS" in note and "4.00 GiB" in note
