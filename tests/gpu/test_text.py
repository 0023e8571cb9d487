"""Greedy texts of the embedded pair on a GPU: eager and captured, plain and speculative."""

from collections.abc import Callable

import pytest
import torch

from bough.engine.engine import Engine, Request, Tokens
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from bough.session.session import Session
from tests.gpu.inputs import DEVICE
from tests.gpu.texts import (
    GREEDY,
    ExpectedText,
    assert_same_text,
    embedded_pair,
    expected_texts,
    generate,
    load_session,
)

pytestmark = pytest.mark.gpu

COUNT = 96
PROMPTS = range(len(expected_texts()))
# Whether there is a draft, and whether steps are captured.
WAYS = {"plain": (False, True), "tree, eager": (True, False), "tree, graphs": (True, True)}


@pytest.fixture(scope="module")
def sessions() -> Callable[[str], Session]:
    made: dict[str, Session] = {}

    def session(way: str) -> Session:
        if way not in made:
            (target, draft), (speculative, graphs) = embedded_pair(), WAYS[way]
            made[way] = load_session(target, draft if speculative else None, graphs=graphs)
            # The first request compiles.
            generate(made[way], expected_texts()[-1].prompt, max_tokens=16)
        return made[way]

    return session


@pytest.fixture(params=PROMPTS)
def expected(request: pytest.FixtureRequest) -> ExpectedText:
    return expected_texts()[request.param]


@pytest.mark.parametrize("way", WAYS)
def test_greedy_text_is_the_cpus(
    sessions: Callable[[str], Session], way: str, expected: ExpectedText
) -> None:
    found = generate(sessions(way), expected.prompt, max_tokens=COUNT)
    assert_same_text(found.tokens, expected, COUNT)


def test_a_request_leaves_nothing_in_the_static_buffers(sessions: Callable[[str], Session]) -> None:
    session, prompts = sessions("tree, graphs"), [text.prompt for text in expected_texts()[:2]]
    first, again = ([generate(session, prompt).tokens for prompt in prompts] for _ in range(2))
    assert first == again


def test_a_thinking_budget_ends_the_reasoning_with_and_without_trees(
    sessions: Callable[[str], Session],
) -> None:
    options = {"thinking": True, "thinking_budget": 9}
    found = [
        generate(sessions("tree, graphs"), "What is 3 + 4?", draft_budget=budget, **options)
        for budget in (None, 0)
    ]
    assert found[0].tokens == found[1].tokens
    assert found[0].stats.reasoning_tokens < 40


def tokens_of(engine: Engine, request: Request) -> list[int]:
    return [token for event in engine.generate(request) if isinstance(event, Tokens) for token in event.ids]


def test_plain_text_is_the_same_when_steps_are_launched_ahead(sessions: Callable[[str], Session]) -> None:
    """A request that may be stopped reads each token before the next forward is launched."""
    session = sessions("tree, graphs")
    prompt = [(7 * index + 11) % session.engine.target.spec.vocab_size for index in range(256)]
    texts = [
        tokens_of(session.engine, Request(prompt, max_tokens=96, may_stop=may_stop, draft_budget=0))
        for may_stop in 3 * (False, True)
    ]
    assert all(text == texts[0] for text in texts)


def test_an_embedding_in_host_memory_gives_the_same_text() -> None:
    texts = []
    for host in (False, True):
        with GGUFFile.open(embedded_pair()[0]) as file:
            target = Decoder.load(file, device=DEVICE, host_embedding=host)
        engine = Engine(target, max_ctx=1024)
        assert engine.warmup.capture()
        assert target.embed.data.is_cuda != host
        texts.append(tokens_of(engine, Request(list(range(100, 400)), max_tokens=64, sampling=GREEDY)))
        torch.cuda.synchronize()
    assert texts[0] == texts[1]
