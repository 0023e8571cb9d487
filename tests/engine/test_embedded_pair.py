"""The pair in the package: real weights, real acceptance, and still the text of plain decoding."""

import pytest

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.sampler import SamplingParams
from bough.hub.catalog import named
from bough.session.loading import load_session
from bough.session.session import Finished, Session, TextRequest

PROMPTS = [
    "def fibonacci(n):",
    "Tom has 3 boxes with 12 apples each. He gives away 10 apples. How many apples does he have left?",
    "Write a Python function that counts the vowels in a string.",
]
SAMPLINGS = {
    "greedy": SamplingParams(seed=1),
    "T 0.7": SamplingParams(temperature=0.7, top_p=0.95, top_k=40, repetition_penalty=1.05, seed=2),
    "T 1.0": SamplingParams(temperature=1.0, presence_penalty=0.2, frequency_penalty=0.1, min_p=0.02, seed=3),
}
TREES = {
    "tree of 7": SpecConfig(budget=7, adaptive=False),
    "tree of 22": SpecConfig(adaptive=False),
    "tree of 63": SpecConfig(budget=63, adaptive=False),
    "chain": SpecConfig(chain=True, budget=15, adaptive=False),
    "controlled": SpecConfig(),
}


def session(speculation: SpecConfig | None) -> Session:
    found = named("bough-40m")
    assert found is not None and found[0].pair is not None
    pair = found[0].pair
    draft = DraftConfig(pair.draft) if speculation else None
    return load_session(
        pair.target, EngineConfig(device="cpu", max_ctx=512, speculation=speculation, draft=draft)
    )


def answers(made: Session) -> dict[tuple[str, str], Finished]:
    found = {}
    for name, sampling in SAMPLINGS.items():
        for prompt in PROMPTS:
            messages = [{"role": "user", "content": prompt}]
            request = TextRequest(messages=messages, max_tokens=64, sampling=sampling)
            *_, last = made.generate(request)
            assert isinstance(last, Finished)
            found[name, prompt] = last
    return found


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, str], Finished]:
    return answers(session(None))


@pytest.mark.parametrize("tree", TREES)
def test_same_text_with_every_tree(plain: dict[tuple[str, str], Finished], tree: str) -> None:
    found = answers(session(TREES[tree]))
    for key, expected in plain.items():
        assert found[key].tokens == expected.tokens, key
        assert found[key].reason == expected.reason
    if tree != "controlled":
        greedy = [found["greedy", prompt].stats for prompt in PROMPTS]
        length = sum(stats.step_tokens for stats in greedy) / sum(stats.steps for stats in greedy)
        assert length > 3
