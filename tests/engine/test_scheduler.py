"""The scheduler alone: order, admission, the time share of prompts, parking."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from bough.engine.chunk import ChunkForward
from bough.engine.sampler import SamplingParams
from bough.engine.scheduler import Admit, Decode, PrefillChunk, Scheduler, Work
from bough.engine.sequence import Phase, Request, Sequence
from bough.engine.stats import RequestStats


def sequence(prompt: int = 10, chunk: int = 10) -> Sequence:
    made = Sequence(Request([1] * prompt), SamplingParams(), RequestStats(prompt), "nothing", max_tokens=9)
    made.chunk_ends = [*range(chunk, prompt, chunk), prompt]
    return made


def admitted(scheduler: Scheduler, count: int, phase: Phase = Phase.DECODE, **options) -> list[Sequence]:
    found = [sequence(**options) for _ in range(count)]
    for each in found:
        scheduler.add(each)
        assert scheduler.next(always) == Admit(each)
        each.phase = phase
    return found


def always(_sequence: Sequence) -> bool:
    return True


def done(scheduler: Scheduler, seconds: Callable[[Work], float]) -> Work:
    """Run one step's work as the engine would."""
    work = scheduler.next(always)
    assert work is not None
    if isinstance(work, PrefillChunk):
        work.sequence.processed = work.stop
        if work.stop == len(work.sequence.request.prompt):
            work.sequence.phase = Phase.DECODE
    scheduler.took(work, seconds(work))
    return work


def test_first_come_first_served_while_slots_are_free() -> None:
    scheduler = Scheduler(2)
    first, second, third = (sequence() for _ in range(3))
    for each in (first, second, third):
        scheduler.add(each)
    assert scheduler.next(always) == Admit(first)
    assert scheduler.next(always) == Admit(second)
    first.phase = second.phase = Phase.PREFILL
    assert scheduler.next(always) == PrefillChunk(first, 0, 10)
    assert list(scheduler.waiting) == [third]
    scheduler.remove(first)
    assert scheduler.next(always) == Admit(third)


def test_nobody_overtakes_a_sequence_that_waits_for_pages() -> None:
    scheduler = Scheduler(4)
    large, small = sequence(100), sequence(10)
    scheduler.add(large)
    scheduler.add(small)
    assert scheduler.next(lambda each: len(each.request.prompt) < 50) is None
    scheduler.remove(large)
    assert scheduler.next(lambda each: len(each.request.prompt) < 50) == Admit(small)


def test_all_decoding_sequences_run_together_and_prompts_one_at_a_time() -> None:
    scheduler = Scheduler(8)
    decoding = admitted(scheduler, 3)
    reading = admitted(scheduler, 2, Phase.PREFILL, prompt=30)
    work = scheduler.next(always)
    assert work == PrefillChunk(reading[0], 0, 10)
    scheduler.took(work, 1.0)
    assert scheduler.next(always) == Decode(decoding)


def test_short_chunks_are_read_by_the_steps_of_others() -> None:
    scheduler = Scheduler(8)
    reading = admitted(scheduler, 2, Phase.PREFILL, prompt=30)
    # With nobody decoding they have steps of their own.
    assert scheduler.next(always, short=10) == PrefillChunk(reading[0], 0, 10)
    decoding = admitted(scheduler, 2)
    assert scheduler.next(always, short=10) == Decode(decoding, reading)
    assert scheduler.next(always, short=9) == PrefillChunk(reading[0], 0, 10)
    reading[1].processed = 3  # a piece of the chunk was read
    assert scheduler.next(always, short=9) == PrefillChunk(reading[0], 0, 10)
    scheduler.took(PrefillChunk(reading[0], 0, 10), 1.0)
    assert scheduler.next(always, short=9) == Decode(decoding, [reading[1]])


def test_a_short_prompt_waits_for_one_chunk_of_a_long_one() -> None:
    scheduler = Scheduler(8)
    [long] = admitted(scheduler, 1, Phase.PREFILL, prompt=200)
    done(scheduler, lambda _: 0.0)
    short, other = admitted(scheduler, 2, Phase.PREFILL, prompt=20)
    # Each second chunk is one of the oldest, however many younger and shorter ones there are.
    chunks = [done(scheduler, lambda _: 0.0) for _ in range(6)]
    assert [chunk.sequence for chunk in chunks] == [short, long, short, long, other, long]
    assert scheduler.next(always) == PrefillChunk(other, 10, 20)


def test_prompts_that_are_nearly_as_long_come_in_their_order() -> None:
    scheduler = Scheduler(8)
    older, younger = admitted(scheduler, 2, Phase.PREFILL, prompt=30)
    chunks = [done(scheduler, lambda _: 0.0) for _ in range(6)]
    assert [chunk.sequence for chunk in chunks] == [older] * 3 + [younger] * 3


def test_a_chunk_that_was_begun_is_ended_first() -> None:
    scheduler = Scheduler(8)
    [long] = admitted(scheduler, 1, Phase.PREFILL, prompt=60)
    long.chunk = ChunkForward(iter(()), rows=10, total=2)  # some of its layers have run
    scheduler.took(PrefillChunk(long, 0, 10), 0.1)
    admitted(scheduler, 1, Phase.PREFILL, prompt=10)
    assert scheduler.next(always) == PrefillChunk(long, 0, 10)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
def test_chunks_get_their_share_of_the_time(share: float) -> None:
    scheduler = Scheduler(8, prefill_share=share)
    admitted(scheduler, 2)
    admitted(scheduler, 1, Phase.PREFILL, prompt=1000)
    spent = {PrefillChunk: 0.0, Decode: 0.0}
    for _ in range(200):
        work = scheduler.next(always)
        assert isinstance(work, PrefillChunk | Decode)
        seconds = 0.2 if isinstance(work, PrefillChunk) else 0.013
        spent[type(work)] += seconds
        scheduler.took(work, seconds)
    assert spent[PrefillChunk] / sum(spent.values()) == pytest.approx(share, abs=0.06)


def test_with_nobody_decoding_chunks_run_back_to_back() -> None:
    scheduler = Scheduler(8)
    admitted(scheduler, 1, Phase.PREFILL, prompt=50)
    works = [done(scheduler, lambda _: 1.0) for _ in range(7)]
    assert [type(work) for work in works] == [PrefillChunk] * 5 + [Decode] * 2


def test_a_sequence_owes_nothing_for_its_own_prompt() -> None:
    scheduler = Scheduler(8)
    admitted(scheduler, 2, Phase.PREFILL, prompt=10)
    # The first one's prompt delayed nobody, so the second one's follows at once.
    assert [type(done(scheduler, lambda _: 1.0)) for _ in range(3)] == [PrefillChunk, PrefillChunk, Decode]


def test_the_youngest_is_parked_and_comes_back_first() -> None:
    scheduler = Scheduler(3)
    first, second, third = admitted(scheduler, 3)
    waiting = sequence()
    scheduler.add(waiting)
    assert scheduler.youngest() is third
    scheduler.park(third)
    scheduler.park(second)
    assert scheduler.next(lambda _: False) == Decode([first])
    assert scheduler.next(always) == Admit(second)
    assert scheduler.next(always) == Admit(third)
    # Its age is that of its arrival, not of its return.
    assert scheduler.youngest() is third


def test_prefill_alone_runs_while_nothing_else_does_and_gives_way() -> None:
    scheduler = Scheduler(2)
    [running] = admitted(scheduler, 1)
    ahead, later = (sequence(30) for _ in range(2))
    for each in (ahead, later):
        each.request = replace(each.request, prefill_for_s=60.0)
        scheduler.add(each)
    assert scheduler.next(always) == Decode([running]) and not scheduler.contended
    scheduler.remove(running)
    assert scheduler.next(always) == Admit(ahead)
    ahead.phase = Phase.PREFILL
    assert scheduler.next(always) == PrefillChunk(ahead, 0, 10) and not scheduler.preempted
    fresh = sequence()
    scheduler.add(fresh)
    assert scheduler.preempted == [ahead]
    scheduler.put_back(ahead)
    assert scheduler.next(always) == Admit(fresh) and list(scheduler.prefills) == [ahead, later]
    scheduler.remove(fresh)
    assert scheduler.next(always) == Admit(ahead)
    for each in (ahead, later):
        scheduler.remove(each)
    assert scheduler.idle


def test_a_follower_waits_for_the_prompt_of_its_leader() -> None:
    scheduler = Scheduler(3)
    leader, follower = sequence(), sequence()
    follower.leader = leader
    scheduler.add(leader)
    scheduler.add(follower)
    assert scheduler.next(always) == Admit(leader)
    leader.phase = Phase.PREFILL
    assert scheduler.next(always) == PrefillChunk(leader, 0, 10)
    leader.phase = Phase.DECODE
    assert scheduler.next(always) == Admit(follower)


def test_a_removed_sequence_is_gone_from_everywhere() -> None:
    scheduler = Scheduler(2)
    first, second = admitted(scheduler, 2)
    waiting = sequence()
    scheduler.add(waiting)
    scheduler.park(second)
    for each in (first, second, waiting, waiting):
        scheduler.remove(each)
    assert scheduler.idle and scheduler.next(always) is None
