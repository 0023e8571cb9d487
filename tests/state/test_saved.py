"""A saved sequence: going on from it is going on from the original, bit for bit, however often."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from bough.gguf.reader import GGUFFile
from bough.kernels.kv_cache.format import FORMATS
from bough.models.decoder import Decoder
from bough.models.step import DeltaBuffers, Step
from bough.state import snapshots
from bough.state.sequences import PAGE, CacheConfig, SequenceStates
from bough.state.snapshots import SnapshotStore
from workshop.steps import commit

MAX_ROWS = 8


@pytest.fixture(scope="module", params=["qwen35", "qwen3"])
def target(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Decoder:
    with GGUFFile.open(tiny_model(request.param)) as file:
        return Decoder.load(file, device=torch.device("cpu"), dtype=torch.float32)


class Sequence:
    def __init__(self, target: Decoder, states: SequenceStates):
        self.target, self.states, self.slot = target, states, states.open()
        self.slots = torch.tensor([self.slot])

    def chunk(self, count: int, seed: int) -> torch.Tensor:
        tokens = torch.randint(0, 200, (1, count), generator=torch.Generator().manual_seed(seed))
        self.states.reserve(self.slot, count)
        step = Step.chunk(self.slots, tokens, self.states.buffers.lengths[self.slots])
        hidden = self.target.forward(step, self.states.buffers).hidden
        self.states.advance(step)
        return hidden

    def tree(self, tokens: list[int], parents: list[int], last: int) -> torch.Tensor:
        self.states.reserve(self.slot, len(tokens))
        lengths = self.states.buffers.lengths[self.slots]
        step = Step.tree(self.slots, torch.tensor([tokens]), torch.tensor([parents]), lengths)
        hidden = self.target.forward(step, self.states.buffers).hidden
        commit(self.states, step, torch.tensor([last]))
        return hidden

    def go_on(self) -> torch.Tensor:
        rows = [
            self.tree([5, 6, 7, 8], [-1, 0, 0, 2], 3),
            self.chunk(PAGE + 3, seed=9),
            self.tree([1, 2], [-1, 0], 1),
        ]
        return torch.cat([row.flatten() for row in rows])


@pytest.mark.parametrize("group", [snapshots._GROUP_BYTES, 1])
def test_layers_are_saved_in_groups(target: Decoder, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would be some launches of its own on a GPU; `group`: bytes of recurrent states in one."""
    monkeypatch.setattr(snapshots, "_GROUP_BYTES", group)
    states = SequenceStates(target.spec, max_ctx=256, slots=2, max_rows=5)
    first, second = (Sequence(target, states) for _ in range(2))
    first.chunk(9, seed=1)
    store = SnapshotStore(states)
    saved, expected = store.save(first.slot), first.go_on()
    deltas = sum(kind != "attention" for kind in target.spec.layers)
    assert len(saved.layers) == (min(1, deltas) if group > 1 else deltas)
    store.restore(second.slot, saved)
    assert torch.equal(second.go_on(), expected)


def test_every_layer_is_aligned(target: Decoder) -> None:
    """Kernels are compiled for addresses that are; with 5 rows and odd sizes the next layer might not be."""
    states = SequenceStates(target.spec, max_ctx=256, slots=3, max_rows=5)
    deltas = [layer for layer in states.buffers.layers if isinstance(layer, DeltaBuffers)]
    for name in ("state", "window", "tree_inputs", "tree_gates"):
        tensors = [getattr(layer, name) for layer in deltas]
        assert all(tensor.is_contiguous() for tensor in tensors)
        assert all((b.data_ptr() - a.data_ptr()) % 16 == 0 for a, b in pairwise(tensors))


@pytest.mark.parametrize("length", [1, 20, PAGE - 1, PAGE, 3 * PAGE + 5])
@pytest.mark.parametrize("in_tree", [False, True])
def test_going_on_is_the_same_from_a_copy(target: Decoder, length: int, in_tree: bool) -> None:
    states = SequenceStates(target.spec, max_ctx=1024, slots=3, max_rows=MAX_ROWS)
    first = Sequence(target, states)
    first.chunk(length, seed=1)
    if in_tree:
        # Accepted rows that are not the tree's first, still to be folded into the recurrent states.
        first.tree([3, 4, 5, 6, 7], [-1, 0, 0, 2, 3], 4)
    store = SnapshotStore(states)
    saved = store.save(first.slot)
    expected = first.go_on()
    second = Sequence(target, states)
    store.restore(second.slot, saved)
    assert states.lengths[second.slot] == saved.length == length + (4 if in_tree else 0)
    assert torch.equal(second.go_on(), expected)
    states.close(first.slot)
    states.close(second.slot)
    # Others write over what is free, and the saved state outlives those that made it.
    other = Sequence(target, states)
    other.chunk(400, seed=3)
    third = Sequence(target, states)
    store.restore(third.slot, saved)
    assert torch.equal(third.go_on(), expected)
    store.release(saved)
    for sequence in (other, third):
        states.close(sequence.slot)
    fresh = Sequence(target, states)
    states.reserve(fresh.slot, 1000)
    assert states.shortage(fresh.slot, 1024) == 0


@pytest.mark.parametrize("in_tree", [False, True])
def test_a_parked_sequence_goes_on_in_another_slot(target: Decoder, in_tree: bool) -> None:
    """Its pages are free meanwhile, but for those that another sequence uses, too."""
    pages = 8
    states = SequenceStates(
        target.spec, max_ctx=1024, slots=2, max_rows=MAX_ROWS, cache=CacheConfig(pages=pages)
    )
    store, first = SnapshotStore(states), Sequence(target, states)
    first.chunk(PAGE, seed=1)
    shared = store.save(first.slot)
    sibling = Sequence(target, states)
    store.restore(sibling.slot, shared)
    first.chunk(2 * PAGE + 5, seed=2)
    if in_tree:
        first.tree([3, 4, 5, 6, 7], [-1, 0, 0, 2, 3], 4)
    saved = store.save(first.slot)
    expected = first.go_on()
    states.close(first.slot)
    second = Sequence(target, states)
    store.restore(second.slot, saved)
    store.release(saved)
    parked = store.park(second.slot)
    assert states.free_slots == 1 and (states.pages.free, states.pages.capacity) == (
        states.pages.capacity - 1,
        states.pages.capacity,
    )
    other = Sequence(target, states)
    states.reserve(other.slot, (pages - 1) * PAGE)
    assert states.shortage(sibling.slot, 2 * PAGE) > 0
    other.chunk(400, seed=3)
    states.close(other.slot)
    third = Sequence(target, states)
    assert store.shortage(third.slot, parked) == 0
    store.unpark(third.slot, parked)
    assert torch.equal(third.go_on(), expected)
    store.release(shared)
    for sequence in (sibling, third):
        states.close(sequence.slot)
    assert states.pages.free == states.pages.capacity


@pytest.mark.parametrize(
    "kv",
    [("f16", "bf16"), ("q8_0", "q8_0"), ("q5_0", "f32"), ("q8_0", "q4_0"), ("tq3_0", "tq3_0")],
    ids="-".join,
)
@pytest.mark.parametrize("static", [False, True])
def test_every_format_is_saved_restored_and_trimmed(
    target: Decoder, kv: tuple[str, str], static: bool
) -> None:
    formats = FORMATS[kv[0]], FORMATS[kv[1]]
    options = {"slots": 3, "max_rows": MAX_ROWS, "cache": CacheConfig(*formats), "static": static}
    states = SequenceStates(target.spec, max_ctx=512, **options)
    first = Sequence(target, states)
    first.chunk(PAGE + 9, seed=1)
    # The last rows of an accepted path are taken back: as if it had been shorter.
    first.tree([3, 4, 5, 6, 7], [-1, 0, 0, 2, 3], 4)
    states.rollback(first.slot, 2)
    store = SnapshotStore(states)
    saved = store.save(first.slot)
    shorter = Sequence(target, states)
    shorter.chunk(PAGE + 9, seed=1)
    shorter.tree([3, 4, 5, 6, 7], [-1, 0, 0, 2, 3], 2)
    expected = first.go_on()
    assert bool(expected.isfinite().all())
    assert torch.equal(shorter.go_on(), expected)
    states.close(first.slot)
    states.close(shorter.slot)
    for spilled in (False, True):
        for page in saved.pages if spilled else ():
            store.offload(page)
            store.evict(page)
        other = Sequence(target, states)
        other.chunk(300, seed=3)
        again = Sequence(target, states)
        store.restore(again.slot, saved)
        assert torch.equal(again.go_on(), expected)
        states.close(other.slot)
        states.close(again.slot)


def test_full_pages_are_shared_and_room_is_counted(target: Decoder) -> None:
    states = SequenceStates(target.spec, max_ctx=4 * PAGE - MAX_ROWS, max_rows=MAX_ROWS)
    sequence = Sequence(target, states)
    sequence.chunk(2 * PAGE + 1, seed=1)
    store = SnapshotStore(states)
    saved = store.save(sequence.slot)
    assert len(saved.pages) == 2 and saved.tail is not None
    assert store.pages_to_load(saved) == 1 and store.device_bytes == 2 * store.page_bytes
    states.close(sequence.slot)
    slot = states.open()
    assert [states.shortage(slot, count) for count in (2 * PAGE, 2 * PAGE + 1, 4 * PAGE)] == [0, 1, 2]
    store.restore(slot, saved)
    assert states.shortage(slot, PAGE) == 0


def test_pages_leave_the_pool_and_come_back(target: Decoder) -> None:
    states = SequenceStates(target.spec, max_ctx=8 * PAGE - MAX_ROWS, slots=2, max_rows=MAX_ROWS)
    store = SnapshotStore(states)
    first = Sequence(target, states)
    first.chunk(3 * PAGE + 7, seed=1)
    short = store.save(first.slot)
    first.chunk(2 * PAGE, seed=2)
    saved = store.save(first.slot)
    expected = first.go_on()
    assert saved.pages[:3] == short.pages and not any(map(store.is_evictable, saved.pages))
    states.close(first.slot)
    assert all(map(store.is_evictable, saved.pages))
    for page in saved.pages[1:]:
        store.offload(page)
        store.evict(page)
    assert (
        store.device_bytes == store.page_bytes
        and store.pages_to_load(saved) == 5
        and store.pages_to_load(short) == 3
    )
    other = Sequence(target, states)
    other.chunk(6 * PAGE, seed=3)  # over all that is free
    states.close(other.slot)
    for _ in range(2):
        again = Sequence(target, states)
        store.restore(again.slot, saved)
        assert store.pages_to_load(saved) == 1
        assert torch.equal(again.go_on(), expected)
        states.close(again.slot)
    # What of the longer one is shared stays with the shorter one.
    store.release(saved)
    assert [page.references for page in short.pages] == [1, 1, 1]
    assert store.device_bytes == 3 * store.page_bytes and store.host_page_bytes == 3 * store.page_bytes
    store.release(short)
    assert store.device_bytes == store.host_page_bytes == 0
    fresh = Sequence(target, states)
    assert states.shortage(fresh.slot, states.max_ctx) == 0


def test_tensors_are_copied_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one type, and of a size."""
    monkeypatch.setattr(snapshots, "_GROUP_BYTES", 100)
    kinds = [
        (10, torch.float32),
        (3, torch.float16),
        (15, torch.float32),
        (1, torch.float32),
        (200, torch.int8),
    ]
    tensors = [torch.zeros(size, dtype=dtype) for size, dtype in kinds]
    assert snapshots._groups(tensors) == [[0, 2], [1], [3], [4]]


def test_memory_is_pinned_ahead_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def allocate(shape, dtype, device):
        if len(made) == 5:
            raise MemoryError
        made.append(torch.empty(0))
        return made[-1]

    monkeypatch.setattr(snapshots, "_host_memory", allocate)
    monkeypatch.setattr(snapshots, "_GROUP_BYTES", 100)
    reserve = snapshots.HostReserve(torch.device("cuda"))
    pieces = 0
    while reserve.grow(in_use=150, wanted=250):
        pieces += 1
    assert pieces == len(made) == 3 and reserve.pinned == 450
    assert not reserve.grow(in_use=150, wanted=250) and not reserve.grow(in_use=0, wanted=0)
    assert reserve.grow(in_use=300, wanted=250)  # some of it was used since
    while reserve.grow(in_use=300, wanted=1000):
        pass
    assert len(made) == 5  # then there was no more: nobody asks again
    assert not reserve.grow(in_use=300, wanted=1000)
    assert not snapshots.HostReserve(torch.device("cpu")).grow(in_use=0, wanted=100)
