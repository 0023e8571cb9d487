"""Many requests at once through one session: each has the text that it has alone, and nothing is left."""

import random
from dataclasses import dataclass, replace

import pytest

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Engine
from bough.engine.events import Failed
from bough.engine.sampler import SamplingParams
from bough.errors import UsageError
from bough.hub.catalog import named
from bough.memory.planner import MemoryPlan, plan_memory
from bough.session import loading
from bough.session.constraint import TokenConstraint
from bough.session.events import Finished, Text
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from bough.session.session import Generation, Session
from bough.text.grammar import Grammar

GREEDY = SamplingParams(seed=0)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}


def session(parallel: int, **options) -> Session:
    found = named("bough-40m")
    assert found is not None and found[0].pair is not None
    pair = found[0].pair
    config = EngineConfig(
        device="cpu", max_ctx=4096, parallel=parallel, draft=DraftConfig(pair.draft), prefix_cache=0
    )
    return load_session(pair.target, replace(config, **options))


def ask(text: str, sampling: SamplingParams = GREEDY, max_tokens: int = 40, **options) -> TextRequest:
    messages = [{"role": "user", "content": text}]
    return TextRequest(messages=messages, max_tokens=max_tokens, sampling=sampling, **options)


def long_text(words: int) -> str:
    numbers = random.Random(words)
    return "Add these numbers: " + " ".join(str(numbers.randrange(100)) for _ in range(words))


def mixed() -> list[TextRequest]:
    """Return 16 requests that differ in all that the engine treats in a way of its own."""
    sampled = SamplingParams(temperature=0.8, top_p=0.95, seed=5)
    penalised = SamplingParams(temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.3, seed=6)
    return [
        ask("def fibonacci(n):"),
        ask("Hi", sampled),
        ask(long_text(900)),
        ask("Write a Python function that counts the vowels in a string.", penalised),
        ask("Give me some JSON.", grammar=Grammar("json_schema", SCHEMA), max_tokens=30),
        ask("Count from 1 to 20.", stop=["7"]),
        ask("Tom has 3 boxes with 12 apples each. How many apples are there?", replace(GREEDY, logprobs=2)),
        ask("Give me more JSON.", replace(sampled, seed=9), grammar=Grammar("json_schema", SCHEMA)),
        ask(long_text(60), replace(sampled, seed=11, logprobs=0)),
        ask("Solve for $x$: $7x - 4 = 31$.", replace(GREEDY, presence_penalty=0.5)),
        ask("def clamp(value, low, high):", draft_budget=0),
        ask("Say yes.", max_tokens=1),
        ask("Write a loop in Python.", trees=True, stop=["\n\n", "for"]),
        ask("Which shell command lists all files?", SamplingParams(temperature=1.0, min_p=0.05, seed=3)),
        ask("Repeat: a b c a b c a b c a b c a b c", replace(GREEDY, logit_bias={100: -5.0})),
        ask("A baker sells 12 cakes a day at $15 each. How much does he earn in 8 days?", ignore_eos=True),
    ]


@dataclass(frozen=True)
class Output:
    text: str
    finished: Finished

    @property
    def facts(self) -> tuple:
        done = self.finished
        return self.text, done.tokens, done.reason, done.stop_string, done.logprobs


def run_all(made: Session, requests: list[TextRequest], seed: int) -> dict[int, Output]:
    """Run requests that arrive at random steps; return those that ended by themselves, by index."""
    chance = random.Random(seed)
    arrivals = sorted((chance.randrange(60), index) for index in range(len(requests)))
    cancelled: set[int] = set()
    running: dict[Generation, int] = {}
    texts, found = ["" for _ in requests], {}
    most = step = 0
    while arrivals or running:
        while arrivals and (arrivals[0][0] <= step or not running):
            index = arrivals.pop(0)[1]
            flagged = replace(requests[index], cancelled=lambda index=index: index in cancelled)
            running[made.begin(flagged)] = index
        if step == 25 and running:
            cancelled.add(chance.choice(list(running.values())))
        for generation, event in made.step():
            index = running[generation]
            assert not isinstance(event, Failed), event
            if isinstance(event, Text):
                texts[index] += event.text
            if isinstance(event, Finished):
                del running[generation]
                if event.reason != "cancelled":
                    found[index] = Output(texts[index], event)
        most = max(most, made.running)
        step += 1
    assert len(found) == len(requests) - len(cancelled) and cancelled
    assert most == made.parallel
    return found


def nothing_left(engine: Engine) -> bool:
    while not engine.idle:
        engine.step()
    states = engine.states
    free = states.pages.free == states.pages.capacity
    return free and states.free_slots == engine.slots and not any(states.pages.owned)


@pytest.fixture(scope="module")
def alone() -> list[Output]:
    made = session(1)
    found = []
    for request in mixed():
        *events, last = made.generate(request)
        found.append(Output("".join(event.text for event in events if isinstance(event, Text)), last))
    return found


@pytest.mark.parametrize("parallel", [3, 6])
@pytest.mark.parametrize("speculation", [SpecConfig(), SpecConfig(adaptive=False, budget=15), None])
def test_text_does_not_depend_on_company(
    alone: list[Output], parallel: int, speculation: SpecConfig | None
) -> None:
    made = session(parallel, speculation=speculation)
    beside = []  # prompts that steps of others read
    if parallel == 6:
        made.engine.prompts.short = 256  # as on a GPU
        verify = made.engine.runner.verify
        made.engine.runner.verify = lambda parts, *shared: (
            beside.extend(part for part in parts if part.given),
            verify(parts, *shared),
        )[1]
    for index, output in run_all(made, mixed(), seed=parallel).items():
        assert output.facts == alone[index].facts, index
    assert bool(beside) == (parallel == 6)
    assert nothing_left(made.engine)


def test_a_prompt_that_fails_beside_others_fails_alone(alone: list[Output]) -> None:
    """Its last tokens are rows of a step whose other tokens are committed."""
    made = session(2)
    made.engine.prompts.short = 256  # as on a GPU
    first, second = made.begin(mixed()[0]), None
    text, failed, ended = "", [], False

    def fail(*_: object) -> None:
        raise ValueError("damaged")

    while not ended:
        for generation, event in made.step():
            if isinstance(event, Failed):
                failed.append((generation, str(event.error)))
            elif isinstance(event, Text):
                text += event.text
            ended = ended or isinstance(event, Finished)
        if text and second is None:
            made.engine.prompts._first_token = fail  # ty: ignore[invalid-assignment]
            second = made.begin(mixed()[5])
    assert failed == [(second, "damaged")] and text == alone[0].text and first.ended
    assert nothing_left(made.engine)


def test_sequences_are_parked_when_pages_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool for one context, and five sequences that each grow to half of it."""

    def small(*args) -> MemoryPlan:
        return replace(plan_memory(*args), kv_tokens=400, max_ctx=400)

    monkeypatch.setattr(loading, "plan_memory", small)
    made, parked = session(5), []
    park = made.engine.paging.park
    monkeypatch.setattr(
        made.engine.paging, "park", lambda sequence: (parked.append(sequence), park(sequence))
    )
    samplings = [SamplingParams(temperature=0.5, seed=seed) for seed in range(5)]
    requests = [ask("Count to 99.", each, max_tokens=170, ignore_eos=True) for each in samplings]
    lone = session(1)
    expected = [[*lone.generate(request)][-1].tokens for request in requests]
    generations = [made.begin(request) for request in requests]
    found: dict[Generation, list[int]] = {}
    while len(found) < len(generations):
        found |= {each: event.tokens for each, event in made.step() if isinstance(event, Finished)}
    assert [found[each] for each in generations] == expected
    assert parked and nothing_left(made.engine)


def test_a_cancelled_request_frees_its_pages_within_one_step() -> None:
    made, cancelled = session(3), set()
    requests = [
        replace(ask(long_text(100 + index), max_tokens=200), cancelled=lambda index=index: index in cancelled)
        for index in range(4)
    ]
    generations = [made.begin(request) for request in requests]
    for _ in range(12):
        made.step()
    states = made.engine.states
    # One that decodes, one that waits for a slot.
    for index, running in ((0, 2), (3, 2)):
        held = sum(map(len, states.pages.owned))
        cancelled.add(index)
        ended = [each for each, event in made.step() if isinstance(event, Finished)]
        assert ended == [generations[index]]
        if index == 0:
            assert sum(map(len, states.pages.owned)) < held
        assert made.running >= running
    cancelled |= {1, 2}
    made.step()
    assert made.idle and nothing_left(made.engine)


def test_choices_of_one_prompt_process_it_once() -> None:
    made = session(3)
    request = made.check(ask(long_text(150)))
    samplings = [SamplingParams(temperature=0.9, seed=seed) for seed in range(5)]
    expected = []
    for sampling in samplings:
        *_, last = made.generate(replace(request, sampling=sampling))
        expected.append(last.tokens)
    first = made.begin(replace(request, sampling=samplings[0]))
    generations = [first, *(made.begin(replace(request, sampling=s), beside=first) for s in samplings[1:])]
    found: dict[Generation, Finished] = {}
    while len(found) < len(generations):
        found |= {each: event for each, event in made.step() if isinstance(event, Finished)}
    assert [found[each].tokens for each in generations] == expected
    prompt = len(request.encoded.ids) if request.encoded else 0
    assert [found[each].stats.cached_tokens for each in generations] == [0] + [prompt] * 4
    assert nothing_left(made.engine)


def test_a_failing_constraint_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made = session(3)
    requests = [mixed()[index] for index in (0, 4, 1)]
    expected = [[*made.generate(request)][-1].tokens for request in requests]
    generations = [made.begin(request) for request in requests]
    constraints: list[TokenConstraint] = []  # in the order of the requests; each has one

    def broken(self, tokens, parents) -> list:
        if not any(other is self for other in constraints):
            constraints.append(self)
        if len(constraints) > 1 and constraints[1] is self:
            raise UsageError("the grammar is too large")
        return masks(self, tokens, parents)

    masks = TokenConstraint.masks
    monkeypatch.setattr(TokenConstraint, "masks", broken)
    ends: dict[Generation, Failed | Finished] = {}
    while len(ends) < 3:
        ends |= {each: event for each, event in made.step() if isinstance(event, Failed | Finished)}
    first, failed, last = (ends[each] for each in generations)
    assert isinstance(failed, Failed) and "too large" in str(failed.error)
    assert isinstance(first, Finished) and first.tokens == expected[0]
    assert isinstance(last, Finished) and last.tokens == expected[2]
    assert nothing_left(made.engine)


def test_a_failing_prompt_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made = session(2)
    good, bad = mixed()[0], ask("this one fails")
    expected = [*made.generate(good)][-1].tokens
    prefill, refused = made.engine.drafter.prefill, made.encode(bad)

    def failing(slot: int, tokens: list[int], features) -> None:
        if tokens == refused:
            raise MemoryError("no memory for this chunk")
        prefill(slot, tokens, features)

    generations = [made.begin(good), made.begin(bad)]
    monkeypatch.setattr(made.engine.drafter, "prefill", failing)
    ends: dict[Generation, Failed | Finished] = {}
    while len(ends) < 2:
        ends |= {each: event for each, event in made.step() if isinstance(event, Failed | Finished)}
    survivor, failed = (ends[each] for each in generations)
    assert isinstance(failed, Failed) and isinstance(failed.error, MemoryError)
    assert isinstance(survivor, Finished) and survivor.tokens == expected
    assert nothing_left(made.engine)
