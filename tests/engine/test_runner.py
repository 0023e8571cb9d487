"""The graph runner, run eagerly on a CPU, against the eager one: the same text, states and trees."""

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
import torch

from bough.config import SpecConfig
from bough.engine.engine import Done, Engine, Event, Request, Tokens, VerifiedTree
from bough.engine.runner import Mark, StepClock
from bough.engine.sampler import SamplingParams
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from bough.models.step import Step, padded_rows
from bough.prefix_cache.cache import PrefixCacheConfig
from bough.prefix_cache.files import SnapshotFiles
from bough.session.constraint import ConstraintSpec, TokenConstraint
from bough.session.requests import TextRequest
from bough.spec.costs import StepCosts
from bough.spec.dflash import DFlashModel
from bough.spec.drafter import Drafter
from bough.spec.speculator import Speculator
from bough.state.draft_ring import draft_buffers
from tests.engine.driving import cut_after, drive
from tests.engine.oracles import Oracle, RandomTrees
from tests.engine.test_embedded_pair import session
from tests.engine.test_lossless import SAMPLINGS

PROMPT = [72, 101, 108, 108, 111, 32, 119, 111] * 6
COUNT = 160
FIXED = SpecConfig(adaptive=False)
RUNNERS: tuple[Literal["eager", "graph"], ...] = ("eager", "graph")
KINDS = ("nobody", "1", "22", "63", "random trees", "lookup", "lookup that pays")


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Path]) -> Decoder:
    with GGUFFile.open(tiny_model(layers=4)) as file:
        return Decoder.load(file)


def events(engine: Engine, prompt: list[int], sampling: SamplingParams, **options) -> list[Event]:
    driving = {name: options.pop(name) for name in ("cut", "cancelled") if name in options}
    request = Request(prompt=prompt, sampling=sampling, **{"max_tokens": COUNT, **options})
    return list(drive(engine, request, **driving))


def tokens_of(found: list[Event]) -> list[int]:
    return [token for event in found if isinstance(event, Tokens) for token in event.ids]


@pytest.fixture(scope="module")
def plain(target: Decoder) -> dict[str, list[int]]:
    engine = Engine(target, max_ctx=1024)
    return {name: tokens_of(events(engine, PROMPT, sampling)) for name, sampling in SAMPLINGS.items()}


def proposer(kind: str, answer: list[int], vocabulary: int) -> Drafter | None:
    match kind:
        case "nobody" | "nobody, uncut":
            return None
        case "random trees":
            return RandomTrees(len(PROMPT), answer, vocabulary=vocabulary)
        case "lookup":
            return Speculator(None, FIXED, StepCosts())
        case "lookup that pays":
            return Speculator(None, SpecConfig(), StepCosts({1: 1.0, 64: 1.1}), sizes=(1, 8, 64))
    return Oracle(len(PROMPT), answer, budget=int(kind), vocabulary=vocabulary)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(
    ("kind", "may_stop"),
    [*((kind, False) for kind in KINDS), ("22", True)],
)
def test_padded_steps_give_the_same_text(
    target: Decoder, plain: dict[str, list[int]], kind: str, may_stop: bool, sampling: str
) -> None:
    drafter = proposer(kind, plain[sampling], target.spec.vocab_size)
    rows = 1 if drafter is None else 64
    engine = Engine(target, max_ctx=1024, drafter=drafter, max_rows=rows, runner="graph")
    found = events(engine, PROMPT, SAMPLINGS[sampling], may_stop=may_stop)
    assert tokens_of(found) == plain[sampling]
    assert isinstance(found[-1], Done)
    if isinstance(drafter, RandomTrees):
        assert drafter.rested > 10
    if kind in ("22", "63"):
        assert found[-1].stats.acceptance_length > 4


def test_sizes() -> None:
    assert [padded_rows(rows) for rows in (1, 8, 9, 23, 24, 33, 64)] == [1, 8, 16, 24, 24, 48, 64]


@pytest.mark.parametrize(
    ("ends", "may_stop"),
    [("length", True), ("length", False), ("stop id", True), ("stop id", False), ("stop string", True)],
)
def test_the_end_leaves_the_same_state(
    target: Decoder, plain: dict[str, list[int]], ends: str, may_stop: bool
) -> None:
    """A stop string is seen when the rows behind it are already kept; they are taken back.

    Where no text is cut, the next pass begins before the text is looked at.
    """
    answer = plain["greedy"]
    last = next(place for place in range(30, COUNT) if answer[place] not in answer[:place])
    lengths, texts = [], []
    for runner in RUNNERS:
        options = {
            "length": {"max_tokens": last},
            "stop id": {"stop_ids": frozenset([answer[last]])},
            "stop string": {"cut": cut_after(last)[0]},
        }
        oracle = Oracle(len(PROMPT), answer, budget=30, right=1.0, vocabulary=target.spec.vocab_size)
        engine = Engine(target, max_ctx=1024, drafter=oracle, max_rows=31, runner=runner)
        found = events(engine, PROMPT, SAMPLINGS["greedy"], **options[ends], may_stop=may_stop)
        texts.append(tokens_of(found))
        lengths.append((engine.states.lengths[0], engine.states.buffers.lengths.tolist()))
        assert engine.states.buffers.pending.count.tolist()[0] <= engine.states.lengths[0]
    assert texts[0] == texts[1] == answer[:last]
    assert lengths[0] == lengths[1] and lengths[0][1] == [lengths[0][0]]


def test_a_cancelled_text_goes_on_where_it_was_left(target: Decoder, plain: dict[str, list[int]]) -> None:
    """When it is cancelled, the next pass has begun, which has taken the accepted rows into the states."""
    answer = plain["greedy"]
    oracle = Oracle(len(PROMPT), answer, budget=22, vocabulary=target.spec.vocab_size)
    engine = Engine(
        target,
        max_ctx=1024,
        drafter=oracle,
        max_rows=23,
        runner="graph",
        prefix_cache=PrefixCacheConfig(1 << 30),
        prefill_chunk=16,
    )
    steps = 0

    def cancelled() -> bool:
        nonlocal steps
        steps += 1
        return steps == 12  # three chunks of the prompt are read before

    options = {"may_stop": False, "boundaries": {}}
    begun = events(engine, PROMPT, SAMPLINGS["greedy"], cancelled=cancelled, **options)
    text = tokens_of(begun)
    assert isinstance(begun[-1], Done) and begun[-1].reason == "cancelled"
    assert 8 < len(text) < COUNT and text == answer[: len(text)]
    rest = events(engine, PROMPT + text, SAMPLINGS["greedy"], **options, max_tokens=COUNT - len(text))
    assert isinstance(rest[-1], Done) and rest[-1].stats.cached_tokens == len(PROMPT) + len(text) - 1
    assert tokens_of(rest) == answer[len(text) :]


@pytest.mark.parametrize("ends", ["stop id", "cancelled"])
def test_a_plain_text_goes_on_where_it_was_left(
    target: Decoder, plain: dict[str, list[int]], ends: str
) -> None:
    """The pass behind its last row, made for nothing, is no part of the state that is kept."""
    answer, seen = plain["greedy"], 0
    last = next(place for place in range(70, COUNT) if answer[place] not in answer[:place])
    engine = Engine(target, max_ctx=1024, runner="graph", prefix_cache=PrefixCacheConfig(1 << 30))

    def cancelled() -> bool:
        nonlocal seen
        seen += 1
        return ends == "cancelled" and seen > last

    options = {"may_stop": False, "boundaries": {}}
    stops = frozenset([answer[last]] if ends == "stop id" else [])
    begun = events(engine, PROMPT, SAMPLINGS["greedy"], cancelled=cancelled, stop_ids=stops, **options)
    text = tokens_of(begun)
    assert isinstance(begun[-1], Done) and begun[-1].reason == ends.removesuffix(" id")
    assert 60 < len(text) <= last and text == answer[: len(text)]
    said = [*text, *stops]  # all but its last token has been processed
    rest = events(engine, PROMPT + said, SAMPLINGS["greedy"], **options, max_tokens=COUNT - len(said))
    assert isinstance(rest[-1], Done) and rest[-1].stats.cached_tokens == len(PROMPT) + len(said) - 1
    assert tokens_of(rest) == answer[len(said) :]


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_file_with_more_rows_than_a_step_may_have_is_left_alone(
    target: Decoder,
    plain: dict[str, list[int]],
    runner: Literal["eager", "graph"],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It ends with a tree's path that is yet to be folded in; only padded plain steps have room for it."""
    answer, count = plain["greedy"], 40
    oracle = Oracle(len(PROMPT), answer, budget=15, right=1.0, vocabulary=target.spec.vocab_size)
    options = {"max_ctx": 1024, "runner": runner}

    def cache() -> PrefixCacheConfig:
        return PrefixCacheConfig(1 << 30, SnapshotFiles(tmp_path, "0123456789abcdef" * 2, limit=1 << 30))

    first = cache()
    engine = Engine(target, drafter=oracle, max_rows=16, prefix_cache=first, **options)
    text = tokens_of(events(engine, PROMPT, SAMPLINGS["greedy"], boundaries={}, max_tokens=count))
    assert text == answer[:count] and engine.states.buffers.pending.count.tolist()[0] > 1
    assert first.files is not None
    first.files.flush()
    engine = Engine(target, prefix_cache=cache(), **options)
    rest = events(engine, PROMPT + text, SAMPLINGS["greedy"], boundaries={}, max_tokens=COUNT - count)
    assert tokens_of(rest) == answer[count:]
    assert ("pending rows, a step here has at most 1" in caplog.text) == (runner == "eager")
    cached = rest[-1].stats.cached_tokens if isinstance(rest[-1], Done) else -1
    assert cached == (0 if runner == "eager" else len(PROMPT) + count - 1)


@pytest.mark.parametrize("ends", ["length", "stop id", "context", "cancelled", "closed"])
@pytest.mark.parametrize("budget", [None, 0])
def test_plain_steps_that_follow_before_they_are_read(
    target: Decoder, plain: dict[str, list[int]], ends: str, budget: int | None
) -> None:
    """The next pass is made behind a walk that the host has not read: text and states stay, at every end."""
    answer = plain["greedy"]
    last = next(place for place in range(70, COUNT) if answer[place] not in answer[:place])
    context = len(PROMPT) + last - 1 if ends == "context" else 1024
    kept = []
    for runner in RUNNERS:
        drafter = None if budget is None else Oracle(len(PROMPT), answer, budget=7, vocabulary=300)
        rows = 1 if budget is None else 8
        engine = Engine(target, max_ctx=context, drafter=drafter, max_rows=rows, runner=runner)
        seen: list[int] = []
        request = Request(
            PROMPT,
            max_tokens=last if ends == "length" else COUNT,
            sampling=SAMPLINGS["greedy"],
            stop_ids=frozenset([answer[last]] if ends == "stop id" else []),
            may_stop=False,
            draft_budget=budget,
        )
        found = drive(engine, request, cancelled=lambda seen=seen: ends == "cancelled" and len(seen) >= last)
        for event in found:
            seen += event.ids if isinstance(event, Tokens) else []
            if isinstance(event, Done) or (ends == "closed" and len(seen) == last):
                break
        assert seen == answer[:last]
        states, slots = engine.states, torch.tensor([0])
        # A pass behind the last row has folded it into the recurrent states.
        followed = runner == "graph" and ends not in ("length", "context")
        assert states.buffers.pending.count.tolist() == [0 if followed else 1]
        states.reserve(0, 2)
        step = Step.chunk(slots, torch.tensor([[5, 6]]), states.buffers.lengths[slots])
        with torch.inference_mode():
            hidden = target.forward(step, states.buffers).hidden
        kept.append((states.lengths, states.buffers.lengths.tolist(), hidden))
        found.close()
    assert kept[0][:2] == kept[1][:2] and kept[0][0] == kept[0][1]
    torch.testing.assert_close(kept[0][2], kept[1][2])


def test_log_probabilities_and_trees_are_those_of_the_exact_steps(
    target: Decoder, plain: dict[str, list[int]]
) -> None:
    found = []
    for runner in RUNNERS:
        oracle = Oracle(len(PROMPT), plain["greedy"], budget=11, vocabulary=target.spec.vocab_size)
        engine = Engine(target, max_ctx=1024, drafter=oracle, max_rows=12, runner=runner)
        found.append(events(engine, PROMPT, SamplingParams(seed=1, logprobs=3), trees=True, max_tokens=40))
    measured = [
        [entry.logprob for event in run if isinstance(event, Tokens) for entry in event.logprobs or []]
        for run in found
    ]
    assert len(measured[0]) == 40
    torch.testing.assert_close(torch.tensor(measured[0]), torch.tensor(measured[1]))
    shapes = [
        [(tree.tokens, tree.parents, tree.accepted) for tree in run if isinstance(tree, VerifiedTree)]
        for run in found
    ]
    assert shapes[0] == shapes[1] and any(len(accepted) > 3 for _, _, accepted in shapes[0])


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_rightly_guessed_end_is_shown_as_accepted(
    target: Decoder, plain: dict[str, list[int]], runner: Literal["eager", "graph"]
) -> None:
    answer = plain["greedy"]
    guessed = 0
    for last in (place for place in range(20, 60) if answer[place] not in answer[:place]):
        oracle = Oracle(len(PROMPT), answer, budget=30, right=1.0, vocabulary=target.spec.vocab_size)
        engine = Engine(target, max_ctx=1024, drafter=oracle, max_rows=31, runner=runner)
        options = {"stop_ids": frozenset([answer[last]]), "trees": True}
        found = events(engine, PROMPT, SAMPLINGS["greedy"], **options)
        tree = [event for event in found if isinstance(event, VerifiedTree)][-1]
        path = [tree.tokens[row] for row in tree.accepted]
        end = last + (path[-1] == answer[last])
        assert path == answer[end - len(path) : end]
        assert all(tree.parents[b] == a for a, b in pairwise(tree.accepted))
        guessed += end > last
    assert guessed > 2


@pytest.mark.parametrize("config", [FIXED, SpecConfig(), SpecConfig(chain=True, budget=15, adaptive=False)])
def test_the_pair_in_the_package(config: SpecConfig) -> None:
    """The draft over fixed tensors: the same text, and as many of its tokens come true."""
    made = session(config)
    speculator = made.engine.drafter
    assert isinstance(speculator, Speculator) and speculator._draft is not None
    draft = speculator._draft._draft
    lengths: dict[str, float] = {}
    for sampling in (SamplingParams(seed=1), SamplingParams(temperature=0.8, top_p=0.95, seed=2)):
        prompt = made.encode(TextRequest(messages=[{"role": "user", "content": "def fibonacci(n):"}]))
        expected = events(made.engine, prompt, sampling, max_tokens=48)
        block = DFlashModel(draft, made.engine.target, draft_buffers(draft.spec, max_ctx=512))
        again = Speculator(block, config, StepCosts())
        engine = Engine(
            made.engine.target, max_ctx=512, drafter=again, max_rows=config.budget + 1, runner="graph"
        )
        found = events(engine, prompt, sampling, max_tokens=48)
        assert tokens_of(found) == tokens_of(expected)
        for runner, run in (("eager", expected), ("graph", found)):
            assert isinstance(run[-1], Done)
            lengths[runner] = run[-1].stats.acceptance_length
        if not config.adaptive:
            assert lengths["graph"] == pytest.approx(lengths["eager"], rel=0.15) and lengths["graph"] > 1.5


@pytest.mark.parametrize("sampling", [SamplingParams(seed=1), SamplingParams(temperature=1.0, seed=4)])
def test_limits_on_what_may_follow_hold_in_padded_steps(target: Decoder, sampling: SamplingParams) -> None:
    """A limit on reasoning is a mask a row: its closing words come at the same place, then the same text."""
    closing = [40, 41, 42, 300]

    def guide() -> TokenConstraint:
        return TokenConstraint(
            ConstraintSpec(
                vocabulary=target.spec.vocab_size,
                reasoning="open",
                end_reasoning=300,
                budget=17,
                closing=closing,
            )
        )

    engine = Engine(target, max_ctx=1024)
    plain = tokens_of(events(engine, PROMPT, sampling, constraint=guide(), max_tokens=60))
    assert any(plain[place : place + 4] == closing for place in range(len(plain)))
    for kind in ("22", "lookup", "random trees"):
        drafter = proposer(kind, plain, target.spec.vocab_size)
        engine = Engine(target, max_ctx=1024, drafter=drafter, max_rows=64, runner="graph")
        found = events(engine, PROMPT, sampling, constraint=guide(), max_tokens=60)
        assert tokens_of(found) == plain, kind


def test_a_guided_draft_over_fixed_tensors() -> None:
    """Trees are made larger, pruned on the host and loaded again; the text is that of plain steps."""
    made = session(FIXED)
    speculator = made.engine.drafter
    assert isinstance(speculator, Speculator) and speculator._draft is not None
    prompt = made.encode(TextRequest(messages=[{"role": "user", "content": "def fibonacci(n):"}]))
    vocabulary = made.engine.target.spec.vocab_size

    def guide() -> TokenConstraint:
        return TokenConstraint(
            ConstraintSpec(
                vocabulary=vocabulary, reasoning="open", end_reasoning=12, budget=20, closing=[10, 11, 12]
            )
        )

    greedy = SamplingParams(seed=1)
    plain = tokens_of(events(made.engine, prompt, greedy, constraint=guide(), max_tokens=40, draft_budget=0))
    engine = Engine(made.engine.target, max_ctx=512, drafter=speculator, max_rows=23, runner="graph")
    found = events(engine, prompt, greedy, constraint=guide(), max_tokens=40)
    assert tokens_of(found) == plain
    assert isinstance(found[-1], Done) and found[-1].stats.acceptance_length > 1.5


def test_a_draft_forgets_the_rows_behind_a_stop_string() -> None:
    made = session(FIXED)
    speculator, target = made.engine.drafter, made.engine.target
    assert isinstance(speculator, Speculator) and speculator._draft is not None
    prompt = made.encode(TextRequest(messages=[{"role": "user", "content": "def fibonacci(n):"}]))
    engine = Engine(target, max_ctx=512, drafter=speculator, max_rows=23, runner="graph")
    trimmed: list[int] = []
    for last in (9, 10, 11, 12):
        cut, seen = cut_after(last)
        found = events(engine, prompt, SamplingParams(seed=1), cut=cut)
        assert len(tokens_of(found)) == last
        length = engine.states.lengths[0]
        rings = speculator._draft._buffers.lengths.tolist()
        assert rings == [length] == engine.states.buffers.lengths.tolist()
        assert length == len(prompt) + last - 1  # the last token was delivered, not processed
        trimmed.append(len(seen) - last)
    assert max(trimmed) > 0  # some end fell inside a step


def test_the_cpu_share_of_a_step_leaves_out_what_others_took() -> None:
    clock = StepClock(torch.device("cpu"))
    for mark in Mark:
        clock.mark(mark)
        if mark is Mark.FORWARD:
            time.sleep(0.05)  # as if another process had the CPU
        if mark is Mark.FORWARDED:
            time.sleep(0.2)  # between what is timed
    times = clock.times()
    assert times.forward_s >= 0.05 and times.whole_s >= times.forward_s + 0.2
    assert times.cpu_shares[1] < 0.5


def test_the_cost_of_a_step_is_not_less_where_another_thread_does_its_work() -> None:
    def work() -> None:
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass

    shares = []
    for threads in (1, 2):
        clock = StepClock(torch.device("cpu"), threads=threads)
        for mark in Mark:
            clock.mark(mark)
            if mark is Mark.FORWARD:
                other = threading.Thread(target=work)
                other.start()
                other.join()
        times = clock.times()
        shares.append(times.cpu_shares[1] * times.verify_s)
    # This thread slept: by its own clock the step cost nothing. Two threads would have shared 0.1 s.
    assert shares[0] < 0.04 <= shares[1]
