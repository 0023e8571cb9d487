"""tree.cu of the delta rule and of the convolution on a CPU: against the references, and bit for bit."""

import random
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from bough.kernels import causal_conv, delta_rule
from bough.kernels.causal_conv import cuda as conv_cuda
from bough.kernels.causal_conv import reference as conv_reference
from bough.kernels.delta_rule import DeltaHeads, DeltaRows, cpu, cuda
from tests.kernels import delta_layer
from tests.kernels.cards import CARDS
from tests.kernels.delta_layer import DeltaLayer, ancestors_of, check_cuts_into_steps, copied
from tests.kernels.emulator import HALVES, PDL, Emulation, emulate, needs_compiler

__all__ = ["emulate"]
pytestmark = needs_compiler
BODIES = {**PDL, **HALVES, "void copy": "copy_later(to, from, wanted ? 16 : 0, 16);"}


def scattered(rows: int, seed: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(max(0, row - 5), row) if row else -1 for row in range(rows)]


TREES = {
    "scattered": scattered(23, 1),
    "chain": list(range(-1, 11)),
    "star": [-1, *[0] * 8],
    "binary, padded": [*((row - 1) // 2 if row else -1 for row in range(17)), -1, -1],
    "root": [-1],
    "none": [],
}


class Heads:
    """Inputs of trees, ragged, and of the paths before them, whose unused rows hold NaN."""

    room = 6

    def __init__(self, trees: list[list[int]], shape: tuple[int, int, int]):
        torch.manual_seed(len(trees))
        key_heads, value_heads, dim = shape
        self.trees, self.bounds = trees, [0, *accumulate(map(len, trees))]
        batch, total = len(trees), self.bounds[-1]
        self.q = unit(total, key_heads, dim) * dim**-0.5
        self.k = unit(batch * self.room + total, key_heads, dim)
        self.v = torch.randn(len(self.k), value_heads, dim)
        self.g = -3 * torch.rand(len(self.k), value_heads) ** 2
        self.beta = torch.rand(len(self.k), value_heads)
        self.state = torch.randn(batch + 1, value_heads, dim, dim)
        self.slots = torch.randperm(batch + 1)[:batch]
        self.count = torch.tensor([(5 * n + 3) % (self.room + 1) for n in range(batch)])
        for item, count in enumerate(self.count.tolist()):
            begin = item * self.room + self.bounds[item]
            for part in self.inputs:
                part[begin + count : begin + self.room] = torch.nan

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k, self.v, self.g, self.beta

    @property
    def rows(self) -> DeltaRows:
        bits = torch.tensor([bits for tree in self.trees for bits in ancestors_of(tree)])
        first = torch.tensor(self.bounds)
        return DeltaRows(self.slots, self.count, cpu.tree_order(bits, first), first)

    def root(self, item: int, row: int) -> Tensor:
        """Return the output [Hv, D] of a row as the root after its path was committed."""
        begin, taken = item * self.room + self.bounds[item], int(self.count[item])
        above = [n for n in range(row + 1) if ancestors_of(self.trees[item])[row] >> n & 1]
        rows = [*range(begin, begin + taken), *(begin + self.room + n for n in above)]
        one, own = torch.tensor([0]), self.bounds[item] + row
        first = torch.tensor([0, 1])
        order = cpu.tree_order(torch.tensor([1]), first)
        heads = DeltaHeads(self.q[own : own + 1], *(part[rows] for part in self.inputs))
        state = self.state[self.slots[item : item + 1]]
        return cuda.tree_delta(heads, state, DeltaRows(one, torch.tensor([len(rows) - 1]), order, first))[0]


def unit(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(shape), dim=-1)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("shape", "names", "backwards"),
    [
        ((2, 6, 32), list(TREES), False),
        ((1, 2, 128), ["scattered"], True),
        ((2, 4, 16), ["binary, padded", "chain"], True),
    ],
)
def test_the_delta_rule_of_trees(
    emulate: Emulation, shape: tuple[int, int, int], names: list[str], backwards: bool
) -> None:
    emulate(cuda, CARDS["RTX 3090"], BODIES, cuda._module, cuda._kernel, backwards=backwards)
    heads = Heads([TREES[name] for name in names], shape)
    state = heads.state.clone()
    out = cuda.tree_delta(DeltaHeads(heads.q, *heads.inputs), state, heads.rows)
    expected_state = heads.state.double()
    exact = DeltaHeads(*(part.double() for part in (heads.q, *heads.inputs)))
    expected = cpu.tree_delta(exact, expected_state, heads.rows)
    assert error(out, expected) < 1e-6
    assert error(state, expected_state) < 1e-6
    for item, (begin, end) in enumerate(pairwise(heads.bounds)):
        for row in range(0, end - begin, 4):
            assert torch.equal(out[begin + row], heads.root(item, row)), f"{names[item]}, row {row}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_convolution_of_trees(emulate: Emulation, dtype: torch.dtype) -> None:
    emulate(conv_cuda, CARDS["RTX 3090"], BODIES, conv_cuda._kernel, backwards=dtype is torch.float32)
    torch.manual_seed(4)
    layer = DeltaLayer((1, 3, conv_cuda.DIM), dtype)
    layer.buffers.tree_inputs.normal_()
    layer.buffers.tree_gates.normal_()
    layer.path = [0, 3, 7, 8]
    tree, buffers = TREES["scattered"], copied(layer.buffers)
    step, rows = layer.step_rows(tree), layer.rows(len(tree))
    found = conv_cuda.tree_conv(*rows, layer.weights, layer.buffers, step)
    expected = conv_reference.tree_conv(*rows, layer.weights, buffers, step)
    for one, other in zip(found, expected, strict=True):
        assert error(one, other.double()) < 1e-6
    for name in ("window", "tree_inputs", "tree_gates"):
        assert error(getattr(layer.buffers, name), getattr(buffers, name).double()) < 1e-6


def test_a_layer_gives_the_same_bits_for_every_cut_into_steps(
    emulate: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(conv_cuda, CARDS["H200"], BODIES, conv_cuda._kernel)
    emulate(cuda, CARDS["H200"], BODIES, cuda._module, cuda._kernel)
    for module in (delta_layer, delta_rule):
        monkeypatch.setattr(module, "tree_delta", cuda.tree_delta)
    for module in (delta_layer, causal_conv):
        monkeypatch.setattr(module, "tree_conv", conv_cuda.tree_conv)
    torch.manual_seed(3)
    check_cuts_into_steps(
        DeltaLayer((1, 2, conv_cuda.DIM), torch.float16), [scattered(n, n) for n in (9, 4, 1)]
    )
