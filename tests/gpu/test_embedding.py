"""Token embeddings from quantised tables on the device and in pinned host memory."""

import itertools

import pytest
import torch
from torch import Tensor

from bough.gguf.quants import dequantise
from bough.gguf.types import QuantType
from bough.kernels.check.inputs import random_rows
from bough.kernels.embedding import embed, gather_rows
from bough.kernels.embedding import triton_kernels as embedding_kernel
from bough.models.weights import Embedding
from tests.gpu.inputs import DEVICE, INTERPRETED
from tests.gpu.numerics import assert_same_bits, captured, nan_filled_memory

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference_mode")]

Q = QuantType
KERNEL_TYPES = tuple(embedding_kernel.TYPES)
WIDTHS = (512, 768) if INTERPRETED else (5120, 768)
GATHERED = ((0,), (1,), (2, 3), (1, 64)) if INTERPRETED else ((1,), (2, 3), (64,), (2048,))


def random_table(type: QuantType, rows: int, columns: int) -> Tensor:
    return random_rows(type, rows, columns, torch.Generator().manual_seed(rows)).to(DEVICE)


def some_tokens() -> Tensor:
    return torch.tensor([[49, 0, 3, 3], [17, 1, 48, 30]], device=DEVICE)


@pytest.mark.interpreted
@pytest.mark.parametrize("type", KERNEL_TYPES, ids=lambda type: type.name)
@pytest.mark.parametrize("columns", [*WIDTHS, 96])
def test_embedding_has_the_bits_of_dequantised_rows(type: QuantType, columns: int) -> None:
    columns = -(-columns // type.block_elements) * type.block_elements
    table, tokens = random_table(type, 50, columns), some_tokens()
    with nan_filled_memory():
        found = embedding_kernel.embed(table, type, tokens)
    assert_same_bits(found, dequantise(table[tokens], type))
    assert_same_bits(embed(table, type, tokens), found, "the package's function")


@pytest.mark.parametrize("type", [*KERNEL_TYPES, Q.Q4_0, Q.IQ4_XS], ids=lambda type: type.name)
@pytest.mark.parametrize("columns", WIDTHS)
def test_embedding_in_host_memory_has_the_same_bits(type: QuantType, columns: int) -> None:
    """Eagerly, and in a CUDA graph whose tokens change."""
    table, tokens = random_table(type, 50, columns), some_tokens()
    embedding = Embedding(table.cpu().pin_memory(), type)
    assert_same_bits(embedding(tokens), dequantise(table[tokens], type), "eager")
    graph, found = captured(lambda: embedding(tokens))
    tokens += 1 - 2 * (tokens > 40)
    graph.replay()
    assert_same_bits(found, dequantise(table[tokens], type), "graph")


def test_embedding_beyond_2_gib() -> None:
    few = random_table(Q.Q8_0, 50, 5120)
    rows = (1 << 31) // few.shape[1] + 100
    table = torch.zeros(rows, few.shape[1], dtype=torch.uint8, device=DEVICE)
    table[-50:] = few
    tokens = torch.arange(rows - 50, rows, device=DEVICE)
    assert_same_bits(embed(table, Q.Q8_0, tokens), dequantise(few, Q.Q8_0))


@pytest.mark.interpreted
@pytest.mark.parametrize("width", [1, 34, 36, 144, 2880, 4104])
@pytest.mark.parametrize("shape", GATHERED, ids=str)
def test_rows_gathered_from_host_memory(width: int, shape: tuple[int, ...]) -> None:
    table = torch.randint(0, 256, (11 if INTERPRETED else 5000, width), dtype=torch.uint8)
    rows = torch.randint(0, len(table), shape)
    held = table if INTERPRETED else table.pin_memory()
    found = embedding_kernel.gather_rows(held, rows.to(DEVICE))
    assert found.dtype == torch.uint8
    assert_same_bits(found.cpu(), table[rows])


@pytest.mark.parametrize(("count", "memory"), [*itertools.product((8, 64, 2048), ("host", "device"))])
def test_rows_gathered_in_a_graph(count: int, memory: str) -> None:
    """A table as large as a 27B's; the graph reads other rows at each replay."""
    table = torch.randint(0, 256, (248320, 2880), dtype=torch.uint8)
    held = table.pin_memory() if memory == "host" else table.to(DEVICE)
    rows = torch.randint(0, len(table), (count,), device=DEVICE)
    graph, found = captured(lambda: gather_rows(held, rows))
    for _ in range(3):
        rows.copy_(torch.randint(0, len(table), (count,)))
        graph.replay()
        assert_same_bits(found.cpu(), table[rows.cpu()])
