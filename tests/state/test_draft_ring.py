"""The sizes of the draft's rings."""

import pytest
import torch

from bough.errors import UsageError
from bough.models.draft_spec import DraftSpec
from bough.state.draft_ring import DEFAULT_CONTEXT, draft_buffers, restore_rings, save_rings

SPEC = DraftSpec(
    source="draft",
    layers=("sliding", "full", "sliding"),
    causal=(True, False, True),
    window=50,
    width=64,
    feed_forward=96,
    heads=4,
    kv_heads=2,
    head_dim=16,
    rope_theta=1e6,
    eps=1e-6,
    block_size=16,
    taps=(1, 3),
    mask_id=5,
)


@pytest.mark.parametrize(
    ("max_ctx", "context", "sliding", "full"),
    [
        (1000, None, 50, 1000),
        (40, None, 40, 40),
        (1000, 70, 50, 70),
        (1000, 20, 50, 20),
        (60, 70, 50, 60),
        (DEFAULT_CONTEXT + 1, None, 50, DEFAULT_CONTEXT),
        (4 * DEFAULT_CONTEXT, 2 * DEFAULT_CONTEXT, 50, 2 * DEFAULT_CONTEXT),
    ],
)
def test_rings_are_as_long_as_a_layer_looks_back(
    max_ctx: int, context: int | None, sliding: int, full: int
) -> None:
    assert DEFAULT_CONTEXT == 16384
    buffers = draft_buffers(SPEC, max_ctx=max_ctx, context=context, slots=3, dtype=torch.float16)
    for pools in (buffers.keys, buffers.values):
        assert [tuple(pool.shape) for pool in pools] == [
            (3, size, 2, 16) for size in (sliding, full, sliding)
        ]
        assert {pool.dtype for pool in pools} == {torch.float16}
    held = sum(pool.nbytes for pool in (*buffers.keys, *buffers.values))
    # Keys and values of two heads of 16 half floats for each position of each slot.
    assert held == 3 * (2 * sliding + full) * 2 * 2 * 16 * 2
    assert buffers.lengths.tolist() == buffers.starts.tolist() == [0, 0, 0]
    assert buffers.lengths.dtype == buffers.starts.dtype == torch.int64


def test_a_restored_ring_is_the_saved_one() -> None:
    """After a skipped prefix positions begin later than 0."""
    buffers = draft_buffers(SPEC, max_ctx=80, slots=2)
    for pool in (*buffers.keys, *buffers.values):
        pool[0].normal_()
    buffers.lengths[0], buffers.starts[0] = 70, 20
    saved = save_rings(buffers, 0)
    restore_rings(buffers, 1, saved)
    assert buffers.lengths.tolist() == [70, 70] and buffers.starts.tolist() == [20, 20]
    for pool in (*buffers.keys, *buffers.values):
        assert torch.equal(pool[1, :70], pool[0, :70])


def test_rings_share_no_memory() -> None:
    buffers = draft_buffers(SPEC, max_ctx=8)
    assert len({pool.data_ptr() for pool in (*buffers.keys, *buffers.values)}) == 6


@pytest.mark.parametrize("context", [0, -1])
def test_a_ring_holds_something(context: int) -> None:
    with pytest.raises(UsageError, match=f"is {context}, needed at least 1"):
        draft_buffers(SPEC, max_ctx=100, context=context)
