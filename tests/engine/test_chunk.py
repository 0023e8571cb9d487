"""Chunks that are run some layers at a time: others decode between them, and nothing else changes."""

from collections.abc import Callable, Generator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bough.engine.chunk import ChunkForward, Pace
from bough.engine.engine import Engine
from bough.engine.events import Progress, Tokens
from bough.engine.sequence import Phase, Request, Sequence
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Block, Decoder
from bough.prefix_cache.cache import PrefixCacheConfig

LAYERS = 4
SHORT = Request([5, 6, 7], max_tokens=60)
LONG = Request([(7 * n + 3) % 300 for n in range(150)], max_tokens=8)


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Path]) -> Decoder:
    with GGUFFile.open(tiny_model("qwen35", layers=LAYERS)) as file:
        return Decoder.load(file)


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a chunk is one layer."""
    monkeypatch.setattr(Pace, "run", lambda _, chunk: chunk.run(1))


def engine_of(target: Decoder, *, slots: int = 2) -> Engine:
    return Engine(target, max_ctx=256, slots=slots, prefill_chunk=50, prefix_cache=PrefixCacheConfig(1 << 24))


def answer(engine: Engine, request: Request) -> list[int]:
    events = engine.generate(request)
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


def run(engine: Engine, until: Callable[[], bool]) -> list[tuple[Sequence, object]]:
    found: list[tuple[Sequence, object]] = []
    while not until():
        found += engine.step()
    return found


def tokens_of(found: list[tuple[Sequence, object]], sequence: Sequence) -> list[int]:
    own = [event for owner, event in found if owner is sequence]
    return [token for event in own if isinstance(event, Tokens) for token in event.ids]


@pytest.mark.usefixtures("one_layer")
def test_others_decode_between_layers(target: Decoder) -> None:
    engine = engine_of(target)
    expected = [answer(Engine(target, max_ctx=256, prefill_chunk=50), each) for each in (SHORT, LONG)]
    first = engine.add(SHORT)
    found = run(engine, lambda: first.phase is Phase.DECODE)
    second = engine.add(LONG)
    found += run(engine, lambda: engine.idle)
    kinds = [(owner is first, type(event)) for owner, event in found]
    parts = [index for index, kind in enumerate(kinds) if kind == (False, Progress)]
    assert len(parts) > 3 * LAYERS
    between = [kinds[a:b].count((True, Tokens)) for a, b in pairwise(parts[1:])]
    assert sum(count > 0 for count in between) >= 2 * LAYERS
    done = [event.done for owner, event in found if owner is second and isinstance(event, Progress)]
    assert done == sorted(set(done)) and done[-1] == 150 and not set(done) <= {0, 50, 100, 150}
    assert [tokens_of(found, each) for each in (first, second)] == expected


def begun(engine: Engine, request: Request, *, after: int = 50) -> Sequence:
    """Return a sequence in the middle of the chunk after `after` tokens."""
    sequence = engine.add(request)
    run(engine, lambda: sequence.processed == after and sequence.chunk is not None)
    return sequence


@pytest.mark.usefixtures("one_layer")
def test_cancelled_between_layers(target: Decoder) -> None:
    engine = engine_of(target, slots=1)
    expected = answer(engine_of(target), LONG)
    sequence = begun(engine, LONG)
    engine.cancel(sequence)
    engine.step()
    assert engine.idle and sequence.chunk is None and engine.states.pages.free == engine.states.pages.capacity
    assert answer(engine, LONG) == expected


@pytest.mark.usefixtures("one_layer")
def test_parked_between_layers(target: Decoder) -> None:
    """Its chunk is run to its end: a state between two layers cannot be saved."""
    engine = engine_of(target)
    expected = answer(engine_of(target), LONG)
    for after in (50, 100):  # the last chunk's hidden state is kept, too
        sequence = begun(engine, LONG, after=after)
        with torch.inference_mode():
            engine.paging.park(sequence)
        assert sequence.parked is not None and sequence.parked.state.length == after + 50
        assert tokens_of(run(engine, lambda: engine.idle), sequence) == expected


@pytest.mark.usefixtures("one_layer")
@pytest.mark.parametrize("ended", ["gives way", "cancelled"])
def test_prefill_alone_between_layers(target: Decoder, ended: str) -> None:
    """What was processed is cached, the chunk in the middle included."""
    engine = engine_of(target, slots=1)
    expected = answer(engine_of(target), LONG)
    sequence = begun(engine, Request(LONG.prompt, boundaries={}, prefill_for_s=60.0))
    if ended == "cancelled":
        engine.cancel(sequence)
        engine.step()
        assert engine.idle
    found = engine.add(LONG)
    events = run(engine, lambda: found.finished)
    assert found.stats.cached_tokens == 100 and tokens_of(events, found) == expected
    run(engine, lambda: engine.idle)


@pytest.mark.usefixtures("one_layer")
def test_a_chunk_that_fails_leaves_nothing(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(target, slots=1)
    expected = answer(engine_of(target), LONG)
    sequence = begun(engine, Request(LONG.prompt, boundaries={}, prefill_for_s=60.0))
    with monkeypatch.context() as patched:
        patched.setattr(Block, "__call__", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(engine, lambda: engine.idle)
    engine.release(sequence)
    assert engine.idle
    found = engine.add(LONG)
    assert tokens_of(run(engine, lambda: found.finished), found) == expected and not found.stats.cached_tokens


@pytest.mark.usefixtures("one_layer")
def test_a_chunk_that_fails_while_it_is_parked_ends_its_own_request(
    target: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(target)
    expected = answer(engine_of(target), SHORT)
    first = engine.add(SHORT)
    run(engine, lambda: first.phase is Phase.DECODE)
    second = engine.add(LONG)
    run(engine, lambda: second.chunk is not None)
    with monkeypatch.context() as patched:
        patched.setattr(Block, "__call__", lambda *_, **__: 1 / 0)
        engine.working[:] = [first]
        with pytest.raises(ZeroDivisionError), torch.inference_mode():
            engine.paging.park(second)
    assert engine.working == [second]
    with pytest.raises(RuntimeError, match="failed before"):
        run(engine, lambda: engine.idle)
    assert engine.working == [second]
    engine.release(second)
    run(engine, lambda: engine.idle)
    assert first.tokens[len(SHORT.prompt) :] == expected


@pytest.mark.usefixtures("one_layer")
def test_progress_says_which_tokens_are_of_whole_chunks(target: Decoder) -> None:
    events = [event for event in engine_of(target).generate(LONG) if isinstance(event, Progress)]
    assert {event.whole for event in events} == {0, 50, 100, 150}
    assert all(event.whole <= event.done < event.whole + 50 or event.done == 150 for event in events)


def layers(count: int, ran: list[int]) -> Generator[None, None, Tensor]:
    for index in range(count):
        ran.append(index)
        if index + 1 < count:
            yield
    return torch.zeros(1, 3)


def test_a_chunk_counts_its_layers() -> None:
    ran: list[int] = []
    made = ChunkForward(layers(10, ran), rows=40, total=10)
    assert made.run(3) == 3 and made.processed == 12 and made.hidden is None and ran == [0, 1, 2]
    assert made.run() == 7 and made.processed == 40 and made.hidden is not None
    assert made.run(5) == 0 and len(ran) == 10


def test_parts_take_a_tenth_of_a_second() -> None:
    """By what the part before took; fewer rows, more layers."""
    pace = Pace(torch.device("cuda"))
    assert pace.layers(2048) == pace.layers(1) == 4
    pace.note(0.08, 4 * 2000)
    assert [pace.layers(rows) for rows in (4000, 2000, 1000, 10**9)] == [2, 5, 10, 1]
    pace.note(0.0, 0)  # of a chunk whose layers had all run
    assert pace.layers(2000) == 5


@pytest.mark.parametrize(
    ("attention", "other"), [(0.066, 0.013), (0.088, 0.005), (0.176, 0.005), (0.01, 0.01)]
)
def test_parts_stay_short_where_layers_differ(attention: float, other: float) -> None:
    """A part is noted after the next has begun. None takes long but for a layer that does so alone."""
    costs = [attention if index % 4 == 3 else other for index in range(40)]
    pace, rows, noted, taken = Pace(torch.device("cuda")), 4096, None, []
    for _ in range(6):
        left = list(costs)
        while left:
            part, left = left[: (count := pace.layers(rows))], left[count:]
            if noted is not None:
                pace.note(*noted)
            noted = (sum(part), rows * len(part))
            taken.append(sum(part))
    settled = taken[len(taken) // 6 :]
    assert max(settled) < 0.1 + attention and sum(settled) / len(settled) > 0.02


def test_a_chunk_is_whole_on_a_cpu() -> None:
    made = ChunkForward(layers(10, []), rows=40, total=10)
    Pace(torch.device("cpu")).run(made)
    assert made.hidden is not None
