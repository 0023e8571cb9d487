"""Speculation and the prefix cache after images: the text of plain decoding, no state of another picture."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bough.engine.engine import Engine
from bough.engine.events import Done, Tokens
from bough.engine.sequence import Request
from bough.errors import UsageError
from bough.gguf.reader import GGUFFile
from bough.images.pixels import Picture
from bough.models.decoder import Decoder
from bough.models.vision import VisionTower
from bough.prefix_cache.cache import PrefixCacheConfig
from bough.prefix_cache.files import SnapshotFiles
from bough.session.loading import load_session
from bough.state.sequences import CacheConfig
from tests.engine.driving import run
from tests.engine.test_lossless import SAMPLINGS
from tests.every_draft import PROPOSERS, EveryDraft
from tests.images.seeing import make_seeing, seeing_request, shown

COUNT = 24
FIRST, SECOND = shown(300, 200), shown(64, 500)
PARTS = {
    "one": [12, FIRST, 9],
    "two": [5, FIRST, 3, SECOND, 14],
    "adjacent, first": [FIRST, SECOND, 11],
    "last": [21, SECOND],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("seeing"), layers=8, mtp=True)


@pytest.fixture(scope="module")
def drafts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> EveryDraft:
    return EveryDraft(model, tmp_path_factory.mktemp("drafts"))


def request_of(name: str, sampling: str = "greedy", count: int = COUNT, **options: object) -> Request:
    return seeing_request(PARTS[name], max_tokens=count, sampling=SAMPLINGS[sampling], **options)


@pytest.fixture(scope="module")
def plain(drafts: EveryDraft) -> dict[tuple[str, str], list[int]]:
    engine = drafts.plain().engine
    return {
        (name, sampling): run(engine, request_of(name, sampling))[0]
        for name in PARTS
        for sampling in SAMPLINGS
    }


def test_texts_differ_by_their_images(plain: dict[tuple[str, str], list[int]]) -> None:
    assert len({tuple(text) for text in plain.values()}) == len(plain)


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("proposers", [name for name in PROPOSERS if name != "dspark of 90 tokens"])
def test_same_text(
    drafts: EveryDraft, plain: dict[tuple[str, str], list[int]], proposers: str, chain: bool
) -> None:
    if chain and "mtp," in proposers:
        return  # a chain has one proposer
    engine = drafts.session(proposers, budget=14, chain=chain).engine
    for name, sampling in (("one", "greedy"), ("two", "T 1.0"), ("last", "T 1.0, everything")):
        text, done = run(engine, request_of(name, sampling))
        assert text == plain[name, sampling], (name, sampling)
        assert done.stats.images == len(request_of(name).images) and done.stats.steps < COUNT
        assert done.stats.plain_steps < done.stats.steps or proposers == "lookup"


@pytest.mark.parametrize("proposers", ["lookup", "mtp", "dflash2, mtp, lookup"])
def test_same_text_in_company(
    drafts: EveryDraft, plain: dict[tuple[str, str], list[int]], proposers: str
) -> None:
    engine = drafts.session(proposers, parallel=4).engine
    names = [(name, sampling) for name, sampling in zip(PARTS, SAMPLINGS, strict=False)]
    sequences = {engine.add(request_of(*name)): name for name in names}
    texts: dict[tuple[str, str], list[int]] = {name: [] for name in names}
    ended = 0
    while ended < len(names):
        for sequence, event in engine.step():
            if isinstance(event, Tokens):
                texts[sequences[sequence]] += event.ids
            ended += isinstance(event, Done)
    assert texts == {name: plain[name] for name in names}


@pytest.mark.parametrize("proposers", ["mtp", "dflash, mtp, lookup", "dspark", "dspine, mtp, lookup"])
def test_same_text_from_a_snapshot(
    model: Path, drafts: EveryDraft, plain: dict[tuple[str, str], list[int]], proposers: str
) -> None:
    config = replace(drafts.config(proposers), prefix_cache=1 << 28)
    engine = load_session(model, config).engine
    request = request_of("two", "T 1.0")
    for cached in (0, request.images[-1].end):
        text, done = run(engine, request)
        assert text == plain["two", "T 1.0"] and done.stats.cached_tokens >= cached


@pytest.fixture(scope="module")
def parts(model: Path) -> Callable[..., Engine]:
    """Engines of the torch target with settings of their own."""
    with GGUFFile.open(model) as file, GGUFFile.open(model.parent / "mmproj-F32.gguf") as encoder:
        target = Decoder.load(file)
        tower = VisionTower(encoder, target.device, target.dtype)

    def engine(**options: object) -> Engine:
        return Engine(target, tower=tower, **{"max_ctx": 1024, "prefill_chunk": 50} | options)

    return engine


def cached(**options: object) -> PrefixCacheConfig:
    return PrefixCacheConfig(1 << 30, **options)


def test_a_question_about_the_same_image_reads_it_once(parts: Callable[..., Engine]) -> None:
    engine, fresh = parts(prefix_cache=cached()), parts()
    first = seeing_request([12, FIRST, 9], max_tokens=COUNT)
    run(engine, first)
    other = seeing_request([12, FIRST, 15], seed=0, max_tokens=COUNT)
    other.prompt[-15:] = range(60, 75)
    text, done = run(engine, other)
    assert done.stats.cached_tokens == first.images[0].end and done.stats.encoded_images == 0
    assert text == run(fresh, other)[0]


def test_parked_and_continued(parts: Callable[..., Engine]) -> None:
    """Two that need more pages than there are: the younger is parked, and comes back with its offset."""
    requests = [request_of("two", count=150), request_of("one", "T 1.0", count=150)]
    alone = [run(parts(), request)[0] for request in requests]
    engine = parts(slots=2, cache=CacheConfig(pages=5))
    parked = []
    park = engine.paging.park
    engine.paging.park = lambda sequence: (parked.append(sequence), park(sequence))[1]
    sequences = [engine.add(request) for request in requests]
    texts: dict[object, list[int]] = {sequence: [] for sequence in sequences}
    ended = 0
    while ended < 2:
        for sequence, event in engine.step():
            if isinstance(event, Tokens):
                texts[sequence] += event.ids
            ended += isinstance(event, Done)
    assert parked and [texts[sequence] for sequence in sequences] == alone


def other_picture(request: Request) -> Request:
    return seeing_request([12, shown(300, 200, shade=128), 9], max_tokens=COUNT)


@pytest.mark.parametrize("disk", [False, True])
def test_pictures_of_one_size_share_no_state(
    parts: Callable[..., Engine], tmp_path: Path, disk: bool
) -> None:
    def engine() -> tuple[Engine, SnapshotFiles | None]:
        files = SnapshotFiles(tmp_path, "0123456789abcdef" * 2, limit=1 << 30) if disk else None
        return parts(prefix_cache=cached(files=files)), files

    mine = seeing_request([12, FIRST, 9], max_tokens=COUNT)
    yours = other_picture(mine)
    assert len(mine.prompt) == len(yours.prompt)
    first, files = engine()
    run(first, mine)
    if files is not None:
        files.flush()
        first, _ = engine()
    text, done = run(first, yours)
    assert done.stats.cached_tokens < 12 + FIRST.tokens
    assert text == run(parts(), yours)[0]
    text, done = run(first, mine)
    assert done.stats.cached_tokens >= 12 + FIRST.tokens and text == run(parts(), mine)[0]


def test_without_the_hashed_key_they_would(
    parts: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Picture, "ids", property(lambda picture: [-1] * picture.tokens))
    engine = parts(prefix_cache=cached())
    mine = seeing_request([12, FIRST, 9], max_tokens=COUNT)
    yours = other_picture(mine)
    run(engine, mine)
    text, done = run(engine, yours)
    assert done.stats.cached_tokens > 12 and text != run(parts(), yours)[0]


def test_equal_prompts_with_other_pictures_are_no_choices_of_one(parts: Callable[..., Engine]) -> None:
    engine = parts(slots=2)
    mine = seeing_request([12, FIRST, 9], max_tokens=COUNT)
    first = engine.add(mine)
    assert engine.add(mine, leader=first).leader is first
    assert engine.add(other_picture(mine), leader=first).leader is None


def test_an_image_is_encoded_once_for_several_prompts(parts: Callable[..., Engine]) -> None:
    engine = parts()
    counts = [run(engine, request_of(name, count=2))[1].stats for name in ("one", "two", "two")]
    assert [stats.encoded_images for stats in counts] == [1, 1, 0]
    assert counts[1].image_tokens == FIRST.tokens + SECOND.tokens and counts[1].image_s > 0


def test_ids_that_no_image_has_are_refused(parts: Callable[..., Engine]) -> None:
    engine = parts()
    request = seeing_request([12, FIRST, 9], max_tokens=2)
    for prompt in ([1, -5, 3], [*request.prompt, -7]):
        with pytest.raises(UsageError, match="in the prompt, the vocabulary has ids"):
            engine.add(Request(prompt, images=request.images if len(prompt) > 3 else ()))


def test_lookup_proposes_no_image(drafts: EveryDraft) -> None:
    """The text before the image repeats at the prompt's end: what followed it was the image."""
    engine = drafts.session("lookup").engine
    request = seeing_request([14, FIRST, 14], max_tokens=COUNT)
    text, _ = run(engine, request)
    assert text == run(drafts.plain().engine, request)[0]
