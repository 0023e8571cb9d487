"""A sequence may be released at any time and any number of times, also while it is parked."""

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest

from bough.engine.engine import Engine
from bough.engine.sequence import Request, Sequence
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from bough.prefix_cache.cache import PrefixCacheConfig
from bough.state.sequences import PAGE, CacheConfig

PROMPTS = [[(7 * n + seed) % 300 for n in range(2 * PAGE + 9)] for seed in (3, 4)]


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Path]) -> Decoder:
    with GGUFFile.open(tiny_model("qwen35", layers=4)) as file:
        return Decoder.load(file)


def parked_engine(target: Decoder) -> tuple[Engine, Sequence, Sequence]:
    """Return an engine whose pages ran out, the sequence that is parked, and the one that goes on."""
    engine = Engine(
        target, max_ctx=512, slots=2, cache=CacheConfig(pages=7), prefix_cache=PrefixCacheConfig(0)
    )
    first, second = (engine.add(Request(prompt, max_tokens=120)) for prompt in PROMPTS)
    while second.parked is None:
        engine.step()
    return engine, second, first


def assert_nothing_left(engine: Engine) -> None:
    """Every page of the device and of the host is free, once."""
    store, pages = engine.prefixes.store, engine.states.pages
    assert engine.idle and engine.states.free_slots == engine.slots
    assert pages.free == pages.capacity == len(set(pages.allocate(pages.free)))
    assert not store.host_page_bytes
    host = [store.allocate_host_page() for _ in range(100)]
    assert len({page.data_ptr() for page in host}) == 100


CALLS: dict[str, Callable[[Engine, Sequence], object]] = {"cancel": Engine.cancel, "release": Engine.release}


@pytest.mark.parametrize(
    "calls", sorted(set(permutations(["cancel", "release", "release", "release"], 3))), ids="-".join
)
def test_a_parked_sequence(target: Decoder, calls: tuple[str, ...]) -> None:
    engine, parked, other = parked_engine(target)
    for call in calls:
        CALLS[call](engine, parked)
    while not other.finished:
        engine.step()
    for sequence in (parked, other, parked, other):
        engine.release(sequence)
    assert_nothing_left(engine)


@pytest.mark.parametrize("calls", [["cancel"], ["release"], ["cancel", "release", "cancel"]], ids="-".join)
def test_a_sequence_in_any_phase(target: Decoder, calls: list[str]) -> None:
    """Sequences that wait, read a prompt or decode, and the same again when they have ended."""
    engine = Engine(target, max_ctx=512, slots=1, prefill_chunk=50, prefix_cache=PrefixCacheConfig(0))
    for steps in (0, 1, 2, 8):
        first, waiting = (engine.add(Request(prompt, max_tokens=20)) for prompt in PROMPTS)
        for _ in range(steps):
            engine.step()
        for call in calls:
            CALLS[call](engine, first)
            CALLS[call](engine, waiting)
        while not engine.idle:
            engine.step()
        for sequence in (first, waiting, first):
            engine.release(sequence)
    assert_nothing_left(engine)
