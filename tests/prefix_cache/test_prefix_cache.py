"""PrefixCache: matching, offload and eviction, and that restored states equal the saved ones."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from bough.gguf.reader import GGUFFile
from bough.models.spec import ModelSpec
from bough.prefix_cache.boundaries import SnapshotKind
from bough.prefix_cache.snapshot import packed
from bough.state import snapshots
from bough.state.sequences import PAGE
from tests.prefix_cache.recorder import Recorder


@pytest.fixture(scope="module")
def spec(tiny_model: Callable[..., Path]) -> ModelSpec:
    with GGUFFile.open(tiny_model()) as file:
        return ModelSpec.from_gguf(file)


def text(seed: int, count: int) -> list[int]:
    return [(seed * 31 + position**2) % 200 + 1 for position in range(count)]


def test_the_longest_matching_prefix_is_found(spec: ModelSpec) -> None:
    reader, words = Recorder(spec), text(1, 300)
    reader.read(words[:260], {70: "head", 130: "question", 250: "answer"})
    match = reader.cache.match

    def found(ids: list[int], ends: set[int]) -> int:
        snapshot = match(ids, ends)
        return 0 if snapshot is None else snapshot.length

    everywhere = set(range(300))
    assert found(words, everywhere) == 250
    # At least one token has to be left to compute.
    assert found(words[:250], everywhere) == 130 and found(words[:251], everywhere) == 250
    assert found([*words[:200], 0, 0], everywhere) == 130
    assert found([*words[:69], 0, 0], everywhere) == 0
    assert found([0, *words], everywhere) == 0
    # Only where a chunk of the prompt ends, except for answers.
    assert (
        found(words, {70}) == 250 and found(words[:240], {70, 200}) == 70 and found(words[:240], set()) == 0
    )


def test_full_pages_are_shared(spec: ModelSpec) -> None:
    reader, words = Recorder(spec), text(2, 5 * PAGE)
    reader.read(words, {2 * PAGE: "head", 4 * PAGE: "turn"})
    usage = reader.cache.usage
    assert usage.snapshots == 2 and usage.device_bytes == 4 * reader.store.page_bytes
    assert reader.read([*words[: 2 * PAGE], *text(3, 2 * PAGE)], {4 * PAGE: "turn"}) == 2 * PAGE
    assert reader.cache.usage.device_bytes == 6 * reader.store.page_bytes
    reader.cache.clear()
    usage = reader.cache.usage
    assert (usage.snapshots, usage.device_bytes, usage.host_bytes) == (0, 0, 0)


def test_pages_are_offloaded_before_snapshots_are_evicted(spec: ModelSpec) -> None:
    reader, one, other = Recorder(spec, pages=8), text(4, 6 * PAGE), text(5, 6 * PAGE)
    at: dict[int, SnapshotKind] = {5 * PAGE: "turn"}
    assert reader.read(one, at) == 0 and reader.cache.usage.host_bytes < 5 * reader.store.page_bytes
    assert reader.read(other, at) == 0
    assert len(reader.cache) == 2 and reader.cache.usage.host_bytes > 3 * reader.store.page_bytes
    # Two interleaved conversations keep their prefixes, though the pool holds one of them.
    for words in (one, other, one, other):
        assert reader.read(words, at) == 5 * PAGE


def test_superseded_snapshots_are_evicted_first(spec: ModelSpec) -> None:
    whole = Recorder(spec)
    whole.read(text(0, 10), {9: "turn"})
    each = whole.cache.usage.host_bytes
    reader = Recorder(spec, budget=5 * each + each // 2)  # their lengths differ a little
    system, one, other = text(6, 8), text(7, 50), text(8, 50)
    reader.read([*system, *one], {8: "head", 20: "turn"})
    reader.read([*system, *other], {20: "turn", 25: "answer"})
    reader.read([*system, *one], {40: "turn"})
    assert len(reader.cache) == 5
    reader.read([*system, *one], {50: "answer"})
    kept = sorted((snapshot.length, snapshot.kind) for snapshot in reader.cache._snapshots)
    assert kept == [(8, "head"), (20, "turn"), (25, "answer"), (40, "turn"), (50, "answer")]
    assert reader.read([*system, *other], {}) == 25 and reader.read([*system, *one], {}) == 50
    # A third conversation: the least recently used snapshot is evicted, the system prompt stays.
    reader.read([*system, *text(9, 50)], {21: "turn", 30: "answer"})
    assert reader.read([*system, *text(10, 50)], {}) == 8


def test_the_least_recently_used_is_evicted_first(spec: ModelSpec) -> None:
    reader, words = Recorder(spec), [text(seed, 100) for seed in range(4)]
    for tokens in words:
        reader.read(tokens, {90: "turn"})
    for index in (2, 0, 3, 1):
        assert reader.read(words[index], {}) == 90
    for left in ((0, 3, 1), (3, 1), (1,)):
        assert reader.cache._evict_lru(None)
        held = {bytes(snapshot.tokens) for snapshot in reader.cache._snapshots}
        assert held == {bytes(packed(words[index][:90])) for index in left}


def test_what_nobody_has_used_in_its_time_is_evicted_first(spec: ModelSpec, tmp_path: Path) -> None:
    reader = Recorder(spec, folder=tmp_path)
    used, ahead, fresh = (text(seed, 100) for seed in (1, 2, 3))
    reader.read(used, {90: "turn"})
    reader.read(ahead, {90: "turn"}, unused_s=0.0)
    reader.read(fresh, {90: "turn"}, unused_s=1000.0)
    assert reader.cache._evict_lru(None) and len(reader.cache) == 2
    found = [reader.cache.match(tokens, range(100)) is not None for tokens in (used, ahead, fresh)]
    assert found == [True, False, True]
    # Once it was used it is like any other, but it is not written to a file before.
    assert [each.expires for each in reader.cache._snapshots] == [None, None]
    assert reader.files is not None
    reader.files.flush()
    assert [each.tokens for each in reader.files.entries] == [packed(used[:90])]


def test_no_snapshots_without_a_budget(spec: ModelSpec, caplog: pytest.LogCaptureFixture) -> None:
    reader = Recorder(spec, budget=0)
    assert not reader.cache.enabled and reader.read(text(1, 90), {}) == reader.read(text(1, 90), {}) == 0
    small = Recorder(spec, budget=1)
    assert small.read(text(1, 90), {80: "turn"}) == small.read(text(1, 90), {80: "turn"}) == 0
    assert small.cache.usage.host_bytes == 0
    assert len(caplog.records) == 1 and "not cached: their snapshot takes" in caplog.text


def test_snapshots_are_restored_after_a_restart(spec: ModelSpec, tmp_path: Path) -> None:
    reader, words = Recorder(spec, folder=tmp_path), text(11, 4 * PAGE)
    reader.read(words, {PAGE: "head", 3 * PAGE + 5: "turn"})
    assert reader.cache.usage.disk_snapshots in (0, 1, 2)
    again = reader.restarted(spec, folder=tmp_path, pages=6)
    usage = again.cache.usage
    assert (usage.snapshots, usage.disk_snapshots) == (0, 2)
    assert usage.disk_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert again.read(words, {}) == 3 * PAGE + 5
    assert again.read([*words[: 2 * PAGE], 7, 7], {}) == PAGE


def test_a_failed_allocation_lowers_the_budget(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader, one, other = Recorder(spec, pages=8), text(12, 6 * PAGE), text(13, 6 * PAGE)
    reader.read(one, {5 * PAGE: "turn"})
    with monkeypatch.context() as patched:
        patched.setattr(snapshots, "torch", NoMemory)
        assert reader.read(other, {5 * PAGE: "turn"}) == 0  # the pages it needs are evicted all the same
    assert "no more than" in caplog.text and len(reader.cache) == 0
    usage = reader.cache.usage
    assert usage.device_bytes == usage.host_bytes == 0
    assert reader.states.pages.free == reader.states.pages.capacity


class NoMemory:
    """torch, except that `empty` fails."""

    Size = torch.Size
    arange = staticmethod(torch.arange)
    cat = staticmethod(torch.cat)
    uint8 = torch.uint8

    @staticmethod
    def empty(*_shape: object, **_options: object) -> None:
        raise RuntimeError("can't allocate memory")


def machine(spec: ModelSpec, folder: Path) -> type[RuleBasedStateMachine]:
    """Interleaved conversations that grow and change in little memory, with restarts."""

    class Edits(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            for path in folder.iterdir():
                path.unlink()
            self.options = {"budget": 1 << 30, "pages": 10, "folder": folder, "limit": 4 << 20}
            self.reader = Recorder(spec, **self.options)
            self.texts = [text(1, 40), text(1, 40) + text(2, 30)]

        @rule(which=st.integers(0, 9), count=st.integers(1, 150), seed=st.integers(0, 3), data=st.data())
        def grow(self, which: int, count: int, seed: int, data: st.DataObject) -> None:
            words = (self.texts[which % len(self.texts)] + text(seed, count))[: 10 * PAGE - 1]
            positions = data.draw(st.sets(st.integers(1, len(words)), max_size=3))
            kinds = data.draw(st.permutations(["head", "question", "turn", "grid"]))
            done = self.reader.read(words, dict(zip(sorted(positions), kinds, strict=False)))
            assert done < len(words)
            self.texts = [*self.texts, words][-4:]

        @rule(which=st.integers(0, 9), cut=st.integers(1, 600))
        def edit(self, which: int, cut: int) -> None:
            words = self.texts[which % len(self.texts)]
            self.texts = [*self.texts, [*words[:cut], 250, 251]][-4:]

        @rule(budget=st.sampled_from([1, 20_000, 200_000, 1 << 30]), pages=st.sampled_from([10, 14]))
        def restart(self, budget: int, pages: int) -> None:
            self.options |= {"budget": budget, "pages": pages}
            self.reader = self.reader.restarted(spec, **self.options)

        @rule()
        def clear(self) -> None:
            self.reader.cache.clear()

        @invariant()
        def counted(self) -> None:
            reader, usage = self.reader, self.reader.cache.usage
            pages = {id(page): page for each in reader.cache._snapshots for page in each.state.pages}
            resident = [page for page in pages.values() if page.index is not None]
            assert usage.device_bytes == len(resident) * reader.store.page_bytes
            assert all(page.index is not None or page.host is not None for page in pages.values())
            assert reader.states.pages.capacity - reader.states.pages.free == len(resident)
            tails = sum(each.state.tail is not None for each in reader.cache._snapshots)
            host_pages = sum(page.host is not None for page in pages.values()) + tails
            assert reader.store.host_page_bytes == host_pages * reader.store.page_bytes

        def teardown(self) -> None:
            assert self.reader.files is not None
            self.reader.files.flush()

    return Edits


@pytest.mark.parametrize("family", ["qwen35", "qwen3"])
def test_restored_states_match_the_text_after_any_edits(
    family: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    with GGUFFile.open(tiny_model(family)) as file:
        made = machine(ModelSpec.from_gguf(file), tmp_path)
    run_state_machine_as_test(made, settings=settings(max_examples=25, stateful_step_count=20, deadline=None))


def test_memory_is_reused_before_more_is_pinned(spec: ModelSpec) -> None:
    reader = Recorder(spec)
    reader.read(text(1, 50), {40: "turn"})
    each = reader.cache.usage.host_bytes
    assert each > reader.store.state_bytes > 0
    reader.read(text(2, 50), {40: "turn"})
    slot = reader.states.open()
    reader._write(slot, text(3, 40))
    insert = {"slot": slot, "tokens": text(3, 40), "kind": "answer", "draft": lambda: None}
    reader.cache.insert(**insert)
    assert len(reader.cache) == 3
    reader.store.reserve.pinned = 1
    reader.cache.insert(**(insert | {"kind": "turn"}))
    assert len(reader.cache) == 3  # the same tokens once, and a few snapshots stay
    reader.states.close(slot)
    for seed in range(4, 8):
        reader.read(text(seed, 50), {40: "turn"})
    assert len(reader.cache) == 5  # the new one, beside four
    reader.store.reserve.pinned = 8 * each
    reader.read(text(8, 50), {40: "turn"})
    assert len(reader.cache) == 6  # there was memory for it
    assert not reader.cache.use_idle_time()  # nothing is pinned on a CPU
