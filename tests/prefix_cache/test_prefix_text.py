"""Random edit sequences: the text with a prefix cache is identical to the text without one."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from bough.config import SpecConfig
from bough.engine.engine import Done, Engine, Progress, Request, Tokens
from bough.engine.sampler import SamplingParams
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from bough.models.dflash import DFlashDraft
from bough.prefix_cache.boundaries import SnapshotKind, chunk_ends
from bough.prefix_cache.cache import PrefixCacheConfig
from bough.prefix_cache.files import SnapshotFile, SnapshotFiles
from bough.spec.costs import StepCosts
from bough.spec.dflash import DFlashModel
from bough.spec.speculator import Speculator
from bough.state.draft_ring import draft_buffers
from tests.engine.driving import drive
from tests.tiny_draft import draft_config, save_draft

OPENER, CHUNK, MAX_CTX = 3, 64, 640
GENERATED = 10
CACHE = PrefixCacheConfig(1 << 30)


@dataclass
class Pair:
    """A tiny target and a random draft, for any number of engines."""

    target: Decoder
    draft: DFlashDraft
    texts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def engine(self, **options) -> Engine:
        # Rings shorter than the texts, so that restored rings have wrapped around.
        buffers = draft_buffers(self.draft.spec, max_ctx=MAX_CTX, context=96, slots=options.get("slots", 1))
        block = DFlashModel(self.draft, self.target, buffers)
        drafter = Speculator(block, SpecConfig(budget=7, adaptive=False), StepCosts())
        return Engine(
            self.target, max_ctx=MAX_CTX, prefill_chunk=CHUNK, drafter=drafter, max_rows=8, **options
        )

    def expected(self, prompt: list[int]) -> list[int]:
        """Return the text of an engine without a prefix cache."""
        key = tuple(prompt)
        if key not in self.texts:
            self.texts[key] = ask(self.engine(), prompt)[0]
        return self.texts[key]


@pytest.fixture(scope="module")
def pair(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    with GGUFFile.open(tiny_model()) as file:
        target = Decoder.load(file)
    folder = tmp_path_factory.mktemp("draft")
    save_draft(folder, draft_config(target.spec))
    return Pair(target, DFlashDraft.load(folder, target.spec))


def boundaries(prompt: Sequence[int]) -> dict[int, SnapshotKind]:
    starts = [start for start, token in enumerate(prompt) if token == OPENER and start]
    found: dict[int, SnapshotKind] = dict.fromkeys(starts, "turn")
    return found | dict.fromkeys(starts[:1], "head") | dict.fromkeys(starts[-1:], "question")


def ask(engine: Engine, prompt: list[int], *, cancel: int = 0) -> tuple[list[int], int]:
    """Return the text and the number of cached tokens; `cancel`: at which check to cancel."""
    text: list[int] = []
    checks = 0

    def cancelled() -> bool:
        nonlocal checks
        checks += 1
        return checks == cancel

    request = Request(
        prompt,
        max_tokens=GENERATED,
        sampling=SamplingParams(seed=1),
        boundaries=boundaries(prompt),
    )
    for event in drive(engine, request, cancelled=cancelled):
        if isinstance(event, Tokens):
            text += event.ids
        elif isinstance(event, Done):
            return text, event.stats.cached_tokens
    raise AssertionError("the engine ended without a Done event")


class Clients:
    """Two or three conversations with one system prompt, edited and continued in any order."""

    def __init__(self, seed: int):
        self.choose = random.Random(seed)
        system = [OPENER, *self._words(self.choose.randrange(10, 90))]
        self.talks = [[*system, *self._turn()] for _ in range(self.choose.choice((2, 2, 3)))]

    def _words(self, count: int) -> list[int]:
        return [self.choose.randrange(10, 200) for _ in range(count)]

    def _turn(self) -> list[int]:
        return [OPENER, *self._words(self.choose.choice((4, 12, 30, 100)))]

    def prompt(self) -> tuple[int, list[int]]:
        """Return a client and its next prompt, the history unchanged or edited."""
        which = self.choose.randrange(len(self.talks))
        talk = self.talks[which]
        starts = [start for start, token in enumerate(talk) if token == OPENER][2:]
        if len(talk) > MAX_CTX - 150 or (starts and self.choose.random() < 0.3):
            talk = [*talk[: self.choose.choice(starts)], *self._turn()]
        self.talks[which] = talk
        return which, [*talk, OPENER, 5]

    def answered(self, which: int, prompt: list[int], text: list[int]) -> None:
        """Append the answer, unchanged or as a template rewrites it, and a new user message."""
        kept = text if self.choose.random() < 0.6 else text[2:]
        self.talks[which] = [*prompt, *kept, *self._turn()]


def folder_of(engine: Engine) -> Sequence[SnapshotFile]:
    return engine.prefixes._files.entries if engine.prefixes._files else ()


@pytest.mark.parametrize("seed", range(6))
def test_text_is_the_same_with_and_without_the_cache(pair: Pair, tmp_path: Path, seed: int) -> None:
    clients, choose = Clients(seed), random.Random(100 + seed)
    whole = pair.engine(prefix_cache=PrefixCacheConfig(1 << 30))
    ask(whole, [OPENER, *range(10, 90), OPENER, 5])
    each = whole.prefixes.usage.host_bytes // 3
    # From a budget that holds a snapshot or two, offloaded pages included, to one that holds everything.
    budget = int(each * choose.choice((1.5, 4, 10, 1000)))
    files = seed % 2 == 0

    def engine() -> Engine:
        folder = SnapshotFiles(tmp_path, "tiny" * 8, limit=60 * each) if files else None
        # Every third one allocates its pool at start and runs steps over static buffers, as on a GPU.
        config = PrefixCacheConfig(budget, folder)
        return pair.engine(prefix_cache=config, runner="graph" if seed % 3 == 2 else "eager")

    cached, hits = engine(), 0
    for _ in range(10):
        action = choose.random()
        if action < 0.12 and files:
            cached.prefixes.clear()
            cached = engine()
        which, prompt = clients.prompt()
        if action > 0.85:
            ask(cached, prompt, cancel=choose.randrange(1, 12))
        answers = {each.length for each in cached.prefixes._snapshots if each.kind == "answer"}
        answers |= {each.length for each in folder_of(cached) if each.kind == "answer"}
        text, found = ask(cached, prompt)
        assert text == pair.expected(prompt)
        hits += found > 0
        assert found < len(prompt)
        ends = chunk_ends(len(prompt), boundaries(prompt), CHUNK)
        assert found == 0 or found in ends or found in answers
        clients.answered(which, prompt, text)
    assert hits > (5 if budget >= 4 * each else 0)


def test_a_restored_prefill_leads_to_the_same_state_bit_for_bit(pair: Pair) -> None:
    choose = random.Random(9)
    prompt = [OPENER, *(choose.randrange(10, 200) for _ in range(150)), OPENER, 7, 8, 9, OPENER, 5]
    longer = [*prompt[:-2], *range(20, 60), OPENER, *range(60, 100), OPENER, 5]
    warm, cold = (pair.engine(prefix_cache=PrefixCacheConfig(1 << 30)) for _ in range(2))
    with torch.inference_mode():
        ask(warm, prompt)
        # The answer was not sent back, so the match is a chunk end of the prompt.
        *_, found = ask(warm, longer)
        assert found in chunk_ends(len(longer), boundaries(longer), CHUNK)
        ask(cold, longer)
        (one,), (other,) = (
            [each for each in engine.prefixes._snapshots if each.kind == "question" and each.length > found]
            for engine in (warm, cold)
        )
    assert one.tokens == other.tokens
    for mine, its in zip(one.state.layers, other.state.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))
    assert one.draft is not None and other.draft is not None
    for mine, its in zip(one.draft.rings, other.draft.rings, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


def ahead(prompt: list[int], seconds: float = 60.0) -> Request:
    return Request(prompt, boundaries=boundaries(prompt), prefill_for_s=seconds)


def document(count: int = 400) -> list[int]:
    choose = random.Random(7)
    return [OPENER, *(choose.randrange(10, 200) for _ in range(count))]


def test_prefill_alone_samples_nothing_and_the_text_after_it_is_the_same(pair: Pair) -> None:
    engine, text = pair.engine(prefix_cache=CACHE), document()
    events = list(engine.generate(ahead(text)))
    assert not any(isinstance(event, Tokens) for event in events) and isinstance(events[-1], Done)
    question = [*text, 11, 12, OPENER, 5]
    assert ask(engine, question) == (pair.expected(question), len(text) // CHUNK * CHUNK)
    # A second time there is nothing to do.
    again = [event for event in engine.generate(ahead(text)) if isinstance(event, Progress)]
    assert [event.done for event in again] == [len(text) // CHUNK * CHUNK]


@pytest.mark.parametrize(("slots", "runner"), [(1, "eager"), (3, "graph")])
def test_prefill_alone_gives_way_and_goes_on_later(pair: Pair, slots: int, runner: str) -> None:
    engine, text = pair.engine(prefix_cache=CACHE, slots=slots, runner=runner), document()
    sequence = engine.add(ahead(text))
    while sequence.processed < 2 * CHUNK:
        engine.step()
    other = [OPENER, *range(20, 60), OPENER, 5]
    assert ask(engine, other) == (pair.expected(other), 0)
    assert sequence.slot < 0 and not sequence.finished
    # The same text in the meantime finds what was read.
    question = [*text[:300], OPENER, 5]
    assert ask(engine, question) == (pair.expected(question), 2 * CHUNK)
    while not sequence.finished:
        engine.step()
    assert sequence.processed == len(text) // CHUNK * CHUNK
    engine.release(sequence)
    longer = [*text, 11, OPENER, 5]
    assert ask(engine, longer) == (pair.expected(longer), len(text) // CHUNK * CHUNK)
    assert engine.idle


def test_what_was_read_before_a_cancellation_stays(pair: Pair) -> None:
    engine, text = pair.engine(prefix_cache=CACHE), document()
    sequence = engine.add(ahead(text))
    while sequence.processed < 3 * CHUNK:
        engine.step()
    engine.cancel(sequence)
    question = [*text, OPENER, 5]
    assert ask(engine, question) == (pair.expected(question), 3 * CHUNK)
    assert engine.idle


def test_a_short_prompt_leaves_nothing_to_prefill(pair: Pair) -> None:
    engine = pair.engine(prefix_cache=CACHE)
    assert isinstance(list(engine.generate(ahead([OPENER, 10, 11])))[-1], Done)
    assert engine.idle and len(engine.prefixes) == 0
