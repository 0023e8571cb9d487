"""Speculation changes nothing but the speed: the same text as plain decoding, token for token.

Every way to propose times every way to sample, 512 tokens each: 23,040 tokens, float32 on a CPU.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from bough.config import SpecConfig
from bough.engine.engine import Done, Engine, Request, Tokens
from bough.engine.sampler import SamplingParams
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from bough.spec.costs import StepCosts
from bough.spec.drafter import Drafter
from bough.spec.speculator import Speculator
from tests.engine.oracles import Oracle, RandomTrees

COUNT = 512
BIAS = {7: 2.0, 40: -3.0, 41: -100.0, 65: 0.5}
SAMPLINGS = {
    "greedy": SamplingParams(seed=1),
    "greedy, penalties, bias": SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logit_bias=BIAS, seed=2
    ),
    "T 0.7, filters": SamplingParams(temperature=0.7, top_k=40, top_p=0.95, min_p=0.02, seed=3),
    "T 1.0": SamplingParams(temperature=1.0, seed=4),
    "T 1.0, everything": SamplingParams(
        temperature=1.0,
        top_k=60,
        top_p=0.97,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.1,
        logit_bias=BIAS,
        seed=5,
    ),
}
PROPOSERS: dict[str, Callable[[int, list[int], int], Drafter]] = {
    "chain": lambda p, a, v: Oracle(p, a, budget=15, candidates=1, vocabulary=v),
    "tree of 1": lambda p, a, v: Oracle(p, a, budget=1, vocabulary=v),
    "tree of 7": lambda p, a, v: Oracle(p, a, budget=7, vocabulary=v),
    "tree of 22": lambda p, a, v: Oracle(p, a, budget=22, vocabulary=v),
    "tree of 63": lambda p, a, v: Oracle(p, a, budget=63, vocabulary=v),
    "random trees": lambda p, a, v: RandomTrees(p, a, vocabulary=v),
    "lookup alone": lambda p, a, v: Speculator(None, SpecConfig(budget=22, adaptive=False), StepCosts()),
    "lookup beside a poor oracle": lambda p, a, v: Oracle(
        p, a, budget=22, right=0.3, lookup=True, vocabulary=v
    ),
    "lookup beside the oracle": lambda p, a, v: Oracle(p, a, budget=40, lookup=True, vocabulary=v, seed=9),
}
DEEP = {"chain", "tree of 7", "tree of 22", "tree of 63", "lookup beside the oracle"}


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Path]) -> Decoder:
    with GGUFFile.open(tiny_model(layers=4)) as file:
        return Decoder.load(file)


def run(target: Decoder, sampling: SamplingParams, drafter: Drafter | None = None) -> tuple[list[int], Done]:
    # A prompt with repetitions, so that there is something to look up.
    prompt = [72, 101, 108, 108, 111, 32, 119, 111] * 6
    engine = Engine(target, max_ctx=1024, drafter=drafter, max_rows=64)
    tokens: list[int] = []
    for event in engine.generate(Request(prompt=prompt, max_tokens=COUNT, sampling=sampling)):
        if isinstance(event, Tokens):
            tokens += event.ids
        elif isinstance(event, Done):
            return tokens, event
    raise AssertionError("no end")


@pytest.fixture(scope="module")
def plain(target: Decoder) -> dict[str, list[int]]:
    return {name: run(target, sampling)[0] for name, sampling in SAMPLINGS.items()}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_same_text(target: Decoder, plain: dict[str, list[int]], sampling: str, proposer: str) -> None:
    expected = plain[sampling]
    assert len(expected) == COUNT and len(set(expected)) > 20
    drafter = PROPOSERS[proposer](48, expected, target.spec.vocab_size)
    tokens, done = run(target, SAMPLINGS[sampling], drafter)
    assert tokens == expected
    if proposer in DEEP:
        assert done.stats.acceptance_length >= 4
    elif proposer != "lookup alone":
        assert done.stats.acceptance_length > 1.2


def test_the_samplings_differ_from_each_other(plain: dict[str, list[int]]) -> None:
    """Otherwise an option that does nothing would pass."""
    assert len({tuple(tokens) for tokens in plain.values()}) == len(SAMPLINGS)
