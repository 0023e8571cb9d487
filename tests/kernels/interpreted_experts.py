"""Run with TRITON_INTERPRET=1: the Triton kernels of routed experts against their reference."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.kernels.experts import reference, triton_kernels
from bough.kernels.experts.stack import ExpertStack, Routing, most_chunks, padded
from bough.kernels.quant_matmul.layout import pack
from bough.models.layers import Experts
from bough.models.spec import ModelSpec
from bough.models.weights import WeightLoader
from tests.kernels.interpreter import sum_in_order
from tests.kernels.test_quant_matmul_layout import random_blocks
from workshop.tiny import make_tiny

sum_in_order()

EXPERTS, USED, WIDTH = 11, 3, 96


def made_logits(rows: int) -> Tensor:
    """Return logits [rows, EXPERTS + 1] with ties; one expert is in all rows and has several chunks."""
    logits = torch.randint(-4, 4, (rows, EXPERTS + 1)).float()
    logits[:, 5] = 9.0
    return logits


def assert_routing(routing: Routing, logits: Tensor) -> None:
    weights, chosen = reference.route(logits[:, :EXPERTS], USED)
    assert torch.equal(routing.chosen.long(), chosen)
    assert torch.allclose(routing.weights, weights, rtol=1e-6)
    order, chunks = reference.grouped(chosen, routing.tokens)
    assert torch.equal(routing.order.long(), order)
    assert int(routing.count) == len(chunks) <= len(routing.chunks)
    assert torch.equal(routing.chunks[: len(chunks), :3].long(), chunks[:, :3])


@pytest.mark.parametrize("rows", [1, 3, 33, 70])
def test_routing(rows: int) -> None:
    torch.manual_seed(rows)
    logits = made_logits(rows)
    assert_routing(triton_kernels.route(logits, USED, 8), logits)


def test_chunks_have_room_when_every_pair_has_its_own_expert() -> None:
    logits = torch.full((3, EXPERTS + 1), -5.0)
    for row in range(3):
        logits[row, USED * row : USED * row + USED] = 1.0
    routing = triton_kernels.route(logits, USED, 16)
    assert_routing(routing, logits)
    assert int(routing.count) == 9 == most_chunks(9, EXPERTS, 16)


def test_a_row_of_nan_has_valid_experts() -> None:
    logits = made_logits(2)
    logits[0] = torch.nan
    routing = triton_kernels.route(logits, USED, 8)
    assert int(routing.chosen.min()) >= 0 and int(routing.chosen.max()) < EXPERTS
    assert sorted(routing.order.tolist()) == list(range(2 * USED))


@pytest.mark.parametrize("rows", [1, 5, 66])
def test_router(rows: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, WIDTH) * torch.logspace(-4, 4, rows)[:, None]
    weight, gate = torch.randn(EXPERTS, WIDTH), torch.randn(WIDTH)
    packed, logits = triton_kernels.router(x, weight, gate)
    expected = x.double() @ torch.cat([weight, gate[None]]).double().T
    assert float(((logits - expected).norm(dim=1) / expected.norm(dim=1)).max()) < 1e-6
    values = packed.data if packed.bucket is None else packed.data.transpose(0, 1).flatten(1)[:rows]
    restored = values[:, :WIDTH] * packed.scale[:, None]
    assert float(((restored - x).norm(dim=1) / x.norm(dim=1)).max()) < 1e-3
    assert not bool(values[:, WIDTH:].any())
    alone = triton_kernels.router(x[-1:].contiguous(), weight, gate)[1]
    assert torch.equal(alone[0], logits[-1])


@pytest.mark.parametrize(
    ("type", "rows", "each"),
    [(QuantType.Q4_K, 2, USED), (QuantType.Q6_K, 7, 1), (QuantType.Q8_0, 30, 1), (QuantType.F16, 3, USED)],
)
def test_matmul(type: QuantType, rows: int, each: int) -> None:
    """`each` pairs share a row of x."""
    torch.manual_seed(rows)
    count, size, columns = EXPERTS, 40, 256
    if type == QuantType.F16:
        blocks = torch.randn(count, size, columns).half().view(torch.uint8)
    else:
        blocks = random_blocks(type, count * size, columns).view(count, size, -1)
    blocks = torch.nn.functional.pad(blocks, (0, 0, 0, padded(size) - size))
    stack = ExpertStack.of(pack(blocks.flatten(0, 1), type), count, size)
    routing = triton_kernels.route(made_logits(rows), USED, triton_kernels.TOKENS)
    x = torch.randn(rows * USED // each, columns)
    packed = triton_kernels.router(x, torch.zeros(1, columns), torch.zeros(columns))[0]
    out = torch.full((rows * USED, size), torch.nan)
    triton_kernels.matmul(packed, stack, routing, out)
    expected = reference.expert_matmul(x, stack.unpacked(), routing.chosen)
    error = (out - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) < 1e-3


def test_combine() -> None:
    torch.manual_seed(0)
    shared, logits = torch.randn(3, WIDTH), torch.randn(3, EXPERTS + 1)
    outputs, weights = torch.randn(3 * USED, WIDTH), torch.rand(3, USED)
    found = triton_kernels.combine(shared, logits, outputs, weights)
    expected = reference.combine(shared, logits[:, -1], outputs.view(3, USED, WIDTH), weights)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen35moe", "qwen3moe"])
def test_a_layer_in_tiles_is_the_layer(tmp_path: Path, family: str) -> None:
    """All kernels together, as a GPU runs them, against the experts one after the other."""
    path = make_tiny(tmp_path / "tiny.gguf", family=family, width=256, mix="q4_k_m")
    with GGUFFile.open(path) as file:
        spec = ModelSpec.from_gguf(file)
        tiles, plain = (
            Experts(spec, WeightLoader(file, device=torch.device("cpu"), tiles=tiles), "blk.0")
            for tiles in (True, False)
        )
    torch.manual_seed(0)
    x = torch.randn(1, 7, spec.width)
    found, expected = tiles(x), plain(x)
    assert float((found - expected).norm() / expected.norm()) < 3e-3
