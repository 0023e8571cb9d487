"""Chunk sizes, what a chunk takes, and what a draft needs of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeflash.engine.prefill import EXPANDED_PAGES, EXPANDED_WEIGHTS, chunk_size, prefill_bytes, rows_wanted
from treeflash.gguf.reader import GGUFFile
from treeflash.kernels.attention import prefill as attention
from treeflash.kernels.quant_matmul import packed
from treeflash.models.spec import ModelSpec


def test_chunks_by_the_card() -> None:
    assert chunk_size("cpu", 1 << 40) == 512
    assert [chunk_size("cuda", gib << 30) for gib in (8, 24, 48, 139)] == [2048, 2048, 4096, 8192]


@given(
    length=st.integers(1, 400),
    chunk=st.integers(1, 90),
    kept=st.sets(st.integers(1, 400)),
    reach=st.integers(0, 120),
)
def test_what_is_read_later_is_never_skipped(length: int, chunk: int, kept: set[int], reach: int) -> None:
    """Every position that lies within reach of an end is handed over."""
    ends = {end for end in kept if end < length} | {length}
    cuts = sorted({*range(0, length, chunk), *ends})
    given: set[int] = set()
    for start, stop in zip([0, *cuts], cuts, strict=False):
        if stop > start:
            given |= set(range(stop - rows_wanted(start, stop, ends, reach), stop))
    needed = {place for end in ends for place in range(max(0, end - reach), end)}
    assert needed <= given


@pytest.mark.parametrize("family", ["qwen35", "qwen3", "qwen35moe"])
def test_bytes_of_a_chunk_grow_with_it(tiny_model: Callable[..., Path], family: str) -> None:
    with GGUFFile.open(tiny_model(family)) as file:
        spec = ModelSpec.from_gguf(file)
    sizes = [prefill_bytes(spec, chunk) for chunk in (512, 1024, 2048)]
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0])
    # The least there can be: the residual stream, and the two halves of a feed-forward layer.
    assert sizes[1] - sizes[0] >= 512 * 4 * (spec.width + 2 * spec.feed_forward)
    assert prefill_bytes(spec, 512, taps=3) - sizes[0] >= 512 * 4 * 3 * spec.width


def test_it_counts_on_the_slices_that_the_kernels_take() -> None:
    assert packed._SLICE == EXPANDED_WEIGHTS
    assert attention.SLICE_BYTES == EXPANDED_PAGES
