"""Rows that several sequences share on the device, over static buffers on a CPU: plain decoding's text."""

from collections import Counter

import pytest

from bough.config import SpecConfig
from bough.engine.engine import Engine, Request, Tokens
from bough.engine.pipeline import Batch, Pipeline
from bough.engine.sampler import SamplingParams
from bough.engine.sequence import Sequence
from bough.models.step import SIZES
from bough.session.constraint import ConstraintSpec, TokenConstraint
from bough.session.requests import TextRequest
from bough.session.session import Session
from bough.spec.costs import StepCosts
from bough.spec.dflash import DFlashModel
from bough.spec.speculator import Speculator
from bough.spec.tree import SharedTrees
from bough.state.draft_ring import draft_buffers
from tests.engine.test_embedded_pair import session

TEXTS = (
    "def fibonacci(n):",
    "Tell me a story about a dog.",
    "What is 17 + 26?",
    "Write a bubble sort in Python.",
    "List the days.",
)
# As of a GPU: padding is nearly free, and a draft call cheap.
COSTS = {1: 1.0, 8: 1.05, 16: 1.15, 24: 1.3, 32: 1.5, 48: 1.9, 64: 2.3}


@pytest.fixture(scope="module")
def made() -> Session:
    return session(SpecConfig())


def engine(made: Session, *, slots: int, adaptive: bool = True, short: int = 0) -> Engine:
    """Return an engine whose draft calls leave their trees in static buffers."""
    draft = made.engine.drafter._draft._draft  # ty: ignore[unresolved-attribute]
    rings, config = draft_buffers(draft.spec, max_ctx=256, slots=slots), SpecConfig(adaptive=adaptive)
    block, costs = DFlashModel(draft, made.engine.target, rings), StepCosts(dict(COSTS), {0: 0.2})
    drafter = Speculator(block, config, costs, sizes=SIZES, on_host=False)
    found = Engine(made.engine.target, max_ctx=256, slots=slots, drafter=drafter, max_rows=23, runner="graph")
    found.prompts.short = short
    return found


def requests(made: Session, **options) -> list[Request]:
    found = []
    for index, text in enumerate(TEXTS):
        prompt = made.encode(TextRequest(messages=[{"role": "user", "content": text}]))
        sampling = SamplingParams(temperature=0.8 * (index % 2), top_p=0.95, seed=index)
        found.append(Request(prompt, 16 + 8 * index, sampling, **{"may_stop": False, **options}))
    return found


def answers(found: Engine, requests: list[Request], *, cancelled: dict[int, int] | None = None) -> list[list]:
    """Answer all requests, as many at a time as there are slots; `cancelled`: some after so many tokens."""
    running = {found.add(request): index for index, request in enumerate(requests)}
    texts: list[list[int]] = [[] for _ in requests]
    while any(not sequence.finished for sequence in running):
        for sequence, event in found.step():
            if isinstance(event, Tokens):
                texts[running[sequence]] += event.ids
        for sequence, index in running.items():
            if len(texts[index]) >= (cancelled or {}).get(index, 1000) and not sequence.finished:
                found.cancel(sequence)
    found.step()
    return texts


@pytest.fixture(scope="module")
def plain(made: Session) -> list[list[int]]:
    # Tokens do not depend on where a drafter may end.
    return [answers(made.engine, [request])[0] for request in requests(made, draft_budget=0)]


class Watched:
    """What steps a pipeline launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.shared: Counter[tuple[int, int]] = Counter()  # by sequences and pieces of prompts
        self.host = self.ahead = 0
        begin, launch = Pipeline._begin, Pipeline._launch

        def begun(pipeline: Pipeline, sequences: list[Sequence], readers: list[Sequence]) -> Batch | None:
            batch = begin(pipeline, sequences, readers)
            if batch is not None and isinstance(batch.trees, SharedTrees):
                self.shared[len(batch.sequences), len(batch.pieces)] += 1
            self.host += batch is not None and isinstance(batch.trees, list) and not batch.alone
            return batch

        def launched(pipeline: Pipeline, *rest) -> None:
            launch(pipeline, *rest)
            if (batch := pipeline._launched) is not None:
                self.ahead += len(batch.sequences) > 1
                assert all(sequence.launch_ahead == "forward" for sequence in batch.sequences)

        monkeypatch.setattr(Pipeline, "_begin", begun)
        monkeypatch.setattr(Pipeline, "_launch", launched)


@pytest.mark.parametrize(("slots", "short", "adaptive"), [(3, 0, True), (5, 512, True), (4, 512, False)])
def test_the_text_of_plain_decoding(
    made: Session,
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    slots: int,
    short: int,
    adaptive: bool,
) -> None:
    steps = Watched(monkeypatch)
    found = engine(made, slots=slots, short=short, adaptive=adaptive)
    assert answers(found, requests(made)) == plain
    assert steps.ahead > 10 and sum(steps.shared.values()) > 10
    assert any(pieces for _, pieces in steps.shared) == (short > 0)
    assert found.states.free_slots == slots


def test_one_reads_trees_and_one_may_stop(
    made: Session, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then trees are read on the host, or the forward waits for the caller."""
    steps, some = Watched(monkeypatch), requests(made)
    found = engine(made, slots=5)
    shown = [*some[:4], requests(made, trees=True)[4]]
    assert answers(found, shown) == plain and steps.host > 5
    stopped = [*some[:3], *requests(made, may_stop=True)[3:]]
    assert answers(engine(made, slots=5), stopped) == plain


def test_a_constraint_among_others(made: Session, plain: list[list[int]]) -> None:
    """Its tree is read and cut on the host; what it must say comes where it comes alone."""
    some, closing = requests(made), [40, 41, 42, 43]

    def limited() -> Request:
        constraint = TokenConstraint(
            ConstraintSpec(
                vocabulary=made.engine.target.spec.vocab_size,
                reasoning="open",
                end_reasoning=43,
                budget=9,
                closing=closing,
            )
        )
        return Request(some[1].prompt, 24, SamplingParams(seed=5), constraint=constraint, may_stop=False)

    [alone] = answers(engine(made, slots=1), [limited()])
    assert alone[9:13] == closing
    assert answers(engine(made, slots=6), [*some, limited()]) == [*plain, alone]


def test_some_end_while_the_next_step_is_in_flight(made: Session, plain: list[list[int]]) -> None:
    found = engine(made, slots=5)
    ends = {1: 5, 3: 9}
    for _ in range(2):  # in slots and pages of those that were cancelled
        texts = answers(found, requests(made), cancelled=ends)
        for index, (text, expected) in enumerate(zip(texts, plain, strict=True)):
            assert text == expected[: len(text)]
            assert len(text) >= ends[index] if index in ends else text == expected


def test_what_fails_when_it_is_launched_ahead_fails_in_the_next_step(
    made: Session, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have ended get their last tokens; what fails once is done again."""
    found, begin, calls = engine(made, slots=5), Pipeline._begin, []

    def begun(pipeline: Pipeline, *parts) -> Batch | None:
        calls.append(parts)
        if len(calls) % 3 == 0 and len(calls) < 30:
            raise MemoryError("no pages")
        return begin(pipeline, *parts)

    monkeypatch.setattr(Pipeline, "_begin", begun)
    running = {found.add(request): index for index, request in enumerate(requests(made))}
    texts: list[list[int]] = [[] for _ in running]
    failures = 0
    while any(not sequence.finished for sequence in running):
        try:
            for sequence, event in found.step():
                texts[running[sequence]] += event.ids if isinstance(event, Tokens) else []
        except MemoryError:
            failures += 1
    assert texts == plain and failures < 9 < len(calls)


def test_plain_steps_follow_before_they_are_read(
    made: Session, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a draft the next tokens of all sequences stay on the device."""
    launched, verify = [], Pipeline._verify_ahead
    monkeypatch.setattr(
        Pipeline, "_verify_ahead", lambda *parts: launched.append(verify(*parts)) or launched[-1]
    )
    found = Engine(made.engine.target, max_ctx=256, slots=5, runner="graph")
    assert answers(found, requests(made)) == plain
    assert sum(forward is not None and len(forward.bounds) > 2 for forward in launched) > 10
