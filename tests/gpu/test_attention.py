"""Attention of tree steps, prompt chunks and draft blocks over the KV cache, against the references."""

import itertools

import pytest
import torch

from tests.gpu.attention_tiles import OTHER_TILES, other_tiles
from tests.gpu.inputs import (
    ATTENTION_HEADS,
    DEVICE,
    EPS,
    HEAD_DIM,
    KV_FORMATS,
    KV_HEADS,
    PAGE,
    ROTARY_DIM,
    ROW_COUNTS,
    AttentionChunk,
    PagedStep,
    binary_trees,
    random_trees,
)
from tests.gpu.numerics import assert_close, assert_same_bits, captured, nan_filled_memory
from treeflash.kernels.attention import prefill
from treeflash.kernels.attention import reference as attention_reference
from treeflash.kernels.attention import triton_kernels as attention_triton
from treeflash.kernels.kv_cache import triton_kernels as cache_kernel
from treeflash.kernels.norm_rope import rope_angles

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference_mode")]

# Head shapes, rows, context lengths, attention window.
EVERY_FORMAT_SHAPES = (
    (ATTENTION_HEADS, 11, (777, 130), None),
    (ATTENTION_HEADS, 24, (64, 4100), None),
    (ATTENTION_HEADS, 1, (20001, 1), None),
)
EQUAL_FORMAT_SHAPES = (
    ((32, 8, 128), 3, (0, 1001), None),
    ((16, 8, 64), 1, (65, 63), None),
    (ATTENTION_HEADS, 7, (9000, 70), 500),
    (ATTENTION_HEADS, 24, (9001,), 500),
    *((ATTENTION_HEADS, rows, (17000, 63), None) for rows in (33, 48, 64)),
)
PAIRS = sorted(itertools.product(KV_FORMATS, KV_FORMATS), key=lambda pair: pair[0] != pair[1])
CASES = [
    (pair, *shape)
    for pair in PAIRS
    for shape in (*EVERY_FORMAT_SHAPES, *(EQUAL_FORMAT_SHAPES if pair[0] == pair[1] else ()))
]


def tolerance(formats: tuple[str, ...], *, bf16: float) -> float:
    """Return the relative RMS error allowed: K and V are multiplied in float16, or in bfloat16."""
    return bf16 if "bf16" in formats else 2e-3


@pytest.mark.parametrize(
    ("formats", "heads", "rows", "lengths", "window"), CASES, ids=lambda value: str(value).replace(" ", "")
)
def test_tree_attention_matches_float64_in_every_kv_format(
    formats: tuple[str, str],
    heads: tuple[int, int, int],
    rows: int,
    lengths: tuple[int, ...],
    window: int | None,
) -> None:
    """The kernel that `paged_attention` picks; at 24 rows Triton's, too, which other cards use."""
    step = PagedStep(formats, rows, lengths, heads=heads, window=window)
    expected, allowed = step.reference(), tolerance(formats, bf16=1.5e-2)
    with nan_filled_memory():
        found = step.attention()
    assert_close(found, expected, tolerance=allowed)
    if rows == 24 and window is None and formats[0] == formats[1]:
        with nan_filled_memory():
            found = step.attention(attention_triton.paged_attention)
        assert_close(found, expected, tolerance=allowed, name="Triton")


TRITON_SIZES = ((1, 0), (3, 1), (8, 63), (16, 64), (24, 257), (33, 1000), (48, 8191), (64, 4100))


@pytest.mark.parametrize(
    ("heads", "format"), [(ATTENTION_HEADS, "f16"), (ATTENTION_HEADS, "bf16"), ((32, 8, 128), "f16")]
)
@pytest.mark.parametrize(("rows", "length"), TRITON_SIZES)
def test_triton_tree_attention_matches_float64(
    heads: tuple[int, int, int], format: str, rows: int, length: int
) -> None:
    step = PagedStep((format, format), rows, (length, length // 3), heads=heads, trees=random_trees)
    with nan_filled_memory():
        found = step.attention(attention_triton.paged_attention)
    assert_close(found, step.reference(), tolerance=tolerance((format,), bf16=1.2e-2))


@pytest.mark.parametrize("format", ["f16", "q8_0", "q5_0", "q4_0", "tq3_0"])
@pytest.mark.parametrize(("length", "window"), [(1000, None), (40000, None), (9000, 500)])
def test_row_0_has_the_same_bits_in_every_row_count(format: str, length: int, window: int | None) -> None:
    step = PagedStep((format, format), 64, (length,), window=window)
    q, gate, positions, first = step.q, step.gate, step.positions, None
    for rows in (1, 3, 8, 16, 24, 48, 64) if window is None else (1, 8, 24, 64):
        step.q, step.gate, step.tree = q[:, :rows], gate[:, :rows], binary_trees(rows)
        step.positions = positions[:, :rows]
        found = step.attention()[:, :1]
        first = found if first is None else first
        assert_same_bits(found, first, f"{rows} rows")


@pytest.mark.parametrize("rows", ROW_COUNTS[1:])
def test_triton_row_0_does_not_depend_on_the_other_rows(rows: int) -> None:
    """Up to rounding: `benchmarks/gpu/layers.py` reports whether the bits are equal, too."""
    step = PagedStep(("f16", "f16"), rows, (1000,), trees=random_trees)
    found = step.attention(attention_triton.paged_attention)[:, :1]
    step.q, step.gate, step.tree = step.q[:, :1], step.gate[:, :1], random_trees(1)
    step.positions = step.positions[:, :1]
    alone = step.attention(attention_triton.paged_attention)
    assert_close(found, alone, tolerance=2 * tolerance(("f16",), bf16=0))


@pytest.mark.parametrize(
    "changes", OTHER_TILES, ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items())
)
@pytest.mark.parametrize("format", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("rows", [24, 1])
def test_other_tiles_give_the_result_of_the_chosen_one(
    format: str, rows: int, changes: dict[str, int]
) -> None:
    """Other splits and instructions round differently; otherwise a tile changes no bit."""
    step = PagedStep((format, format), rows, (5000,))
    expected = step.attention()
    with other_tiles(changes):
        try:
            found = step.attention()
        except RuntimeError as error:
            pytest.skip(f"no room on this card: {error}")
    assert_close(found, expected, tolerance=1e-3 if {"SPLITS", "grouped"} & set(changes) else 1e-12)


@pytest.mark.parametrize("format", ["f16", "q8_0", "tq3_0"])
@pytest.mark.parametrize("rows", [1, 24])
def test_attention_that_starts_early_reads_the_rows_just_written(format: str, rows: int) -> None:
    """By PDL, attention starts while the previous kernel still writes the step's K and V."""
    step = PagedStep((format, format), rows, (9000,))
    heads = torch.randn(2, 2, 1, rows, KV_HEADS, HEAD_DIM, device=DEVICE)
    pages, offsets = torch.zeros(2, rows, dtype=torch.int64, device=DEVICE)
    angles = rope_angles(step.positions, torch.rand(ROTARY_DIM // 2, device=DEVICE))
    mapping = {"keys": step.pools[0], "values": step.pools[1], "pages": pages, "offsets": offsets}

    def write(turn: int) -> None:
        k, v = heads[turn % 2]
        cache_kernel.cache_heads(k, k, v, (None, None), EPS, *angles, interleaved=False, **mapping)

    def write_and_read() -> list[torch.Tensor]:
        found = []
        for turn in range(6):
            write(turn)
            found.append(step.attention())
        return found

    graph, found = captured(write_and_read)
    for length in range(8000, 9000, 17):
        step.lengths.fill_(length)
        slots = length + torch.arange(rows, device=DEVICE)
        pages.copy_(step.page_table[0, slots // PAGE])
        offsets.copy_(slots % PAGE)
        expected = []
        for turn in range(2):
            write(turn)
            torch.cuda.synchronize()
            expected.append(step.attention())
        graph.replay()
        for turn, out in enumerate(found):
            assert_same_bits(out, expected[turn % 2], f"context {length}, turn {turn}")


CHUNK_FORMATS = (("f16", "f16"), ("q8_0", "q8_0"), ("tq3_0", "f16"), ("q8_0", "q4_0"), ("bf16", "bf16"))


@pytest.mark.parametrize("formats", CHUNK_FORMATS, ids="-".join)
@pytest.mark.parametrize("heads", [ATTENTION_HEADS, (8, 2, 128), (8, 8, 64)], ids=str)
@pytest.mark.parametrize(("rows", "length"), [(1, 0), (127, 63), (513, 4000), (2048, 1)])
def test_chunk_attention_matches_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    formats: tuple[str, str],
    heads: tuple[int, int, int],
    rows: int,
    length: int,
) -> None:
    """The context is expanded in several slices."""
    torch.manual_seed(1)
    monkeypatch.setattr(prefill, "SLICE_BYTES", 4 * heads[1] * heads[2] * 1024)
    chunk = AttentionChunk(heads, rows, length, formats)
    with nan_filled_memory():
        found = chunk.attention()
    assert_close(found, chunk.reference(), tolerance=tolerance(formats, bf16=1e-2))


@pytest.mark.parametrize(
    ("length", "start", "window", "causal"),
    [(0, 0, None, False), (700, 5, None, False), (5000, 40, 2048, True), (300, 0, 2048, False)],
)
def test_draft_block_attention_matches_the_reference(
    length: int, start: int, window: int | None, causal: bool
) -> None:
    rows, heads, kv_heads, dim, ring = 16, 32, 8, 128, 2048
    q = torch.randn(2, rows, heads, dim, device=DEVICE)
    k, v = torch.randn(2, 2, rows, kv_heads, dim, device=DEVICE)
    keys, values = torch.randn(2, 3, ring, kv_heads, dim, device=DEVICE, dtype=torch.float16)
    slots = torch.tensor([2, 0], device=DEVICE)
    lengths, starts = torch.tensor([[77, 9, length], [3, 0, start]], device=DEVICE)
    positions = lengths[slots][:, None] + torch.arange(rows, device=DEVICE)
    arguments = (q, k, v, positions, keys, values, slots, lengths, starts)
    with nan_filled_memory():
        found = attention_triton.block_attention(*arguments, window=window, causal=causal)
    expected = attention_reference.block_attention(*arguments, window=window, causal=causal)
    assert_close(found, expected, tolerance=2e-3)
