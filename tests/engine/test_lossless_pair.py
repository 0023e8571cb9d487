"""The pair in the package over 24,000 tokens: every way to propose times every way to sample, float32, CPU.

Takes minutes: `pytest -m slow tests/engine/test_lossless_pair.py`. The short form is in test_embedded_pair.
"""

import pytest

from bough.config import SpecConfig
from bough.engine.engine import Done, Engine, Request, Tokens
from bough.engine.sampler import SamplingParams
from bough.session.requests import TextRequest
from bough.spec.costs import StepCosts
from bough.spec.speculator import Speculator
from tests.engine.oracles import RandomTrees
from tests.engine.test_embedded_pair import session
from tests.engine.test_lossless import SAMPLINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

COUNT = 100
PROMPTS = [
    "def fibonacci(n):",
    "A baker sells 12 cakes a day at $15 each. How much does he earn in 8 days?",
    "Write a Python function that counts the vowels in a string.",
    "Solve for $x$: $7x - 4 = 31$.",
    'Complete this function:\n```python\ndef clamp(value: float, low: float, high: float) -> float:\n    """ '
    "Return value, but at least low and at most high.\n    >>> clamp(5, 1, 3)\n    3\n    "
    '"""\n```',
    "Which shell command lists all files in a folder?",
]
TREES = {
    "chain": SpecConfig(chain=True, budget=15, adaptive=False),
    "tree of 1": SpecConfig(budget=1, adaptive=False),
    "tree of 7": SpecConfig(budget=7, adaptive=False),
    "tree of 22": SpecConfig(adaptive=False),
    "tree of 63": SpecConfig(budget=63, adaptive=False),
    "controlled": SpecConfig(),
}


def text(engine: Engine, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], Done]:
    """End tokens do not end it: what comes behind them is text like any other."""
    tokens: list[int] = []
    for event in engine.generate(Request(prompt=prompt, max_tokens=COUNT, sampling=sampling)):
        if isinstance(event, Tokens):
            tokens += event.ids
        elif isinstance(event, Done):
            return tokens, event
    raise AssertionError("no end")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    made = session(None)
    return [made.encode(TextRequest(messages=[{"role": "user", "content": prompt}])) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> dict[tuple[str, int], list[int]]:
    engine = session(None).engine
    return {
        (name, number): text(engine, prompt, sampling)[0]
        for name, sampling in SAMPLINGS.items()
        for number, prompt in enumerate(prompts)
    }


@pytest.mark.parametrize("tree", TREES)
def test_trees_of_the_draft(plain: dict[tuple[str, int], list[int]], prompts: list[list[int]], tree: str):
    engine = session(TREES[tree]).engine
    steps = 0
    for (name, number), expected in plain.items():
        tokens, done = text(engine, prompts[number], SAMPLINGS[name])
        assert tokens == expected, (name, PROMPTS[number])
        steps += done.stats.steps
    committed = sum(map(len, plain.values())) - len(plain)
    assert committed / steps > (1.2 if tree in ("tree of 1", "controlled") else 2)


@pytest.mark.parametrize("way", ["random trees", "lookup alone"])
def test_trees_of_others(plain: dict[tuple[str, int], list[int]], prompts: list[list[int]], way: str):
    target = session(None).engine.target
    steps = 0
    for (name, number), expected in plain.items():
        drafter = (
            RandomTrees(len(prompts[number]), expected, vocabulary=target.spec.vocab_size)
            if way == "random trees"
            else Speculator(None, SpecConfig(adaptive=False), StepCosts())
        )
        engine = Engine(target, max_ctx=512, drafter=drafter, max_rows=64)
        tokens, done = text(engine, prompts[number], SAMPLINGS[name])
        assert tokens == expected, (name, PROMPTS[number])
        steps += done.stats.steps
    assert (sum(map(len, plain.values())) - len(plain)) / steps > 1.05
