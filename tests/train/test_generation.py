"""Generation of many outputs at once against one at a time."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bough.engine.engine import Engine, Request, Tokens
from bough.engine.sampler import SamplingParams
from bough.errors import UsageError
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from bough.train.generation import Asked, generate_batch


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Path]) -> Decoder:
    with GGUFFile.open(tiny_model(layers=4)) as file:
        return Decoder.load(file)


PROMPTS = [
    [(7 * i + 3 * j) % 250 for j in range(length)]
    for i, length in enumerate([3, 70, 9, 9, 9, 1, 70, 33, 9, 4])
]


def engine_of(target: Decoder, slots: int) -> Engine:
    return Engine(target, max_ctx=512, slots=slots, max_rows=16)


def alone(target: Decoder, prompt: list[int], stop_ids: frozenset[int]) -> list[int]:
    events = engine_of(target, 1).generate(Request(prompt=prompt, max_tokens=40, stop_ids=stop_ids))
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_outputs_are_those_of_one_at_a_time(target: Decoder, slots: int) -> None:
    stop_ids = frozenset(alone(target, PROMPTS[2], frozenset())[5:7])
    seen: list[tuple[int, int]] = []
    asked = [Asked(prompt, SamplingParams()) for prompt in PROMPTS]
    found = list(
        generate_batch(
            engine_of(target, slots),
            asked,
            max_tokens=40,
            stop_ids=stop_ids,
            progress=lambda done, total: seen.append((done, total)),
        )
    )
    outputs = {each.index: each.tokens for each in found}
    assert all(each.ended == (len(each.tokens) < 40) for each in found)
    assert outputs == {index: alone(target, prompt, stop_ids) for index, prompt in enumerate(PROMPTS)}
    assert any(len(output) < 40 for output in outputs.values())
    assert seen[-1] == (10, 10)


def test_a_prompt_of_several_temperatures_is_processed_once(target: Decoder) -> None:
    ways = [SamplingParams(), *(SamplingParams(temperature=1.0, top_k=50, seed=seed) for seed in (4, 5))]
    asked = [Asked(prompt, sampling) for prompt in PROMPTS[:3] for sampling in ways]
    processed: list[int] = []

    def outputs(slots: int) -> dict[int, list[int]]:
        engine = engine_of(target, slots)
        forward, processed[:] = engine.prompts._forward_chunk, []
        engine.prompts._forward_chunk = lambda chunk: processed.append(chunk.stop) or forward(chunk)
        found = generate_batch(engine, asked, max_tokens=30, stop_ids=frozenset())
        return {each.index: each.tokens for each in found}

    together, apart = outputs(8), outputs(2)
    assert together == apart
    assert sorted(processed) == sorted(map(len, PROMPTS[:3]))
    assert len({tuple(output) for output in together.values()}) == 9
    assert together[0] == alone(target, PROMPTS[0], frozenset())[:30]


def test_what_still_runs_is_freed(target: Decoder) -> None:
    engine = engine_of(target, 4)
    asked = [Asked(prompt, SamplingParams()) for prompt in PROMPTS]
    outputs = generate_batch(engine, asked, max_tokens=5, stop_ids=frozenset())
    next(outputs)
    outputs.close()
    assert engine.idle and not any(engine.states.pages.owned)


def test_bad_prompts(target: Decoder) -> None:
    engine, rest = engine_of(target, 1), {"max_tokens": 10, "stop_ids": frozenset[int]()}
    with pytest.raises(UsageError, match="no tokens"):
        generate_batch(engine, [Asked([1], SamplingParams()), Asked([], SamplingParams())], **rest)
    assert list(generate_batch(engine, [], **rest)) == []
