"""Reasoning that repeats itself ends at the same token on a GPU: plain, with trees, in company."""

import pytest

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.events import Failed
from bough.engine.sampler import SamplingParams
from bough.session.events import Finished
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from bough.session.session import Session
from tests.gpu.texts import embedded_pair

pytestmark = pytest.mark.gpu
AGAIN = "Let me check the numbers again: one, two, three and four are right. "
QUESTIONS = ("Write a Python function that counts the vowels in a string.", "Add 3 and 4.", "What is a list?")
KINDS = {
    "plain": None,
    "policy": SpecConfig(),
    "trees": SpecConfig(adaptive=False),
    "large trees": SpecConfig(budget=63, adaptive=False),
}


def requests(*, break_loops: bool) -> list[TextRequest]:
    thought = {"role": "assistant", "content": "", "reasoning_content": AGAIN * 2}
    return [
        TextRequest(
            messages=[{"role": "user", "content": question}, thought],
            continue_final=True,
            max_tokens=200,
            sampling=SamplingParams(seed=1),
            break_loops=break_loops,
        )
        for question in QUESTIONS
    ]


def alone(session: Session, request: TextRequest) -> Finished:
    return next(event for event in session.generate(request) if isinstance(event, Finished))


def together(session: Session, asked: list[TextRequest]) -> list[list[int]]:
    generations = [session.begin(request) for request in asked]
    ends: dict[int, list[int]] = {}
    while len(ends) < len(asked):
        for owner, event in session.step():
            assert not isinstance(event, Failed)
            if isinstance(event, Finished):
                ends[generations.index(owner)] = event.tokens
                session.end(owner)
    return [ends[index] for index in range(len(asked))]


def test_loops_end_alike() -> None:
    target, draft = embedded_pair()
    found: dict[str, list[list[int]]] = {}
    for kind, speculation in KINDS.items():
        config = EngineConfig(
            device="cuda",
            max_ctx=1024,
            parallel=3,
            speculation=speculation,
            draft=DraftConfig(draft) if speculation else None,
        )
        session = load_session(target, config)
        ends = [alone(session, request) for request in requests(break_loops=True)]
        assert sum(end.stats.reasoning_loops for end in ends) >= 1
        found[kind] = [end.tokens for end in ends]
        assert together(session, requests(break_loops=True)) == found[kind], kind
        free = [alone(session, request) for request in requests(break_loops=False)]
        assert not any(end.stats.reasoning_loops for end in free)
    assert all(tokens == found["plain"] for tokens in found.values())
