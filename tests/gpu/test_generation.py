"""Outputs of many prompts at once on a GPU: those of one at a time, with captured steps."""

import pytest
import torch
from torch import Tensor

from bough.engine.engine import Engine, Event, Request, Sequence, Tokens
from bough.engine.runner import Forward
from bough.engine.sampler import SamplingParams
from bough.train.draft_target import load_target
from bough.train.generation import Asked, generate_batch, many_engine
from tests.gpu.texts import embedded_pair

pytestmark = pytest.mark.gpu
LENGTHS = (3, 9, 40, 64, 130, 300, 600)  # the last is longer than what steps read beside others
TOKENS = 48


def test_many_at_once_are_those_of_one_at_a_time() -> None:
    target = load_target(embedded_pair()[0], device="cuda")
    prompts = [[(11 * n + 7 * place) % 5000 for place in range(LENGTHS[n % 7])] for n in range(70)]
    ways = [SamplingParams(seed=0), SamplingParams(temperature=0.8, top_p=0.95, top_k=64, seed=5)]
    asked = [Asked(prompt, way) for prompt in prompts for way in ways]
    engine, stop_ids = many_engine(target.decoder, max_ctx=1024), target.tokenizer.stop_ids
    assert engine.runner.captured
    found = {
        output.index: output.tokens
        for output in generate_batch(engine, asked, max_tokens=TOKENS, stop_ids=stop_ids)
    }
    assert found.keys() == set(range(140))
    alone = Engine(target.decoder, max_ctx=1024)
    assert alone.warmup.capture()
    for index in (*range(14), 139):
        request = Request(asked[index].prompt, TOKENS, asked[index].sampling, stop_ids)
        events = alone.generate(request)
        tokens = [token for event in events if isinstance(event, Tokens) for token in event.ids]
        assert found[index] == tokens, index


def test_pieces_of_a_prompt_do_not_wait_for_each_other() -> None:
    """32 steps are launched one after the other; the bits are those of steps that wait."""
    engine = Engine(load_target(embedded_pair()[0], device="cuda").decoder, max_ctx=1024)
    assert engine.warmup.capture()
    first_token, read_piece, found = engine.prompts._first_token, engine.prompts.read_piece, []

    def noted(sequence: Sequence, logits: Tensor) -> list[Event]:
        found.append(logits.clone())
        return first_token(sequence, logits)

    def waiting(slot: int, tokens: list[int]) -> Forward:
        forward = read_piece(slot, tokens)
        torch.cuda.synchronize()
        return forward

    engine.prompts._first_token = noted  # ty: ignore[invalid-assignment]
    request = Request([(7 * place) % 5000 for place in range(510)], 4, SamplingParams(seed=0))
    for read in (read_piece, waiting, read_piece):
        engine.prompts.read_piece = read  # ty: ignore[invalid-assignment]
        list(engine.generate(request))
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
