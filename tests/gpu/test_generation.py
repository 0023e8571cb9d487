"""Outputs of many prompts at once on a GPU: those of one at a time, with captured steps."""

import pytest

from tests.gpu.texts import embedded_pair
from treeflash.engine.engine import Engine, Request, Tokens
from treeflash.engine.sampler import SamplingParams
from treeflash.train.draft_target import load_target
from treeflash.train.generation import Asked, generate_batch, many_engine

pytestmark = pytest.mark.gpu
LENGTHS = (3, 9, 40, 64, 130, 257, 300)  # the last two are longer than what steps read beside others
TOKENS = 48


def test_many_at_once_are_those_of_one_at_a_time() -> None:
    target = load_target(embedded_pair()[0], device="cuda")
    prompts = [[(11 * n + 7 * place) % 5000 for place in range(LENGTHS[n % 7])] for n in range(70)]
    ways = [SamplingParams(seed=0), SamplingParams(temperature=0.8, top_p=0.95, top_k=64, seed=5)]
    asked = [Asked(prompt, way) for prompt in prompts for way in ways]
    engine, stop_ids = many_engine(target.decoder, max_ctx=512), target.tokenizer.stop_ids
    assert engine.runner.captured
    found = {
        output.index: output.tokens
        for output in generate_batch(engine, asked, max_tokens=TOKENS, stop_ids=stop_ids)
    }
    assert found.keys() == set(range(140))
    alone = Engine(target.decoder, max_ctx=512, max_rows=16)
    assert alone.capture()
    for index in (*range(14), 139):
        request = Request(asked[index].prompt, TOKENS, asked[index].sampling, stop_ids)
        events = alone.generate(request)
        tokens = [token for event in events if isinstance(event, Tokens) for token in event.ids]
        assert found[index] == tokens, index
