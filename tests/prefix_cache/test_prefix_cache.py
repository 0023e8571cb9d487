"""What the prefix cache finds, keeps and lets go of, and that what it gives back is what was put in."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.prefix_cache.remembered import Reader
from treeflash.gguf.reader import GGUFFile
from treeflash.models.spec import ModelSpec
from treeflash.prefix_cache.boundaries import Kind
from treeflash.state import snapshots
from treeflash.state.sequences import PAGE


@pytest.fixture(scope="module")
def spec(tiny_model: Callable[..., Path]) -> ModelSpec:
    with GGUFFile.open(tiny_model()) as file:
        return ModelSpec.from_gguf(file)


def text(seed: int, count: int) -> list[int]:
    return [(seed * 31 + place * place) % 200 + 1 for place in range(count)]


def test_the_longest_exact_beginning_is_found(spec: ModelSpec) -> None:
    reader, words = Reader(spec), text(1, 300)
    reader.read(words[:260], {70: "head", 130: "question", 250: "answer"})
    match = reader.cache.match

    def found(ids: list[int], cuts: set[int]) -> int:
        snapshot = match(ids, cuts)
        return 0 if snapshot is None else snapshot.length

    everywhere = set(range(300))
    assert found(words, everywhere) == 250
    # Something has to be left to compute.
    assert found(words[:250], everywhere) == 130 and found(words[:251], everywhere) == 250
    assert found([*words[:200], 0, 0], everywhere) == 130
    assert found([*words[:69], 0, 0], everywhere) == 0
    assert found([0, *words], everywhere) == 0
    # Only where the prompt would be cut as well; an answer was never cut.
    assert (
        found(words, {70}) == 250 and found(words[:240], {70, 200}) == 70 and found(words[:240], set()) == 0
    )


def test_full_pages_are_shared(spec: ModelSpec) -> None:
    reader, words = Reader(spec), text(2, 5 * PAGE)
    reader.read(words, {2 * PAGE: "head", 4 * PAGE: "turn"})
    usage = reader.cache.usage
    assert usage.snapshots == 2 and usage.device_bytes == 4 * reader.saves.cell_bytes
    assert reader.read([*words[: 2 * PAGE], *text(3, 2 * PAGE)], {4 * PAGE: "turn"}) == 2 * PAGE
    assert reader.cache.usage.device_bytes == 6 * reader.saves.cell_bytes
    reader.cache.clear()
    usage = reader.cache.usage
    assert (usage.snapshots, usage.device_bytes, usage.host_bytes) == (0, 0, 0)


def test_pages_are_spilled_before_anything_is_forgotten(spec: ModelSpec) -> None:
    reader, one, other = Reader(spec, pages=8), text(4, 6 * PAGE), text(5, 6 * PAGE)
    at: dict[int, Kind] = {5 * PAGE: "turn"}
    assert reader.read(one, at) == 0 and reader.cache.usage.host_bytes < 5 * reader.saves.cell_bytes
    assert reader.read(other, at) == 0
    assert len(reader.cache) == 2 and reader.cache.usage.host_bytes > 3 * reader.saves.cell_bytes
    # Two interleaved conversations keep their prefixes, though the pool holds one of them.
    for words in (one, other, one, other):
        assert reader.read(words, at) == 5 * PAGE


def test_a_budget_is_kept_and_the_superseded_go_first(spec: ModelSpec) -> None:
    whole = Reader(spec)
    whole.read(text(0, 10), {9: "turn"})
    each = whole.cache.usage.host_bytes
    reader = Reader(spec, budget=5 * each + each // 2)  # they differ in length a little
    system, one, other = text(6, 8), text(7, 50), text(8, 50)
    reader.read([*system, *one], {8: "head", 20: "turn"})
    reader.read([*system, *other], {20: "turn", 25: "answer"})
    reader.read([*system, *one], {40: "turn"})
    assert len(reader.cache) == 5
    reader.read([*system, *one], {50: "answer"})
    kept = sorted((snapshot.length, snapshot.kind) for snapshot in reader.cache._snapshots)
    assert kept == [(8, "head"), (20, "turn"), (25, "answer"), (40, "turn"), (50, "answer")]
    assert reader.read([*system, *other], {}) == 25 and reader.read([*system, *one], {}) == 50
    # A third conversation: what was used longest ago goes, the system prompt stays.
    reader.read([*system, *text(9, 50)], {21: "turn", 30: "answer"})
    assert reader.read([*system, *text(10, 50)], {}) == 8


def test_nothing_is_kept_where_nothing_shall_be(spec: ModelSpec, caplog: pytest.LogCaptureFixture) -> None:
    reader = Reader(spec, budget=0)
    assert not reader.cache.keeps and reader.read(text(1, 90), {}) == reader.read(text(1, 90), {}) == 0
    small = Reader(spec, budget=1)
    assert small.read(text(1, 90), {80: "turn"}) == small.read(text(1, 90), {80: "turn"}) == 0
    assert small.cache.usage.host_bytes == 0
    assert len(caplog.records) == 1 and "not remembered: their state takes" in caplog.text


def test_a_file_outlives_the_process(spec: ModelSpec, tmp_path: Path) -> None:
    reader, words = Reader(spec, folder=tmp_path), text(11, 4 * PAGE)
    reader.read(words, {PAGE: "head", 3 * PAGE + 5: "turn"})
    assert reader.cache.usage.disk_snapshots in (0, 1, 2)
    again = reader.restarted(spec, folder=tmp_path, pages=6)
    usage = again.cache.usage
    assert (usage.snapshots, usage.disk_snapshots) == (0, 2)
    assert usage.disk_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert again.read(words, {}) == 3 * PAGE + 5
    assert again.read([*words[: 2 * PAGE], 7, 7], {}) == PAGE


def test_memory_that_cannot_be_had_is_not_missed(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader, one, other = Reader(spec, pages=8), text(12, 6 * PAGE), text(13, 6 * PAGE)
    reader.read(one, {5 * PAGE: "turn"})
    with monkeypatch.context() as patched:
        patched.setattr(snapshots, "torch", NoMemory)
        assert reader.read(other, {5 * PAGE: "turn"}) == 0  # its pages are made free all the same
    assert "no more than" in caplog.text and len(reader.cache) == 0
    usage = reader.cache.usage
    assert usage.device_bytes == usage.host_bytes == 0
    assert reader.states.pages.free == reader.states.pages.capacity


class NoMemory:
    """torch, but that nothing new can be allocated."""

    Size = torch.Size
    arange = staticmethod(torch.arange)
    cat = staticmethod(torch.cat)
    uint8 = torch.uint8

    @staticmethod
    def empty(*_shape: object, **_options: object) -> None:
        raise RuntimeError("can't allocate memory")


def machine(spec: ModelSpec, folder: Path) -> type[RuleBasedStateMachine]:
    """Conversations that grow, change and take turns in little memory, with restarts in between."""

    class Edits(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            for path in folder.iterdir():
                path.unlink()
            self.options = {"budget": 1 << 30, "pages": 10, "folder": folder, "limit": 4 << 20}
            self.reader = Reader(spec, **self.options)
            self.texts = [text(1, 40), text(1, 40) + text(2, 30)]

        @rule(which=st.integers(0, 9), count=st.integers(1, 150), seed=st.integers(0, 3), data=st.data())
        def grow(self, which: int, count: int, seed: int, data: st.DataObject) -> None:
            words = (self.texts[which % len(self.texts)] + text(seed, count))[: 10 * PAGE - 1]
            places = data.draw(st.sets(st.integers(1, len(words)), max_size=3))
            kinds = data.draw(st.permutations(["head", "question", "turn", "grid"]))
            done = self.reader.read(words, dict(zip(sorted(places), kinds, strict=False)))
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
            assert usage.device_bytes == len(resident) * reader.saves.cell_bytes
            assert all(page.index is not None or page.cell is not None for page in pages.values())
            assert reader.states.pages.capacity - reader.states.pages.free == len(resident)
            tails = sum(each.state.tail is not None for each in reader.cache._snapshots)
            cells = sum(page.cell is not None for page in pages.values()) + tails
            assert reader.saves.cells_bytes == cells * reader.saves.cell_bytes

        def teardown(self) -> None:
            assert self.reader.files is not None
            self.reader.files.flush()

    return Edits


@pytest.mark.parametrize("family", ["qwen35", "qwen3"])
def test_whatever_is_edited_the_state_is_that_of_the_text(
    family: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    with GGUFFile.open(tiny_model(family)) as file:
        made = machine(ModelSpec.from_gguf(file), tmp_path)
    run_state_machine_as_test(made, settings=settings(max_examples=25, stateful_step_count=20, deadline=None))
