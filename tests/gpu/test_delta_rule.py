"""Causal convolution and gated delta rule of tree steps and of prompt chunks against the references."""

import pytest
import torch

from tests.gpu.inputs import (
    DELTA_DIM,
    KEY_HEADS,
    MAX_TREE_ROWS,
    ROW_COUNTS,
    TAPS,
    VALUE_HEADS,
    DeltaChunk,
    DeltaLayers,
)
from tests.gpu.numerics import assert_close, assert_same_bits, nan_filled_memory
from treeflash.kernels.causal_conv import cuda as conv_cuda
from treeflash.kernels.causal_conv import reference as conv_reference
from treeflash.kernels.causal_conv import triton_kernels as conv_triton
from treeflash.kernels.delta_rule import chunk as delta_chunk
from treeflash.kernels.delta_rule import cuda as delta_cuda
from treeflash.kernels.delta_rule import reference as delta_reference
from treeflash.kernels.delta_rule import triton_kernels as delta_triton

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference_mode")]

CONV, DELTA = 3e-6, 5e-6  # relative RMS errors of the tree kernels, which compute in float32
CHUNK = 3e-3  # of the chunked delta rule, whose operands are float16
BACKENDS = {"cuda": (conv_cuda, delta_cuda), "triton": (conv_triton, delta_triton)}
# Rows, accepted rows pending, sequences.
SIZES = (
    (1, 0, 1), (1, 1, 1), (3, 2, 2), (8, 5, 1), (16, 16, 1), (23, 3, 2), (32, 1, 1), (48, 9, 1), (64, 64, 1),
)  # fmt: skip
CASES = [("cuda", *size) for size in SIZES] + [("triton", *size) for size in SIZES[2:6:3]]


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
    expected_out = delta_reference.tree_delta(
        *(part.double() for part in expected), state, **layer.rows_of_step
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


@pytest.mark.parametrize("rows", ROW_COUNTS[1:])
def test_row_0_does_not_depend_on_the_other_rows(rows: int) -> None:
    """Up to rounding: `benchmarks/gpu/layers.py` reports whether the bits are equal, too."""
    torch.manual_seed(1)
    alone = DeltaLayers(1, 3)
    before = alone.saved_buffers()
    heads = alone.conv()
    out = alone.delta(0, heads)
    wider = DeltaLayers(rows, 3)
    wider.inputs[:, :, :1] = alone.inputs
    wider.weights, wider.path = alone.weights, alone.path
    wider.restore(before)
    found = wider.conv()
    assert_close(found[0][:, :1], heads[0], tolerance=CONV, name="q")
    assert_close(wider.delta(0, found)[:, :1], out, tolerance=2 * DELTA, name="output")
    assert_close(wider.state, alone.state, tolerance=2 * DELTA, name="state")


CHUNKS = [((KEY_HEADS, VALUE_HEADS, DELTA_DIM), tokens) for tokens in (1, 63, 65, 200, 2048)]
CHUNKS += [((2, 6, dim), tokens) for dim in (16, 32, 64) for tokens in (16, 65)]


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


def test_a_chunk_is_causal_and_may_be_cut_in_two() -> None:
    """Later rows and a cut show in rounding only.

    (The power of two by which states and writes are scaled follows from the whole chunk.)
    """
    torch.manual_seed(1)
    chunk = DeltaChunk((KEY_HEADS, VALUE_HEADS, DELTA_DIM), 150, 0)
    heads, states = chunk.heads(), [chunk.state.clone(), chunk.state.clone()]
    whole = delta_chunk.slot_delta(*(part.clone() for part in heads), states[0], slots=chunk.slots)
    pieces = []
    for rows in (slice(0, 77), slice(77, None)):
        piece = [part[:, rows].clone(memory_format=torch.contiguous_format) for part in heads]
        pieces.append(delta_chunk.slot_delta(*piece, states[1], slots=chunk.slots))
    assert_close(pieces[0], whole[:, :77], tolerance=1e-4, name="rows before the cut")
    assert_close(pieces[1], whole[:, 77:], tolerance=CHUNK, name="rows after the cut")
    assert_close(states[1], states[0], tolerance=CHUNK, name="state")
