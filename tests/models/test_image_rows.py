"""Rows of images in a chunk, and rope positions that are not indices: torch and native, and restored."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bough.models.decoder import EMBEDDING_TAP
from bough.models.step import ImageRows, Step
from bough.state.snapshots import SnapshotStore
from tests.kernels.native_library import needs_native
from tests.models.test_native import Run, loaded, random_tokens

BACKENDS = [None, pytest.param(2, marks=needs_native)]
TAPS = (EMBEDDING_TAP, 2)


def ragged_step(slots: torch.Tensor, trees: list[tuple[list[int], list[int]]], lengths: torch.Tensor) -> Step:
    """Return one tree for each of slots [S], given as tokens and parents, after lengths [S] tokens."""
    zero = torch.zeros(1, dtype=torch.int64)
    one = [Step.tree(zero, *(torch.tensor([part]) for part in tree), zero) for tree in trees]
    tokens, depths, parents, ancestors = (
        torch.cat([getattr(step, name) for step in one], 1).to(slots.device)
        for name in ("tokens", "positions", "parents", "ancestors")
    )
    sizes = torch.tensor([len(tokens) for tokens, _ in trees], device=slots.device)
    first = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    positions = depths + lengths.repeat_interleave(sizes)
    return Step(slots, tokens, positions, parents, ancestors, first)


def image_chunk(run: Run, tokens: list[int], images: ImageRows) -> tuple[torch.Tensor, torch.Tensor]:
    run.states.reserve(run.slot, len(tokens))
    lengths = run.states.buffers.lengths[run.slots]
    chunk = Step.chunk(run.slots, torch.tensor([tokens]), lengths)
    step = Step(chunk.slots, chunk.tokens, chunk.positions, None, None, images=images)
    output = run.target.forward(step, run.states.buffers, taps=TAPS, tapped=len(tokens) - 3)
    run.states.advance(step)
    return output.hidden[0], output.features[0]


def story(run: Run, *, seen: bool = True) -> list[torch.Tensor]:
    """Run text, an image of 6 x 4 rows, text in its chunk, text after it, and a tree."""
    tokens = random_tokens(run.target.spec, 70, 3)
    rows = run.target.embed(torch.tensor(random_tokens(run.target.spec, 24, 4)))
    grid = torch.stack([torch.zeros(24), torch.arange(24) // 4, torch.arange(24) % 4]).long()
    positions = torch.cat([grid + 11, torch.arange(11 + 6, 11 + 6 + 46).expand(3, -1)], 1)
    outputs = [*run.chunk(tokens[:11], taps=TAPS)]
    outputs += image_chunk(run, tokens, ImageRows(torch.arange(24), rows, positions))
    run.states.set_offset(run.slot, 6 - 24 if seen else 0)
    outputs += run.chunk(tokens[:9], taps=TAPS)
    return [*outputs, *run.tree([5, 6, 7], [-1, 0, 0], last=2, taps=TAPS)]


@needs_native
def test_native_and_torch_agree(tiny_model: Callable[..., Path]) -> None:
    ours, theirs = (story(Run(loaded(tiny_model(), threads))) for threads in (None, 2))
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).abs().max() / a.abs().max()) < 5e-5


@pytest.mark.parametrize("threads", BACKENDS)
def test_text_has_the_same_bits_on_the_way_of_images(
    tiny_model: Callable[..., Path], threads: int | None
) -> None:
    target = loaded(tiny_model(), threads)
    tokens = random_tokens(target.spec, 90, 3)
    plain, seeing = Run(target), Run(target)
    text = plain.chunk(tokens, taps=TAPS, tapped=87)
    positions = torch.arange(90).expand(3, -1)
    some = torch.tensor([4, 50])
    images = ImageRows(some, target.embed(torch.tensor(tokens)[some]), positions)
    for a, b in zip(text, image_chunk(seeing, tokens, images), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("threads", BACKENDS)
def test_a_text_after_an_image_is_turned_by_its_offset(
    tiny_model: Callable[..., Path], threads: int | None
) -> None:
    target = loaded(tiny_model(), threads)
    right, wrong = story(Run(target)), story(Run(target), seen=False)
    assert float((right[-1] - wrong[-1]).abs().max() / right[-1].abs().max()) > 1e-2


def test_offsets_of_ragged_rows(tiny_model: Callable[..., Path]) -> None:
    """Rows of two slots in one step have the logits that they have alone."""
    run = Run(loaded(tiny_model()))
    states = run.states
    alone = story(run)[-1]
    tree = ([5, 6, 7], [-1, 0, 0])
    step = ragged_step(torch.tensor([0, 0]), [tree, ([9], [-1])], torch.tensor([90, 3]))
    assert step.rope_positions(torch.tensor([-18])).tolist() == [[72, 73, 73, -15]]
    assert alone.shape[0] == 3 and states.offsets == [-18]


def test_a_restored_state_goes_on_with_its_offset(tiny_model: Callable[..., Path]) -> None:
    run = Run(loaded(tiny_model()))
    story(run)
    store = SnapshotStore(run.states)
    saved = store.save(run.slot)
    _, before = run.tree([5, 8], [-1, 0], last=-1)
    run.states.close(run.slot)
    assert run.states.open() == run.slot and run.states.offsets == [0]
    store.restore(run.slot, saved)
    _, after = run.tree([5, 8], [-1, 0], last=-1)
    assert run.states.offsets == [-18] and torch.equal(before, after)
