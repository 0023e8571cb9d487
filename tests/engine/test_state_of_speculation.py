"""The state after speculation: that of what was delivered, no drift, no trace, little memory."""

from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bough.engine.engine import Done, Engine, Event, Request, Tokens
from bough.engine.sampler import SamplingParams
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from bough.models.spec import DeltaSpec
from bough.models.step import AttentionBuffers, DeltaBuffers, Step
from bough.state.sequences import PAGE, SequenceStates
from tests.engine.driving import cut_after, drive
from tests.engine.oracles import Oracle
from workshop.steps import commit

PROMPT = [72, 101, 108, 108, 111]
WARM = SamplingParams(temperature=1.0, seed=8)


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Path]) -> Decoder:
    with GGUFFile.open(tiny_model(layers=4, context=16384)) as file:
        return Decoder.load(file)


def events_of(engine: Engine, count: int, **options) -> tuple[list[int], Done, Generator[Event]]:
    """Runs to the end but does not let go: the slot is still open."""
    tokens: list[int] = []
    driving = {name: options.pop(name) for name in ("cut", "cancelled") if name in options}
    request = Request(prompt=PROMPT, max_tokens=count, sampling=WARM, **options)
    events = drive(engine, request, **driving)
    for event in events:
        if isinstance(event, Tokens):
            tokens += event.ids
        elif isinstance(event, Done):
            return tokens, event, events
    raise AssertionError("no end")


def run(engine: Engine, count: int, **options) -> tuple[list[int], Done]:
    tokens, done, events = events_of(engine, count, **options)
    events.close()
    return tokens, done


@torch.inference_mode()
def contents(states: SequenceStates, slot: int, target: Decoder) -> list[torch.Tensor]:
    """Keys, values, recurrent states and windows of a slot, advanced by everything pending.

    A discarded one-row tree is the way to advance them: it changes nothing else.
    """
    slots = torch.tensor([slot])
    states.reserve(slot, 1)
    lengths = states.buffers.lengths[slots]
    step = Step.tree(slots, torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[-1]]), lengths)
    target.forward(step, states.buffers)
    commit(states, step, torch.tensor([-1]))
    length, table = states.lengths[slot], states.buffers.page_table[slot]
    found = []
    for layer in states.buffers.layers:
        if isinstance(layer, AttentionBuffers):
            pages = table[: -(-length // PAGE)]
            for plane in (*layer.keys.planes, *layer.values.planes):
                found.append(plane[pages].transpose(1, 2).flatten(0, 1)[:length])
        elif isinstance(layer, DeltaBuffers):
            found += [layer.state[slot], layer.window[slot]]
    return [part.clone() for part in found]


def prefilled(target: Decoder, ids: list[int]) -> list[torch.Tensor]:
    states = SequenceStates(target.spec, max_ctx=16384)
    slot = states.open()
    slots = torch.tensor([slot])
    for part in torch.tensor(ids).split(512):
        states.reserve(slot, len(part))
        step = Step.chunk(slots, part[None], states.buffers.lengths[slots])
        target.forward(step, states.buffers)
        states.advance(step)
    return contents(states, slot, target)


def worst(ours: list[torch.Tensor], fresh: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, fresh, strict=True))


@pytest.mark.parametrize("count", [3000, pytest.param(7000, marks=pytest.mark.slow)])
def test_thousands_of_steps_do_not_drift(target: Decoder, count: int) -> None:
    """Commits of every depth over thousands of tokens: still the state of a fresh prefill, to 1e-4."""
    plain, _ = run(Engine(target, max_ctx=16384), count)
    oracle = Oracle(len(PROMPT), plain, budget=11, right=0.75, vocabulary=target.spec.vocab_size)
    engine = Engine(target, max_ctx=16384, max_rows=12, drafter=oracle)
    tokens, done, events = events_of(engine, count)
    assert tokens == plain
    assert done.stats.steps > count // 5 and done.stats.acceptance_length > 3
    # The last token was delivered, not processed.
    assert engine.states.lengths[0] == len(PROMPT) + count - 1
    fresh = prefilled(target, (PROMPT + plain)[:-1])
    assert worst(contents(engine.states, 0, target), fresh) < 1e-4
    events.close()


@pytest.mark.parametrize("ends", ["length", "stop id", "stop string"])
def test_the_state_is_that_of_what_was_delivered(target: Decoder, ends: str) -> None:
    plain, _ = run(Engine(target, max_ctx=16384), 60)
    oracle = Oracle(len(PROMPT), plain, budget=30, right=1.0, vocabulary=target.spec.vocab_size)
    kept = next(i for i in range(25, 60) if plain[i] not in plain[:i])
    states = {}
    for name, drafter in (("plain", None), ("tree", oracle)):
        engine = Engine(target, max_ctx=16384, max_rows=31, drafter=drafter)
        options = {
            "length": {},
            "stop id": {"stop_ids": frozenset([plain[kept]])},
            "stop string": {"cut": cut_after(kept)[0]},
        }
        tokens, done, events = events_of(engine, kept if ends == "length" else 60, **options[ends])
        assert tokens == plain[:kept], name
        assert done.reason == ("length" if ends == "length" else "stop")
        states[name] = (engine.states.lengths[0], contents(engine.states, 0, target))
        events.close()
    assert states["plain"][0] == states["tree"][0]
    assert worst(states["tree"][1], states["plain"][1]) < 1e-4
    fresh = prefilled(target, (PROMPT + plain)[: states["tree"][0]])
    assert worst(states["tree"][1], fresh) < 1e-4


def test_a_cancelled_request_leaves_no_trace_in_the_next(target: Decoder) -> None:
    plain, _ = run(Engine(target, max_ctx=16384), 80)
    oracle = Oracle(len(PROMPT), plain, budget=20, vocabulary=target.spec.vocab_size)
    engine = Engine(target, max_ctx=16384, max_rows=21, drafter=oracle)
    for stop_after in range(1, 12):
        asked = iter(range(1000))
        _, done = run(engine, 80, cancelled=lambda asked=asked, limit=stop_after: next(asked) >= limit)
        assert done.reason == "cancelled"
        assert run(engine, 80)[0] == plain


@pytest.mark.parametrize(("dtype", "share"), [(torch.float16, 0.01), (torch.float32, 0.02)])
def test_a_node_costs_a_small_part_of_the_recurrent_state(
    target: Decoder, dtype: torch.dtype, share: float
) -> None:
    """One more row at the 27B's head shapes against the state, with 16-bit and with 32-bit inputs."""
    spec = replace(target.spec, delta=DeltaSpec(key_heads=16, value_heads=48, head_dim=128, conv_width=4))

    def tree_bytes(rows: int) -> int:
        states = SequenceStates(spec, max_ctx=64, max_rows=rows, input_dtype=dtype)
        return sum(
            part.nbytes
            for layer in states.buffers.layers
            if isinstance(layer, DeltaBuffers)
            for part in (layer.tree_inputs, layer.tree_gates)
        )

    per_node = tree_bytes(3) - tree_bytes(2)
    assert per_node == (tree_bytes(64) - tree_bytes(2)) / 62
    assert per_node <= share * spec.recurrent_bytes()
