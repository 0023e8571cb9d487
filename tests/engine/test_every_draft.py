"""Whatever proposes, alone or all in one tree: the text of plain decoding, token for token."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch

from bough.config import SpecConfig
from bough.engine.engine import Engine, Request
from bough.engine.events import Done, Tokens
from bough.engine.sampler import SamplingParams
from bough.errors import UsageError
from bough.prefix_cache.cache import PrefixCacheConfig
from bough.prefix_cache.files import SnapshotFiles
from bough.spec.costs import StepCosts
from bough.spec.draft_call import Ask
from bough.spec.mixed import MixedModel
from bough.spec.speculator import Speculator
from tests.engine.driving import cut_after
from tests.engine.driving import run as drive_to_end
from tests.engine.test_lossless import SAMPLINGS
from tests.every_draft import PROPOSERS, EveryDraft

PROMPT = [72, 101, 108, 108, 111, 32, 119, 111] * 6
COUNT = 32
TOGETHER = [name for name in PROPOSERS if "," in name]


@pytest.fixture(scope="module")
def drafts(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> EveryDraft:
    return EveryDraft(tiny_model(layers=8, mtp=True), tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="module")
def plain(drafts: EveryDraft) -> dict[str, list[int]]:
    engine = drafts.plain().engine
    return {name: text(engine, sampling) for name, sampling in SAMPLINGS.items()}


def text(engine: Engine, sampling: SamplingParams, count: int = COUNT) -> list[int]:
    return drive_to_end(engine, Request(PROMPT, count, sampling))[0]


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("proposers", PROPOSERS)
def test_same_text(drafts: EveryDraft, plain: dict[str, list[int]], proposers: str, adaptive: bool) -> None:
    """workshop/lossless.py compares 20,000 tokens in this way."""
    engine = drafts.session(proposers, budget=14, adaptive=adaptive).engine
    for name in ("greedy", "T 1.0") if adaptive else ("greedy, penalties, bias", "T 1.0, everything"):
        assert text(engine, SAMPLINGS[name]) == plain[name], name


@pytest.mark.parametrize("proposers", TOGETHER)
def test_same_text_of_several_at_once(
    drafts: EveryDraft, plain: dict[str, list[int]], proposers: str
) -> None:
    for adaptive in (False, True):
        engine = drafts.session(proposers, budget=22, parallel=3, adaptive=adaptive).engine
        names = list(SAMPLINGS)[:3]
        sequences = {name: engine.add(Request(PROMPT, COUNT, SAMPLINGS[name])) for name in names}
        found: dict[str, list[int]] = {name: [] for name in names}
        ended = 0
        while ended < len(names):
            for sequence, event in engine.step():
                name = next(name for name, each in sequences.items() if each is sequence)
                if isinstance(event, Tokens):
                    found[name] += event.ids
                ended += isinstance(event, Done)
        assert found == {name: plain[name] for name in names}


def engine_of(drafts: EveryDraft, proposers: str, runner: Literal["eager", "graph"], **options) -> Engine:
    """An engine with another runner; its drafter's state is its own."""
    made = drafts.session(proposers, cpu_backend="torch").engine
    assert isinstance(made.drafter, Speculator) and isinstance(made.drafter._draft, MixedModel)
    drafter = Speculator(made.drafter._draft, SpecConfig(budget=22, adaptive=False), StepCosts())
    return Engine(made.target, max_ctx=1024, drafter=drafter, max_rows=64, runner=runner, **options)


@torch.inference_mode()
def proposed(engine: Engine) -> tuple[list[int], list[float], set[int]]:
    """The leading candidates of both drafts for the first slot, and the tokens of the tree."""
    drafter = engine.drafter
    assert isinstance(drafter, Speculator)
    drafter._call([Ask(0, 9, [5, 6], -0.2)])
    [report] = drafter._call.reports()
    first, other = report.proposals
    scores = torch.cat([first.scores, other.scores, *(first.edges if first.edges is not None else [])])
    ids = torch.cat([first.ids, other.ids])
    return ids.flatten().tolist(), scores.flatten().tolist(), set(report.tokens)


@pytest.mark.parametrize(("runner", "keep"), [("eager", 13), ("graph", 14), ("graph", None)])
def test_the_states_of_both_are_those_of_the_text(
    drafts: EveryDraft, keep: int | None, runner: Literal["eager", "graph"]
) -> None:
    """Also where it was cut inside the tokens of a step."""
    engine, fresh = (engine_of(drafts, "dflash2, mtp, lookup", runner) for _ in range(2))
    sampling = SamplingParams(temperature=0.7, seed=4)
    options = {"cut": cut_after(keep)[0]} if keep else {}
    tokens, _ = drive_to_end(engine, Request(PROMPT, 24, sampling, may_stop=True), **options)
    assert len(tokens) == (keep or 24)
    drive_to_end(fresh, Request([*PROMPT, *tokens[:-1]], 1, sampling))
    (ids, scores, _), (wanted, wanted_scores, _) = proposed(engine), proposed(fresh)
    assert ids == wanted and scores == pytest.approx(wanted_scores, abs=1e-4)


def test_snapshots_on_disk_hold_both(drafts: EveryDraft, tmp_path: Path) -> None:
    def engine() -> tuple[Engine, SnapshotFiles]:
        files = SnapshotFiles(tmp_path, "0123456789abcdef" * 2, limit=1 << 30)
        cache = PrefixCacheConfig(1 << 30, files)
        return engine_of(drafts, "dspark, mtp, lookup", "eager", prefix_cache=cache), files

    first, files = engine()
    tokens, _ = drive_to_end(first, Request(PROMPT, 40, SamplingParams(seed=1), boundaries={}))
    files.flush()
    request = Request([*PROMPT, *tokens, 40, 41], 1, SamplingParams(seed=1), boundaries={})
    again, fresh = engine()[0], engine_of(drafts, "dspark, mtp, lookup", "eager")
    _, done = drive_to_end(again, request)
    assert done.stats.cached_tokens >= len(PROMPT) + 39
    drive_to_end(fresh, request)
    (ids, scores, _), (wanted, wanted_scores, _) = proposed(again), proposed(fresh)
    assert ids == wanted and scores == pytest.approx(wanted_scores, abs=1e-4)


def test_a_batched_call_is_that_of_each(drafts: EveryDraft) -> None:
    engine = drafts.session("dflash2, mtp, lookup", parallel=3).engine
    drafter = engine.drafter
    assert isinstance(drafter, Speculator)
    sequences = [engine.add(Request(PROMPT[: 20 + 5 * n], 30, SamplingParams(seed=n))) for n in range(3)]
    for _ in range(9):
        engine.step()
    slots = [sequence.slot for sequence in sequences]
    assert sorted(slots) == [0, 1, 2]
    asks = [Ask(slot, 7 + slot, [4, 5][:slot], -0.3) for slot in slots]
    with torch.inference_mode():
        drafter._call(asks)
        together = drafter._call.reports()
        for ask, report in zip(asks, together, strict=True):
            drafter._call([ask])
            [alone] = drafter._call.reports()
            assert (report.tokens, report.parents) == (alone.tokens, alone.parents)
            assert report.probabilities == pytest.approx(alone.probabilities, rel=1e-4)
    assert len({tuple(report.tokens) for report in together}) == 3


def test_each_draft_reads_its_own_layers_and_both_stand_in_the_tree(drafts: EveryDraft) -> None:
    both = drafts.session("dflash, mtp, lookup").engine
    text(both, SamplingParams(seed=1), 20)
    model = both.drafter._draft  # ty: ignore[unresolved-attribute]
    assert isinstance(model, MixedModel)
    for kind, draft in zip(("dflash", "mtp"), model.drafts, strict=True):
        alone = drafts.session(kind).engine
        text(alone, SamplingParams(seed=1), 20)
        with torch.inference_mode():
            # The same text, so the same state, whichever layers the target gave beside.
            found, wanted = (
                each.candidates(torch.tensor([9]), torch.tensor([0]), both.runner.sampler.rank, 4)
                for each in (draft, alone.drafter._draft)  # ty: ignore[unresolved-attribute]
            )
        assert torch.equal(found.ids, wanted.ids)
        assert torch.allclose(found.scores, wanted.scores, rtol=1e-4)
    tokens = proposed(both)[2]
    with torch.inference_mode():
        for draft in model.drafts:
            best = draft.candidates(torch.tensor([9]), torch.tensor([0]), both.runner.sampler.rank, 4)
            assert int(best.ids[0, 0, 0]) in tokens


def test_the_memory_of_both_is_planned(drafts: EveryDraft) -> None:
    first, other, both = (
        drafts.session(name).plan.estimate.parts for name in ("dflash", "mtp", "dflash, mtp, lookup")
    )
    for part in ("draft", "draft context"):
        assert both[part] == first[part] + other[part]


def test_the_block_beside_a_draft_has_to_be_there(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    without = EveryDraft(tiny_model(layers=8), tmp_path)
    with pytest.raises(UsageError, match="has none"):
        without.session("dflash, mtp, lookup")


def test_a_chain_has_one_proposer(drafts: EveryDraft) -> None:
    with pytest.raises(UsageError, match="a chain has one proposer"):
        drafts.session("dflash, mtp, lookup", chain=True)
