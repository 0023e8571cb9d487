"""Chunk sizes, what a chunk takes, and what a draft needs of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bough.engine.prompts import feature_rows
from bough.gguf.reader import GGUFFile
from bough.kernels.attention import prefill as attention
from bough.kernels.quant_matmul import packed
from bough.memory.estimate import EXPANDED_PAGES, EXPANDED_WEIGHTS, chunk_size, prefill_bytes
from bough.models.decoder import Decoder
from bough.models.spec import ModelSpec
from bough.models.step import Step
from bough.state.sequences import SequenceStates


def test_chunks_by_the_card() -> None:
    assert (chunk_size("cpu"), chunk_size("cuda")) == (512, 4096)


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
            given |= set(range(stop - feature_rows(start, stop, ends, reach), stop))
    needed = {place for end in ends for place in range(max(0, end - reach), end)}
    assert needed <= given


@pytest.mark.parametrize("family", ["qwen35", "qwen3", "qwen35moe", "qwen3moe"])
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


@torch.inference_mode()
def test_taps_of_the_last_rows_only(tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model("qwen35")) as file:
        target = Decoder.load(file)
    last, found = len(target.spec.layers) - 1, []
    for tapped in (None, 100, 5, 0):
        states = SequenceStates(target.spec, max_ctx=64)
        slots = torch.tensor([states.open()])
        states.reserve(0, 20)
        step = Step.chunk(slots, torch.arange(20)[None], states.buffers.lengths[slots])
        found.append(target.forward(step, states.buffers, taps=(0, last, 1), tapped=tapped).features)
    assert [part.shape for part in found] == [(1, n, 3 * target.spec.width) for n in (20, 20, 5, 0)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0][:, -5:], found[2])
