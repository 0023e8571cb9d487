"""A sequence may be released at any time and any number of times, also while it is parked."""

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
import torch

from bough.engine.engine import Engine
from bough.engine.sampler import SamplingParams
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


def test_a_parked_sequence_has_its_penalties_when_it_is_back(target: Decoder) -> None:
    """What it has generated counts, as if it had never been parked."""

    def answer(parked_after: int) -> list[int]:
        engine = Engine(target, max_ctx=512, slots=2, prefix_cache=PrefixCacheConfig(0))
        sampling = SamplingParams(frequency_penalty=100.0)
        sequence = engine.add(Request(PROMPTS[0], max_tokens=40, sampling=sampling))
        while not sequence.finished:
            engine.step()
            if sequence.stats.generated_tokens == parked_after and sequence.slot >= 0:
                parked_after = -1
                with torch.inference_mode():
                    engine.paging.park(sequence)
        return sequence.tokens[len(PROMPTS[0]) :]

    never = answer(-1)
    assert len(set(never)) == 40, "a penalty so large lets no token come twice"
    assert answer(12) == never
