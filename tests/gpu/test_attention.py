"""Attention of tree steps, prompt chunks and draft blocks over the KV cache, against the references."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from bough.kernels.attention import PagedContext, paged_attention, prefill
from bough.kernels.attention import cpu as attention_cpu
from bough.kernels.attention import cuda as attention_cuda
from bough.kernels.attention import triton_kernels as attention_triton
from bough.kernels.kv_cache import triton_kernels as cache_kernel
from bough.kernels.kv_cache.format import KVRing
from bough.kernels.norm_rope import rope_angles
from tests.gpu.attention_tiles import OTHER_TILES, other_tiles
from tests.gpu.card import needs_cuda_attention
from tests.gpu.inputs import (
    ATTENTION_HEADS,
    DEVICE,
    EPS,
    HEAD_DIM,
    INTERPRETED,
    KV_FORMATS,
    KV_HEADS,
    PAGE,
    ROTARY_DIM,
    AttentionChunk,
    PagedStep,
    deep_trees,
    random_trees,
)
from tests.gpu.numerics import assert_close, assert_same_bits, captured, nan_filled_memory
from tests.kernels.paths import roots

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


# Rows, context length, window: around multiples of 64 and of all splits, and where rows get more splits.
FULL_CASES = (
    *((1, 0), (64, 0), (24, 1), (7, 63), (64, 64), (13, 127), (8, 500), (33, 1000), (48, 2047), (16, 2112)),
    *((24, 4095), (3, 4160), (24, 4280), (9, 4288)),
    *((24, 8250), (64, 8255), (12, 8256), (24, 16383), (5, 40000)),
)
WINDOW_CASES = ((24, 60, 100), (8, 9000, 500), (48, 8250, 5000), (2, 8256, 1))
PATH_CASES = (*((*case, None) for case in FULL_CASES), *WINDOW_CASES)
PATH_PAIRS = (("f16", "f16"), ("q8_0", "q8_0"), ("tq3_0", "tq3_0"), ("q8_0", "q4_0"), ("bf16", "q5_0"))
TREES = {"random": random_trees, "deep": deep_trees}


def plain_rows(step: PagedStep, implementation: Callable[..., torch.Tensor], item: int = 0) -> torch.Tensor:
    """Return every row of a tree [T, H, D] as plain decoding computes it, after its path was committed."""
    table, ancestors = step.page_table[item], step.tree.ancestors[item]
    rows = []
    for row, pools, length in roots(step.pools, table, int(step.lengths[item]), ancestors):
        one = slice(item, item + 1), slice(row, row + 1)
        root = PagedContext(*pools, table[None], length, torch.ones_like(length)[None], **step.reach)
        rows.append(implementation(step.q[one], root, gate=step.gate[one])[0, 0])
    return torch.stack(rows)


def assert_plain_decoding(
    step: PagedStep, implementation: Callable[..., torch.Tensor] = paged_attention
) -> None:
    with nan_filled_memory():
        found = step.attention(implementation)
        for item in range(len(step.lengths)):
            expected = plain_rows(step, implementation, item)
            assert bool(found[item].isfinite().all())
            different = (found[item].view(torch.int32) != expected.view(torch.int32)).flatten(1).any(1)
            assert not bool(different.any()), (
                f"rows {different.nonzero().flatten().tolist()} of {item} differ"
            )


@pytest.mark.parametrize("formats", PATH_PAIRS, ids="-".join)
@pytest.mark.parametrize("trees", TREES)
@pytest.mark.parametrize(("rows", "length", "window"), PATH_CASES)
def test_every_row_has_the_bits_of_plain_decoding(
    formats: tuple[str, str], rows: int, length: int, window: int | None, trees: str
) -> None:
    assert_plain_decoding(PagedStep(formats, rows, (length,), window=window, trees=TREES[trees]))


@pytest.mark.parametrize("formats", PATH_PAIRS[:3], ids="-".join)
@pytest.mark.parametrize("heads", [(32, 8, 128), (14, 2, 64), ATTENTION_HEADS])
@pytest.mark.parametrize(("rows", "length", "window"), PATH_CASES[1::3])
def test_every_row_of_triton_has_the_bits_of_plain_decoding(
    formats: tuple[str, str], heads: tuple[int, int, int], rows: int, length: int, window: int | None
) -> None:
    step = PagedStep(formats, rows, (length,), heads=heads, window=window, trees=TREES["deep"])
    assert_plain_decoding(step, attention_triton.paged_attention)


@pytest.mark.parametrize("formats", PATH_PAIRS[:2], ids="-".join)
@pytest.mark.parametrize(
    ("rows", "lengths"), [(6, (63, 8250)), (16, (1, 4096, 130, 8255)), (21, (64, 2048, 9000))]
)
def test_every_row_of_a_batch_has_the_bits_of_plain_decoding(
    formats: tuple[str, str], rows: int, lengths: tuple[int, ...]
) -> None:
    assert_plain_decoding(PagedStep(formats, rows, lengths, trees=TREES["deep"]))


@pytest.mark.parametrize("module", [attention_cuda, attention_triton], ids=["cuda", "triton"])
@pytest.mark.parametrize("formats", PATH_PAIRS[:3], ids="-".join)
@pytest.mark.parametrize("counts", [(5, 1, 34, 24), (1, 1, 1), (64, 0, 2)])
def test_sequences_may_have_different_numbers_of_rows(
    module: ModuleType, formats: tuple[str, str], counts: tuple[int, ...]
) -> None:
    lengths = (60, 8255, 4000, 130)[: len(counts)]
    step = PagedStep(formats, 64, lengths, trees=TREES["deep"])
    if module is attention_cuda:
        needs_cuda_attention(step)
    q, bits, gate = (
        torch.cat([rows[:count] for rows, count in zip(parts, counts, strict=True)])[None]
        for parts in (step.q, step.tree.ancestors, step.gate)
    )
    first = torch.tensor([0, *itertools.accumulate(counts)], device=DEVICE)
    with nan_filled_memory():
        (found,) = module.paged_attention(q, replace(step.context(), ancestors=bits, first=first), gate=gate)
        for item, count in enumerate(counts):
            if count == 0:
                continue
            one = slice(item, item + 1)
            tables = (step.page_table[one], step.lengths[one], step.tree.ancestors[one, :count])
            context = PagedContext(*step.pools, *tables)
            alone = module.paged_attention(step.q[one, :count], context, gate=step.gate[one, :count])
            assert_same_bits(found[first[item] : first[item + 1]], alone[0], f"sequence {item}")


def test_a_changed_order_of_one_sum_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assembled blocks add the products of their last keys first."""
    source = attention_cuda.Tile.source

    def changed(tile: attention_cuda.Tile) -> str:
        text, loop = source(tile), "for (int step = 0; step < 4; step++) {"
        assert text.count(loop) == 1
        other = "for (int turn = 0; turn < 4; turn++) { const int step = S::TEAM ? 3 - turn : turn;"
        return text.replace(loop, other)

    step = PagedStep(("f16", "f16"), 24, (60,), trees=TREES["deep"])
    needs_cuda_attention(step)
    assert_plain_decoding(step)
    monkeypatch.setattr(attention_cuda.Tile, "source", changed)
    attention_cuda._kernel.cache_clear()
    try:
        with pytest.raises(AssertionError, match="differ"):
            assert_plain_decoding(step)
    finally:
        attention_cuda._kernel.cache_clear()


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
    needs_cuda_attention(step)
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


# Length, start and window of a draft's block.
BLOCKS = ((0, 0, None), (700, 5, None), (5000, 40, 2048), (300, 0, 2048))
if INTERPRETED:
    BLOCKS = ((0, 0, None), (20, 3, None), (90, 40, 24), (33, 0, 24))
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


@pytest.mark.parametrize("window", [1, 100, 2048])
@pytest.mark.parametrize(("rows", "length"), [(1, 3000), (513, 4000), (2048, 1)])
def test_a_sliding_layer_reads_a_chunk(
    monkeypatch: pytest.MonkeyPatch, rows: int, length: int, window: int
) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr(prefill, "SLICE_BYTES", 4 * 2 * 128 * 1024)
    chunk = AttentionChunk((32, 2, 128), rows, length, ("f16", "f16"), window=window)
    with nan_filled_memory():
        found = chunk.attention()
    assert_close(found, chunk.reference(), tolerance=2e-3)


@pytest.mark.parametrize(("rows", "length", "window"), WINDOW_CASES)
def test_a_sliding_layer_verifies_a_tree(rows: int, length: int, window: int) -> None:
    step = PagedStep(
        ("f16", "f16"), rows, (length,), heads=(32, 2, 128), window=window, sinks=0, trees=random_trees
    )
    assert_close(step.attention(), step.reference(), tolerance=2e-3)
    assert_plain_decoding(step)


@pytest.mark.interpreted
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "start", "window"), BLOCKS)
def test_draft_block_attention_matches_the_reference(
    length: int, start: int, window: int | None, causal: bool
) -> None:
    rows, heads, kv_heads, dim, ring = (5, 4, 2, 16, 24) if INTERPRETED else (16, 32, 8, 128, 2048)
    q = torch.randn(2, rows, heads, dim, device=DEVICE)
    k, v = torch.randn(2, 2, rows, kv_heads, dim, device=DEVICE)
    keys, values = torch.randn(2, 3, ring, kv_heads, dim, device=DEVICE)
    if not INTERPRETED:
        keys, values = keys.half(), values.half()
    slots = torch.tensor([2, 0], device=DEVICE)
    lengths, starts = torch.tensor([[77, 9, length], [3, 0, start]], device=DEVICE)
    positions = lengths[slots][:, None] + torch.arange(rows, device=DEVICE)
    arguments = (q, k, v, positions, KVRing(keys, values, slots, lengths, starts))
    with nan_filled_memory():
        found = attention_triton.block_attention(*arguments, window=window, causal=causal)
    expected = attention_cpu.block_attention(*arguments, window=window, causal=causal)
    assert_close(found, expected, tolerance=2e-6 if INTERPRETED else 2e-3)
