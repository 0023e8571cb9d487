"""Routed experts: the reference, the kernels in Triton's interpreter, and machine code for every card."""

import re
from pathlib import Path

import pytest
import torch

from bough.gguf.types import QuantType
from bough.kernels.experts import cuda, reference
from bough.kernels.experts.stack import ExpertStack, most_chunks, padded
from bough.kernels.quant_matmul.layout import DENSE, LAYOUTS, Layout, pack
from bough.kernels.runtime.device import Card
from bough.kernels.runtime.nvrtc import compile_cubin
from tests.kernels.cards import CARDS, tool_output
from tests.kernels.emulated_experts import EmulatedExperts
from tests.kernels.emulator import needs_compiler
from tests.kernels.test_quant_matmul_layout import random_blocks

HOT = [LAYOUTS[type] for type in (QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0)]


def test_weights_are_the_renormalised_softmax_and_ties_go_to_the_lower_number() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    weights, chosen = reference.route(logits, 2)
    assert chosen.tolist() == [[1, 2], [0, 1]]
    best = logits.softmax(-1).topk(2).values
    assert torch.allclose(weights, best / best.sum(-1, keepdim=True))


def test_chunks_hold_every_pair_once() -> None:
    chosen = torch.tensor([[3, 0], [3, 1], [3, 0]])
    order, chunks = reference.grouped(chosen, 2)
    assert order.tolist() == [1, 5, 3, 0, 2, 4]
    assert chunks.tolist() == [[0, 0, 2, 0], [1, 2, 1, 1], [3, 3, 2, 3], [3, 5, 1, 3]]
    assert len(chunks) <= most_chunks(6, 4, 2)


def test_outputs_are_added_in_order_of_rank() -> None:
    outputs = torch.tensor([[[1e8], [1.0], [-1e8]]])
    total = reference.combine(torch.zeros(1, 1), torch.zeros(1), outputs, torch.ones(1, 3))
    assert float(total) == float((torch.tensor(1e8) + 1.0) - 1e8)


@needs_compiler
def test_the_cuda_kernel_is_the_reference_on_a_cpu(tmp_path: Path) -> None:
    """And a row's bits depend neither on the others, nor on the size of chunks, nor on the grid."""
    torch.manual_seed(1)
    experts, used, rows, size, columns = 5, 2, 11, 100, 512
    blocks = random_blocks(QuantType.Q4_K, experts * size, columns).view(experts, size, -1)
    blocks = torch.nn.functional.pad(blocks, (0, 0, 0, padded(size) - size)).flatten(0, 1)
    stack = ExpertStack.of(pack(blocks, QuantType.Q4_K), experts, size)
    logits = torch.randn(rows, experts)
    logits[:, 3] = 9.0  # more rows than a small chunk holds
    chosen, x = reference.route(logits, used)[1], torch.randn(rows, columns)
    expected = reference.expert_matmul(x, stack.unpacked(), chosen)
    found = []
    for tokens, ctas in ((cuda.FEW, 3), (cuda.SEVERAL, 4)):
        kernel = EmulatedExperts(CARDS["RTX 3090"], stack, tokens, tmp_path)
        found.append(kernel.matmul(x, *reference.grouped(chosen, tokens), ctas=ctas))
        assert float(((found[-1] - expected).norm(dim=1) / expected.norm(dim=1)).max()) < 2e-3
    assert torch.equal(found[0], found[1])
    # Wherever the weights are: in any place of the device's memory, or in the host's.
    cached, tables = stack.cached(3), reference.grouped(chosen, cuda.SEVERAL)
    for experts_there in ((3, 0, 4), (2, 1, 3)):
        cached.data.fill_(255)
        for place, expert in enumerate(experts_there[:2]):
            cached.data[place] = stack.data[expert]
        for chunk in tables[1]:
            expert = int(chunk[0])
            chunk[3] = experts_there.index(expert) if expert in experts_there[:2] else -1 - expert
        anywhere = EmulatedExperts(CARDS["RTX 3090"], cached, cuda.SEVERAL, tmp_path)
        assert torch.equal(anywhere.matmul(x, *tables, ctas=4), found[0])
    alone = kernel.matmul(x[4:5], *reference.grouped(chosen[4:5], cuda.SEVERAL), ctas=9)
    assert torch.equal(alone, found[0][4 * used : 5 * used])
    # Every pair has a row of its own, as for the second matrix.
    own = kernel.matmul(x.repeat_interleave(used, 0), *reference.grouped(chosen, cuda.SEVERAL), ctas=1)
    assert torch.equal(own, found[0])


def built(card: Card, layout: Layout, tokens: int, folder: Path) -> tuple[cuda.ExpertShape, int, int]:
    """Return the shape of a variant, its stack bytes and the shared bytes of a block."""
    shape = cuda.shape_of(card, layout, tokens)
    macros, path = shape.defines(card, layout), folder / "experts.cubin"
    assert macros["STAGES"] >= 2, (card, layout, tokens)
    path.write_bytes(compile_cubin(cuda.source(), defines=macros, arch=card.arch, cached=False))
    text = tool_output("cuobjdump", "--dump-resource-usage", str(path))
    found = re.search(r"Function experts:\s+REG:\d+ STACK:(\d+) SHARED:(\d+)", text)
    assert found, text
    # From Hopper on the driver's own 1 KiB is counted already.
    shared = int(found[2]) + macros["STAGES"] * shape.stage_bytes(layout) - (1024 if card.pdl else 0)
    return shape, int(found[1]), shared


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_variants_fit_every_card(card: Card, tmp_path: Path) -> None:
    for layout, rows in zip(HOT, (1, 64, 2048), strict=True):
        tokens = cuda.chunk_tokens(card, HOT, rows)
        shape, stack, shared = built(card, layout, tokens, tmp_path)
        assert stack == 0 and shared <= card.shared_per_block, (layout, tokens)
        assert (shared + 1024) * shape.resident <= card.shared_per_processor, (layout, tokens)


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), DENSE], ids=[*(type.name for type in LAYOUTS), "F16"])
def test_every_layout_has_a_ring_on_every_card(layout: Layout) -> None:
    for card in CARDS.values():
        for rows in (1, 8, 9, 64, 65):
            tokens = cuda.chunk_tokens(card, [layout], rows)
            assert cuda.shape_of(card, layout, tokens).stages(card, layout) >= 2, (card, rows)


def test_a_step_has_the_same_number_of_chunks_for_every_routing() -> None:
    assert most_chunks(8, 256, 8) == 9  # one row: at most eight experts, room for one more chunk
    assert most_chunks(64 * 8, 256, 16) == 256 + 32
