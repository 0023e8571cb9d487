"""Batched generation against the engine, one sequence at a time."""

from collections.abc import Callable
from pathlib import Path

import pytest

from treeflash.engine.engine import Engine, Request, Tokens
from treeflash.engine.sampler import SamplingParams
from treeflash.errors import UsageError
from treeflash.gguf.reader import GGUFFile
from treeflash.models.decoder import Decoder
from treeflash.train.generation import generate_batch


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Path]) -> Decoder:
    with GGUFFile.open(tiny_model(layers=4)) as file:
        return Decoder.load(file)


PROMPTS = [
    [(7 * i + 3 * j) % 250 for j in range(length)]
    for i, length in enumerate([3, 70, 9, 9, 9, 1, 70, 33, 9, 4])
]


def alone(target: Decoder, prompt: list[int], stop_ids: frozenset[int]) -> list[int]:
    engine = Engine(target, max_ctx=512)
    events = engine.generate(Request(prompt=prompt, max_tokens=40, stop_ids=stop_ids))
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_outputs_are_identical_to_the_engine(target: Decoder, slots: int) -> None:
    stop_ids = frozenset(alone(target, PROMPTS[2], frozenset())[5:7])
    seen: list[tuple[int, int]] = []
    outputs = dict(
        generate_batch(
            target,
            PROMPTS,
            max_tokens=40,
            sampling=SamplingParams(),
            stop_ids=stop_ids,
            slots=slots,
            progress=lambda done, total: seen.append((done, total)),
        )
    )
    assert outputs == {index: alone(target, prompt, stop_ids) for index, prompt in enumerate(PROMPTS)}
    assert any(len(output) < 40 for output in outputs.values())
    assert seen[-1] == (10, 10)


def test_samples_do_not_depend_on_the_batch(target: Decoder) -> None:
    def outputs(slots: int) -> dict[int, list[int]]:
        sampling = SamplingParams(temperature=1.0, top_k=50, seed=4)
        prompts = [PROMPTS[2]] * 6
        options = {"max_tokens": 30, "sampling": sampling, "stop_ids": frozenset[int]()}
        return dict(generate_batch(target, prompts, slots=slots, **options))

    together, apart = outputs(6), outputs(2)
    assert together == apart
    assert len({tuple(output) for output in together.values()}) == 6


def test_bad_prompts(target: Decoder) -> None:
    options = {"max_tokens": 10, "sampling": SamplingParams(), "stop_ids": frozenset[int]()}
    with pytest.raises(UsageError, match="no tokens"):
        generate_batch(target, [[1], []], **options)
    assert list(generate_batch(target, [], **options)) == []
