"""Causal convolution and gated delta rule of tree steps and of prompt chunks against the references."""

import random
from itertools import accumulate, pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

from bough.kernels.causal_conv import ConvRows, ConvWeights, DeltaBuffers
from bough.kernels.causal_conv import cuda as conv_cuda
from bough.kernels.causal_conv import reference as conv_reference
from bough.kernels.causal_conv import triton_kernels as conv_triton
from bough.kernels.delta_rule import DeltaHeads, DeltaRows
from bough.kernels.delta_rule import chunk as delta_chunk
from bough.kernels.delta_rule import cpu as delta_cpu
from bough.kernels.delta_rule import cuda as delta_cuda
from bough.kernels.delta_rule import triton_kernels as delta_triton
from bough.kernels.runtime.device import capability_of
from tests.gpu.card import needs_cuda_kernels
from tests.gpu.inputs import (
    CHANNELS,
    CUDA_KERNELS,
    DELTA_DIM,
    DELTA_KERNELS,
    DEVICE,
    INTERPRETED,
    KEY_HEADS,
    MAX_TREE_ROWS,
    TAPS,
    VALUE_HEADS,
    DeltaChunk,
    DeltaLayers,
    tree_rows,
)
from tests.gpu.numerics import assert_close, assert_same_bits, nan_filled_memory
from tests.kernels.delta_layer import DeltaLayer, ancestors_of, check_cuts_into_steps

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference_mode")]

# Relative RMS errors of the tree kernels, which compute in float32, and of the chunked delta rule, whose
# operands are float16.
CONV, DELTA, CHUNK = (2e-6, 2e-6, 1e-3) if INTERPRETED else (3e-6, 5e-6, 3e-3)
BACKENDS = {"cuda": (conv_cuda, delta_cuda), "triton": (conv_triton, delta_triton)}
# Rows, accepted rows pending, sequences.
SIZES = (
    (1, 0, 1), (1, 1, 1), (3, 2, 2), (8, 5, 1), (16, 16, 1), (23, 3, 2), (32, 1, 1), (48, 9, 1), (64, 64, 1),
)  # fmt: skip
CASES = [pytest.param("cuda", *size, marks=needs_cuda_kernels) for size in SIZES]
CASES += [("triton", *size) for size in SIZES[2:6:3]]
if INTERPRETED:
    CASES = [("triton", *size) for size in ((1, 1, 2), (5, 3, 2), (18, 17, 1))]
needs_chunk_kernels = pytest.mark.skipif(
    DEVICE.type == "cuda" and (capability_of(DEVICE) or (0, 0)) < (8, 0),
    reason="this card computes prompt chunks by torch operations",
)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize(("backend", "rows", "count", "batch"), CASES)
def test_tree_step_matches_the_reference(
    backend: str, rows: int, count: int, batch: int, dtype: torch.dtype
) -> None:
    conv, delta = BACKENDS[backend]
    with nan_filled_memory():
        layer = DeltaLayers(rows, count, batch=batch, dtype=dtype)
    index = conv_reference.conv_index(layer.tree.parents, TAPS, layer.count, MAX_TREE_ROWS)
    assert_same_bits(layer.index, index, "convolution index")
    before = layer.saved_buffers()
    expected = layer.conv(0, conv_reference)
    expected_buffers = layer.saved_buffers()
    state = layer.state[0].double()
    expected_out = delta_cpu.tree_delta(
        DeltaHeads(*(part.double() for part in expected)), state, layer.delta_rows
    )
    layer.restore(before)
    with nan_filled_memory():
        heads = layer.conv(0, conv)
    check_heads(heads, expected, [*range(count), *range(MAX_TREE_ROWS, MAX_TREE_ROWS + rows)])
    buffers = zip(("window", "tree inputs", "tree gates"), layer.buffers, expected_buffers, strict=False)
    for name, found, wanted in buffers:
        assert_close(found, wanted, tolerance=CONV, name=name)
    with nan_filled_memory():
        out = layer.delta(0, heads, delta)
    assert_close(out, expected_out, tolerance=DELTA, name="output")
    assert_close(layer.state[0], state, tolerance=DELTA, name="state")


def check_heads(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], used: list[int]) -> None:
    """Compare q, and of k, v, g and beta the rows `used`: pending ones, then those of the step."""
    for name, one, other in zip(("q", "k", "v", "g", "beta"), found, expected, strict=True):
        pair = (one, other) if name == "q" else (one[:, used], other[:, used])
        assert_close(*pair, tolerance=CONV, name=name)


@pytest.mark.interpreted
@pytest.mark.parametrize("sizes", [(3, 0, 7), (18, 1)])
@pytest.mark.parametrize("backend", BACKENDS if DEVICE.type == "cuda" else ["triton"])
def test_convolution_of_ragged_rows_matches_the_reference(sizes: tuple[int, ...], backend: str) -> None:
    """A sequence's rows are those it has alone; padding and a sequence without rows change nothing."""
    batch, total, length, saved = len(sizes), sum(sizes) + 2, 5, 18
    first, count = numbers(0, *sizes).cumsum(0), numbers(2, 0, 5)[:batch]
    parents = torch.cat(
        [*(tree_rows([_forest(rows, 0)]).parents[0] for rows in sizes if rows), numbers(-1, -1)]
    )
    index = conv_reference.conv_index(parents, TAPS, count, length, first)
    live = torch.ones(batch * length + total, dtype=torch.bool, device=DEVICE)
    live[-2:] = False
    assert_same_bits(conv_triton.conv_index(parents, TAPS, count, length, first)[live], index[live])
    wide = torch.randn(total, CHANNELS + 2 * VALUE_HEADS, device=DEVICE)
    inputs, alpha, beta = wide.split([CHANNELS, VALUE_HEADS, VALUE_HEADS], -1)
    decay, bias = -torch.rand(VALUE_HEADS, device=DEVICE), 30 * torch.randn(VALUE_HEADS, device=DEVICE)
    weights = ConvWeights(torch.randn(CHANNELS, TAPS, device=DEVICE), decay, bias, KEY_HEADS)
    state = [torch.randn(3, size, CHANNELS, device=DEVICE) for size in (TAPS - 1, saved)]
    state.append(torch.randn(3, saved, 2, VALUE_HEADS, device=DEVICE))
    slots = numbers(1, 1, 0) if 0 in sizes else numbers(2, 0)
    path = torch.randint(0, saved, (batch, length), device=DEVICE)
    rows, results = ConvRows(slots, path, count, index, first), []
    for implementation in (BACKENDS[backend][0], conv_reference):
        saves = [part.clone() for part in state]
        buffers = DeltaBuffers(torch.empty(0, device=DEVICE), *saves)
        if not (implementation is conv_cuda and not CUDA_KERNELS):
            results.append((implementation.tree_conv(inputs, alpha, beta, weights, buffers, rows), saves))
    if len(results) < 2:
        pytest.skip("this card runs Triton's kernels")
    (found, left), (expected, wanted) = results
    used = live.clone()
    for item, (begin, taken) in enumerate(zip(first.tolist(), count.tolist(), strict=False)):
        used[item * length + begin + taken : (item + 1) * length + begin] = False
    assert_close(found[0][:-2], expected[0][:-2], tolerance=CONV, name="q")
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert_close(one[used], other[used], tolerance=CONV)
    for one, other in zip(left, wanted, strict=True):
        assert_close(one, other, tolerance=CONV, name="saved rows")


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


class TreeHeads:
    """The delta rule's inputs of `sizes` tree rows a sequence, and `room` path rows before them."""

    def __init__(self, sizes: list[int], shape: tuple[int, int, int], room: int = 9, seed: int = 0):
        torch.manual_seed(seed)
        key_heads, value_heads, dim = shape
        batch, total = len(sizes), sum(sizes)
        self.room, self.sizes, self.bounds = room, sizes, [0, *accumulate(sizes)]
        self.first = torch.tensor(self.bounds, device=DEVICE)
        self.trees = [_forest(rows, seed + n) for n, rows in enumerate(sizes)]
        self.ancestors = torch.cat([tree_rows([tree]).ancestors[0] for tree in self.trees if tree])
        self.q = _unit(total, key_heads, dim) * dim**-0.5
        self.k = _unit(batch * room + total, key_heads, dim)
        self.v = torch.randn(len(self.k), value_heads, dim, device=DEVICE)
        self.g = -3 * torch.rand(len(self.k), value_heads, device=DEVICE) ** 2
        self.beta = torch.rand(len(self.k), value_heads, device=DEVICE)
        self.state = torch.randn(batch + 1, value_heads, dim, dim, device=DEVICE)
        self.slots = torch.randperm(batch + 1, device=DEVICE)[:batch]
        self.count = torch.tensor([(5 * n + 3) % (room + 1) for n in range(batch)], device=DEVICE)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k, self.v, self.g, self.beta

    def run(self, implementation: ModuleType = DELTA_KERNELS) -> tuple[Tensor, Tensor]:
        """Return the outputs [N, Hv, D] and the states; path rows from `count` on hold NaN."""
        inputs, state = [part.clone() for part in self.inputs], self.state.clone()
        for item, count in enumerate(self.count.tolist()):
            begin = item * self.room + self.bounds[item]
            for part in inputs:
                part[begin + count : begin + self.room] = torch.nan
        order = delta_triton.tree_order(self.ancestors, self.first)
        rows = DeltaRows(self.slots, self.count, order, self.first)
        with nan_filled_memory():
            return implementation.tree_delta(DeltaHeads(self.q, *inputs), state, rows), state

    def roots(self, item: int, implementation: ModuleType = DELTA_KERNELS) -> Tensor:
        """Return the outputs of one sequence's rows, each as the root after its path was committed.

        One call, in which every row is a sequence of its own.
        """
        rows, taken = self.sizes[item], int(self.count[item])
        begin = item * self.room + self.bounds[item]
        paths = []
        for row, bits in enumerate(ancestors_of(self.trees[item])):
            above = [begin + self.room + n for n in range(row) if bits >> n & 1]
            paths.append([*range(begin, begin + taken), *above])
        room = max(map(len, paths))
        chosen = [
            [*path, *[begin] * (room - len(path)), begin + self.room + n] for n, path in enumerate(paths)
        ]
        inputs = [part[torch.tensor(chosen, device=DEVICE)] for part in self.inputs]
        state = self.state[self.slots[item]].repeat(rows, 1, 1, 1)
        numbers = torch.arange(rows, device=DEVICE)
        count = torch.tensor([len(path) for path in paths], device=DEVICE)
        order = delta_triton.tree_order(torch.ones_like(numbers)[:, None])
        q = self.q[self.bounds[item] : self.bounds[item + 1], None].contiguous()
        heads = DeltaHeads(q, *inputs)
        return implementation.tree_delta(heads, state, DeltaRows(numbers, count, order))[:, 0]


def _unit(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(shape, device=DEVICE), dim=-1)


def _forest(rows: int, seed: int) -> list[int]:
    """Return the parents of a random tree with a few rows of padding, a chain, a star or a binary tree."""
    choose, kind = random.Random(seed), seed % 5
    if kind == 1:
        return list(range(-1, rows - 1))
    if kind == 2:
        return [-1, *[0] * (rows - 1)][:rows]
    if kind == 3:
        return [(row + 1) // 2 - 1 for row in range(rows)]
    parents = [choose.randrange(max(0, row - 7), row) if row else -1 for row in range(rows)]
    return parents if rows < 8 else [*parents[:-3], -1, -1, -1]


SHAPE = (KEY_HEADS, VALUE_HEADS, DELTA_DIM)
RAGGED = [
    *((SHAPE, [rows]) for rows in (1, 2, 8, 16, 24, 32, 48, 63, 64)),
    (SHAPE, [24, 24]),
    (SHAPE, [5, 0, 33, 1]),
    (SHAPE, [64, 8, 17]),
    ((1, 1, 128), [13]),
    ((3, 6, 64), [24, 3]),
    ((2, 6, 32), [31, 1, 16]),
    ((2, 4, 16), [64, 5]),
    ((1, 5, 96), [9]),
]
if INTERPRETED:
    RAGGED = [(SHAPE, [1]), ((1, 2, 32), [7]), ((1, 2, 16), [1, 12, 0]), ((1, 2, 16), [24, 7])]


@pytest.mark.interpreted
def test_the_order_of_visits_is_the_references() -> None:
    trees = [tree_rows([_forest(rows, seed)]).ancestors[0] for seed, rows in enumerate((1, 12, 64, 40))]
    ancestors, first = torch.cat(trees), numbers(0, 1, 13, 77, 117, 117)
    order = delta_cpu.tree_order(ancestors.cpu(), first.cpu())
    assert_same_bits(delta_triton.tree_order(ancestors, first).cpu(), order)


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(1 if INTERPRETED else 5))
@pytest.mark.parametrize(("shape", "sizes"), RAGGED)
def test_a_row_is_the_root_after_its_path_was_committed(
    shape: tuple[int, int, int], sizes: list[int], seed: int
) -> None:
    """Bit for bit, whatever tree, other sequences and number of rows; and close to the reference."""
    heads = TreeHeads(sizes, shape, seed=seed)
    inputs, rows = DeltaHeads(heads.q, *heads.inputs), DeltaRows(heads.slots, heads.count, heads.first)
    if not DELTA_KERNELS.takes_tree_delta(inputs, heads.state, rows):
        pytest.skip(f"this card computes heads of {shape[2]} by torch operations")
    order = delta_cpu.tree_order(heads.ancestors.cpu(), heads.first.cpu())
    assert_same_bits(delta_triton.tree_order(heads.ancestors, heads.first).cpu(), order, "order")
    out, state = heads.run()
    for item, (begin, end) in enumerate(pairwise(heads.bounds)):
        if end > begin:
            assert_same_bits(out[begin:end], heads.roots(item), f"sequence {item}")
    expected_state = heads.state.double()
    rows = DeltaRows(heads.slots, heads.count, order, heads.first)
    expected = delta_cpu.tree_delta(DeltaHeads(*(part.double() for part in inputs)), expected_state, rows)
    assert_close(out, expected, tolerance=DELTA, name="output")
    assert_close(state, expected_state, tolerance=DELTA, name="state")


@pytest.mark.parametrize(("shape", "sizes"), [((2, 6, 64), [24, 7]), (SHAPE, [31])])
def test_the_triton_kernel_gives_the_root_s_bits_too(shape: tuple[int, int, int], sizes: list[int]) -> None:
    heads = TreeHeads(sizes, shape, seed=4)
    out, state = heads.run(delta_triton)
    for item, (begin, end) in enumerate(pairwise(heads.bounds)):
        assert_same_bits(out[begin:end], heads.roots(item, delta_triton), f"sequence {item}")
    expected, expected_state = heads.run()
    assert_close(out, expected, tolerance=DELTA, name="output")
    assert_close(state, expected_state, tolerance=DELTA, name="state")


@needs_cuda_kernels
def test_another_order_of_summation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose tree rows sum k S from the last dim on, while a commit begins with the first."""
    source = delta_cuda.source()
    dot = source[source.index("DEVICE Own dot(") : source.index("// One step of the sum")]
    forward, backward = "for (int i = 0; i < DIMS; i += 2)", "for (int i = DIMS - 2; i >= 0; i -= 2)"
    use = "stored = dot(key, held);"
    assert forward in dot and source.count(use) == 1
    planted = dot.replace("dot(", "planted(").replace(forward, backward)
    changed = source.replace('extern "C"', planted + 'extern "C"').replace(use, use.replace("dot", "planted"))
    heads = TreeHeads([24], SHAPE)
    monkeypatch.setattr(delta_cuda, "source", lambda: changed)
    for cached in (delta_cuda._module, delta_cuda._kernel):
        cached.cache_clear()
    try:
        out, _ = heads.run()
        assert not torch.equal(out, heads.roots(0))
    finally:
        for cached in (delta_cuda._module, delta_cuda._kernel):
            cached.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("shape", [SHAPE, (2, 6, 128), (2, 6, 32)])
def test_layers_give_the_same_bits_for_every_cut_into_steps(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """From the convolution on, with a fold after every tree."""
    torch.manual_seed(2)
    shapes = [_forest(rows, seed) for seed, rows in enumerate((1, 8, 24, 64, 17, 48))]
    check_cuts_into_steps(DeltaLayer(shape, dtype, "cuda"), shapes)


CHUNKS = [((KEY_HEADS, VALUE_HEADS, DELTA_DIM), tokens) for tokens in (1, 63, 65, 200, 2048)]
CHUNKS += [((2, 6, dim), tokens) for dim in (16, 32, 64) for tokens in (16, 65)]
if INTERPRETED:
    CHUNKS = [((1, 3, 32), tokens) for tokens in (1, 65)]


@pytest.mark.interpreted
@needs_chunk_kernels
@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize(("shape", "tokens"), CHUNKS)
def test_prompt_chunk_matches_the_reference(shape: tuple[int, int, int], tokens: int, count: int) -> None:
    """`count` accepted rows are pending and folded into the state first; a second run gives the same bits."""
    torch.manual_seed(1)
    chunk = DeltaChunk(shape, tokens, count)
    expected = chunk.run(reference=True)
    with nan_filled_memory():
        found = chunk.run(reference=False)
        again = chunk.run(reference=False)
    names = (("output", CHUNK), ("state", CHUNK), ("window", 1e-6))
    for (name, tolerance), one, other, repeated in zip(names, found, expected, again, strict=True):
        assert_close(one, other, tolerance=tolerance, name=name)
        assert_same_bits(repeated, one, f"{name}, repeated")


@pytest.mark.interpreted
@needs_chunk_kernels
@pytest.mark.parametrize(("tokens", "size"), [(1, 1.0), (64, 1e9), (65, 1e-12), (150, 1.0)])
def test_values_and_states_of_any_size(tokens: int, size: float) -> None:
    """Float16 alone would not hold these; decays go from none to a state that is gone within a token."""
    q, k = _unit(2, 2, tokens, 1, 32).half()
    v, strength = size * torch.randn(2, tokens, 3, 32, device=DEVICE), torch.rand(2, tokens, 3, device=DEVICE)
    g = -30 * torch.rand(2, tokens, 3, device=DEVICE) ** 8
    heads, slots = DeltaHeads(q * 32**-0.5, k, v, g, strength), numbers(2, 0)
    states = [size * torch.randn(3, 3, 32, 32, device=DEVICE)] * 2
    states[1] = states[0].clone()
    found = delta_chunk.slot_delta(heads._replace(v=v.clone()), states[0], slots)
    assert_close(found, delta_cpu.slot_delta(heads, states[1], slots), tolerance=CHUNK, name="output")
    assert_close(states[0], states[1], tolerance=CHUNK, name="state")
    assert_same_bits(states[0][1], states[1][1], "a slot of another sequence")


@pytest.mark.interpreted
@needs_chunk_kernels
def test_a_chunk_is_causal_and_may_be_cut_in_two() -> None:
    """Later rows and a cut show in rounding only.

    (The power of two by which states and writes are scaled follows from the whole chunk.)
    """
    torch.manual_seed(1)
    chunk = DeltaChunk((KEY_HEADS, VALUE_HEADS, DELTA_DIM), 150, 0)
    heads, states = chunk.heads(), [chunk.buffers.state.clone(), chunk.buffers.state.clone()]
    whole = delta_chunk.slot_delta(DeltaHeads(*(part.clone() for part in heads)), states[0], chunk.slots)
    pieces = []
    for rows in (slice(0, 77), slice(77, None)):
        piece = DeltaHeads(*(part[:, rows].clone(memory_format=torch.contiguous_format) for part in heads))
        pieces.append(delta_chunk.slot_delta(piece, states[1], chunk.slots))
    assert_close(pieces[0], whole[:, :77], tolerance=1e-4, name="rows before the cut")
    assert_close(pieces[1], whole[:, 77:], tolerance=CHUNK, name="rows after the cut")
    assert_close(states[1], states[0], tolerance=CHUNK, name="state")
