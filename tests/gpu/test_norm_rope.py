"""Norms, activations, rotary embedding and the draft's KV ring against the reference."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bough.kernels.kv_cache.format import KVRing
from bough.kernels.norm_rope import cuda as norm_cuda
from bough.kernels.norm_rope import reference
from bough.kernels.norm_rope import triton_kernels as norm_triton
from bough.kernels.quant_matmul.partial_sums import RowScaled
from bough.kernels.quant_matmul.triton_kernels import scale_rows
from bough.kernels.runtime.device import card_of
from bough.kernels.runtime.nvrtc import compile_cubin
from tests.gpu.card import needs_cuda_kernels
from tests.gpu.inputs import (
    DELTA_DIM,
    DEVICE,
    EPS,
    FEED_FORWARD,
    HEAD_DIM,
    INTERPRETED,
    KV_HEADS,
    ROTARY_DIM,
    ROW_COUNTS,
    VALUE_HEADS,
    WIDTH,
)
from tests.gpu.numerics import assert_close, assert_packed_rows, assert_same_bits, nan_filled_memory

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference_mode")]

FLOAT32 = 2e-6 if INTERPRETED else 1e-6  # relative RMS error of kernels that compute and store float32
FLOAT16 = (
    5e-4 if INTERPRETED else 1e-4
)  # of those that store float16; the interpreter does not round to the nearest
HEAD_DIMS = (128, 32)
NORM_SIZES = ((1, 5), (3, 40), (3, 300), (33, 24)) if INTERPRETED else ((1, WIDTH), (64, WIDTH), (3, 1000))
GATED_SIZES = ((1, 5, 8), (3, 2, 24), (33, 3, 8)) if INTERPRETED else ((7, VALUE_HEADS, DELTA_DIM),)
ROPE_DIMS = ((16, 8), (24, 8)) if INTERPRETED else ((HEAD_DIM, ROTARY_DIM),)
RING_HEADS = ((2, 24),) if INTERPRETED else ((8, 128),)
# Thread blocks that share a row, with rows and widths.
SIZES = ((1, WIDTH), (8, WIDTH), (24, 1000), (64, WIDTH), (3, 100), (2, FEED_FORWARD))
CLUSTER_SIZES = [(cluster, *size) for cluster in (1, 8) for size in SIZES] + [(2, 8, WIDTH), (4, 8, WIDTH)]


def gated_heads(width: int) -> int:
    return 4 * (width // 512) + 1


@pytest.fixture
def clusters() -> Iterator[dict]:
    """Give the number of thread blocks that share a row, to be changed by a test."""
    chosen = dict(norm_cuda.CLUSTERS)
    yield norm_cuda.CLUSTERS
    norm_cuda.CLUSTERS.update(chosen)


def compile_in_parallel(width: int) -> None:
    """Compile the variants of a width at once: with one block a row each takes seconds."""
    card = card_of(DEVICE)
    shapes = {
        *(norm_cuda.shape_of(kind, width) for kind in (norm_cuda.NORM, norm_cuda.SILU)),
        *(norm_cuda.shape_of(norm_cuda.GATED, gated_heads(width) * dim, dim) for dim in HEAD_DIMS),
    }

    def build(shape: norm_cuda.NormShape) -> bytes:
        return compile_cubin(norm_cuda.source(), defines=shape.defines(card.pdl), arch=card.target)

    with ThreadPoolExecutor(len(shapes)) as pool:
        list(pool.map(build, shapes))


@needs_cuda_kernels
@pytest.mark.parametrize(("cluster", "rows", "width"), CLUSTER_SIZES)
def test_cuda_kernels_match_the_reference(clusters: dict, cluster: int, rows: int, width: int) -> None:
    clusters.update(dict.fromkeys(clusters, cluster))
    compile_in_parallel(width)
    wide = torch.randn(1, rows, 2 * width + 8, device=DEVICE)
    wide *= 10.0 ** torch.randint(-6, 6, (1, rows, 1), device=DEVICE)
    x, y, weight = wide[..., :width], wide[..., width + 4 : 2 * width + 4], torch.randn(width, device=DEVICE)
    assert norm_cuda.takes(x, y)
    with nan_filled_memory():
        total, packed = norm_cuda.add_rms_norm(x, y, weight, EPS)
        alone = norm_cuda.add_rms_norm(x, None, weight, EPS)[1]
        activated = norm_cuda.silu_mul(x.clamp(-30, 30), y)
    assert_close(total, x + y, tolerance=FLOAT32, name="residual")
    assert_packed_rows(packed, reference.add_rms_norm(x, y, weight, EPS)[1], "norm")
    assert_packed_rows(alone, reference.rms_norm(x, weight, EPS), "norm without addition")
    assert_packed_rows(activated, reference.silu_mul(x.clamp(-30, 30), y), "silu")
    for dim in HEAD_DIMS:
        count, weight = gated_heads(width), torch.randn(dim, device=DEVICE)
        heads = torch.randn(1, rows, count, dim, device=DEVICE)
        gate = torch.randn(1, rows, count * dim + 4, device=DEVICE)[..., 4:]
        with nan_filled_memory():
            packed = norm_cuda.gated_rms_norm(heads, gate, weight, EPS)
        expected = reference.gated_rms_norm(heads, gate, weight, EPS)
        assert_packed_rows(packed, expected, f"gated norm, {count} heads of {dim}")


@needs_cuda_kernels
@pytest.mark.parametrize("kind", ["norm", "silu", "gated norm"])
def test_cuda_row_0_has_the_same_bits_in_every_row_count(kind: str) -> None:
    wide, weight = torch.randn(64, 2 * FEED_FORWARD, device=DEVICE), torch.randn(FEED_FORWARD, device=DEVICE)
    first = None
    for rows in ROW_COUNTS:
        x, y = wide[None, :rows, :FEED_FORWARD], wide[None, :rows, FEED_FORWARD:]
        if kind == "norm":
            packed = norm_cuda.add_rms_norm(x, y, weight, EPS)[1]
        elif kind == "silu":
            packed = norm_cuda.silu_mul(x, y)
        else:
            inner = VALUE_HEADS * DELTA_DIM
            heads = x[..., :inner].contiguous().unflatten(-1, (VALUE_HEADS, DELTA_DIM))
            packed = norm_cuda.gated_rms_norm(heads, y[..., :inner], weight[:DELTA_DIM], EPS)
        first = packed if first is None else first
        assert_same_bits(packed.halves()[0], first.halves()[0], f"{rows} rows")
        assert_same_bits(packed.scale[:1], first.scale[:1], f"{rows} rows, scale")


@pytest.mark.interpreted
@pytest.mark.parametrize(("rows", "width"), NORM_SIZES)
def test_triton_norms_and_activations_match_the_reference(rows: int, width: int) -> None:
    """As floats, and packed: what packing the floats would give, whatever a row's size."""
    wide = torch.randn(2, rows, 3 * width + 8, device=DEVICE)
    for size in (0, 8):
        wide *= 10.0 ** torch.randint(-size, size + 1, (2, rows, 1), device=DEVICE)
        x, add, weight = wide[..., :width], wide[..., width : 2 * width], torch.randn(width, device=DEVICE)
        with nan_filled_memory():
            total, normed = norm_triton.add_rms_norm(x, add, weight, EPS)
            activated = norm_triton.silu_mul(x, add)
            packed_norm = norm_triton.add_rms_norm(x, add, weight, EPS, pack=True)[1]
            packed_activated = norm_triton.silu_mul(x, add, pack=True)
        expected = reference.add_rms_norm(x, add, weight, EPS)
        assert_close(total, expected[0], tolerance=FLOAT32, name="residual")
        assert_close(normed, expected[1], tolerance=FLOAT32, name="norm")
        assert_close(activated, reference.silu_mul(x, add), tolerance=FLOAT32, name="silu")
        assert_packed_rows(packed_norm, expected[1], "packed norm")
        assert_packed_rows(packed_activated, reference.silu_mul(x, add), "packed silu")


@pytest.mark.interpreted
@pytest.mark.parametrize(("rows", "heads", "dim"), GATED_SIZES)
def test_triton_gated_norm_matches_the_reference(rows: int, heads: int, dim: int) -> None:
    x, weight = torch.randn(2, rows, heads, dim, device=DEVICE), torch.randn(dim, device=DEVICE)
    gate = torch.randn(2, rows, heads * dim + 4, device=DEVICE)[..., 4:]
    with nan_filled_memory():
        found = norm_triton.gated_rms_norm(x, gate, weight, EPS)
        packed = norm_triton.gated_rms_norm(x, gate, weight, EPS, pack=True)
    expected = reference.gated_rms_norm(x, gate, weight, EPS)
    assert_close(found, expected, tolerance=FLOAT32)
    assert_packed_rows(packed, expected)


@pytest.mark.interpreted
def test_row_scales_give_the_bits_of_rows_that_were_scaled_before() -> None:
    """Applied by the kernel that reads a matmul."""
    rows, width = 66, 300
    scale = torch.exp2(torch.randint(-12, 12, (rows,), device=DEVICE).float())
    x, whole = torch.randn(rows, width, device=DEVICE), torch.randn(rows, 2 * width, device=DEVICE)
    weight = torch.randn(width, device=DEVICE)
    parts = RowScaled(whole, scale).split((width, width))
    scaled = [part.scaled() for part in parts]
    found, expected = (norm_triton.silu_mul(*each, pack=True) for each in (parts, scaled))
    assert_same_bits(found.data[:, :width], expected.data[:, :width], "silu")
    assert_same_bits(found.scale, expected.scale, "silu, scales")
    (total, found), (sums, expected) = (
        norm_triton.add_rms_norm(x, each[0], weight, EPS, pack=True) for each in (parts, scaled)
    )
    assert_same_bits(total, sums, "residual")
    assert_same_bits(found.data[:, :width], expected.data[:, :width], "norm")
    scale_rows(whole[:, 10:310], scale)
    assert_same_bits(whole[:, 10:310], torch.cat(scaled, 1)[:, 10:310], "a slice in place")


def rope_angles(rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.randint(0, 9000, (2, rows), device=DEVICE)
    return reference.rope_angles(positions, torch.rand(dim // 2, device=DEVICE))


@pytest.mark.interpreted
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("dim", "rotated"), ROPE_DIMS)
def test_triton_rope_matches_the_reference(interleaved: bool, normed: bool, dim: int, rotated: int) -> None:
    x = torch.randn(2, 5, KV_HEADS, 2 * dim, device=DEVICE)[..., :dim]
    cos, sin = rope_angles(5, rotated)
    weight = torch.randn(dim, device=DEVICE) if normed else None
    with nan_filled_memory():
        found = norm_triton.head_rope(x, weight, EPS, cos, sin, interleaved=interleaved)
    expected = reference.head_rope(x, weight, EPS, cos, sin, interleaved=interleaved)
    assert_close(found, expected, tolerance=FLOAT32)


@pytest.mark.interpreted
@pytest.mark.parametrize("counts", [(0, 16), (1, 5)])
@pytest.mark.parametrize(("heads", "dim"), RING_HEADS)
def test_the_drafts_kv_ring_matches_the_reference(counts: tuple[int, int], heads: int, dim: int) -> None:
    """`counts` rows of each sequence are written, around the end of the ring; no other slot changes."""
    rows, size = 16, 40
    cos, sin = rope_angles(rows, dim)
    k, v = torch.randn(2, 2, rows, heads, dim + 4, device=DEVICE)[..., :dim]
    weight = torch.randn(dim, device=DEVICE)
    before = torch.randn(2, 3, size, heads, dim, device=DEVICE).half()
    slots = torch.tensor([2, 0], device=DEVICE)
    mapping = {
        "positions": torch.tensor([[30], [33]], device=DEVICE) + torch.arange(rows, device=DEVICE),
        "count": torch.tensor(counts, device=DEVICE),
    }
    results = []
    for implementation in (norm_triton, reference):
        keys, values = (part.clone() for part in before)
        ring = KVRing(keys, values, slots, slots, slots)  # lengths and starts are not read
        implementation.ring_heads(k, v, weight, EPS, cos, sin, ring=ring, **mapping)
        results.append(torch.stack([keys, values]))
    found, expected = results
    assert_close(found, expected, tolerance=FLOAT16)
    assert_same_bits(found == before, expected == before, "written elements")
