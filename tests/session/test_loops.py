"""Reasoning that repeats itself is found by its period and ended, at the same token with any tree, alone and
in company."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.config import SpecConfig
from bough.engine.engine import Engine, Request
from bough.engine.events import Done, Tokens
from bough.engine.sampler import SamplingParams
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.gguf.writer import GGUFWriter
from bough.models.decoder import Decoder
from bough.session import loops
from bough.session.constraint import ConstraintSpec, TokenConstraint
from bough.session.loops import LoopFinder
from bough.session.prompts import CLOSING
from bough.session.session import LOOPED, Session
from bough.spec.costs import StepCosts
from bough.spec.drafter import Drafter
from bough.spec.speculator import Speculator
from tests.engine.oracles import Oracle, RandomTrees
from tests.session.test_constrained import MESSAGES, WARM, Output, everywhere, session

VOCABULARY, WIDTH = 320, 128
END = 300  # of reasoning
PLANTED_CLOSING = [290, 291, END]


def is_loop(tokens: list[int]) -> bool:
    """Return whether the last tokens are a loop, from the rule as it is written down."""
    for period in range(1, len(tokens)):
        equal = 0
        while equal < len(tokens) - period and tokens[-1 - equal] == tokens[-1 - equal - period]:
            equal += 1
        few = len(set(tokens[-period:])) < 8
        if equal >= max(2 * period, 256 if few else 32):
            return True
    return False


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_finder_follows_the_rule_and_tokens_can_be_taken_back(data: st.DataObject) -> None:
    choose = random.Random(data.draw(st.integers(0, 1 << 30)))
    kinds = data.draw(st.sampled_from([3, 12, 100]))
    period = [choose.randrange(kinds) for _ in range(choose.randint(1, 40))]
    text = [choose.randrange(50) for _ in range(choose.randint(0, 20))] + period * 12
    finder, distance = LoopFinder(), 1 << 30
    for count, token in enumerate(text, 1):
        for _ in range(choose.choice([0, 0, 1, 3])):  # rows of a tree that are not accepted
            finder.advance(choose.randrange(50))
            finder.advance(token)
            finder.back()
            finder.back()
        finder.advance(token)
        finder.commit()
        found = is_loop(text[:count])
        assert finder.found is found, count
        assert not found or distance <= 1
        distance = min(distance - 1, 1 << 30) if found else finder.distance


def test_long_periods_are_found_and_longer_ones_are_not() -> None:
    for length, found in ((loops.LONGEST, True), (loops.LONGEST + 1, False)):
        finder = LoopFinder()
        for _ in range(3):
            for token in range(length):
                finder.advance(token % 5000)
                finder.commit()
        assert finder.found is found


@pytest.mark.parametrize("text", ["grid", "ruler", "list"])
def test_tables_and_lists_may_go_on(text: str) -> None:
    tokens = {
        "grid": [1, 2] * 100,  # 0 0 0 0
        "ruler": [1] * 256,
        "list": [token for line in range(99) for token in (1, 2, 3, 4, 5, 6, 7, 8, 9, 100 + line)],
    }[text]
    finder = LoopFinder()
    for token in tokens:
        finder.advance(token)
        finder.commit()
        assert not finder.found


def constraint(**options: Any) -> TokenConstraint:
    spec = ConstraintSpec(
        vocabulary=VOCABULARY,
        reasoning="open",
        begin_reasoning=299,
        end_reasoning=END,
        closing=PLANTED_CLOSING,
        **{"break_loops": True, **options},
    )
    return TokenConstraint(spec)


@pytest.mark.parametrize("period", [8, 20, 60])
@pytest.mark.parametrize("budget", [None, 100])
def test_idle_means_that_no_row_has_a_mask(period: int, budget: int | None) -> None:
    loop = [index % period for index in range(3 * period + 60)]
    whole = constraint(budget=budget)
    for at in range(len(loop) - 30):
        rows = 24
        chain = [loop[at - 1] if at else 0, *loop[at : at + rows - 1]]
        masks = whole.masks(chain, range(-1, rows - 1))
        if whole.idle(rows):
            assert masks == [None] * rows
        if any(mask is not None for mask in masks):
            closed = next(row for row, mask in enumerate(masks) if mask is not None)
            expected = max(3 * period, 32 + period)
            assert at + closed == (expected if budget is None else min(budget, expected))
            return
        whole.accept([loop[at]])
    raise AssertionError("the loop was not closed")


def planted(path: Path, out: Path, *, period: int) -> Path:
    """A copy of a model whose greedy text counts from 0 to `period` - 1, again and again."""
    with GGUFFile.open(path) as file, GGUFWriter(out, "qwen3") as writer:
        for key, value in file.metadata.items():
            if key not in ("general.architecture", "general.alignment"):
                writer.add(key, value)
        for info in file.tensors.values():
            writer.add_tensor(info.name, info.shape, info.type)
            assert info.type is QuantType.F32
        writer.write_header()
        for name, info in file.tensors.items():
            values = file.raw(name).view(np.float32).copy().reshape(info.shape)
            if name.endswith(("attn_output.weight", "ffn_down.weight")):
                values[:] = 0
            if name in ("token_embd.weight", "output.weight"):
                values[period:] *= 0.01
                values[:period] = np.roll(np.eye(period, WIDTH), int(name == "output.weight"), axis=0)
            if name == "output_norm.weight":
                values[:] = 1
            writer.write_tensor(name, values)
    return out


PERIODS = (16, 60)


@pytest.fixture(scope="module", params=PERIODS)
def looping(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Decoder]:
    out = tmp_path_factory.mktemp("loops") / f"{request.param}.gguf"
    path = planted(tiny_model("qwen3", width=WIDTH, layers=2), out, period=request.param)
    with GGUFFile.open(path) as file:
        return request.param, Decoder.load(file)


PROPOSERS: dict[str, Callable[[list[int]], Drafter | None]] = {
    "plain": lambda answer: None,
    "tree of 22": lambda answer: Oracle(4, answer, budget=22, vocabulary=VOCABULARY),
    "tree of 63": lambda answer: Oracle(4, answer, budget=63, vocabulary=VOCABULARY),
    "random trees": lambda answer: RandomTrees(4, answer, vocabulary=VOCABULARY),
    "lookup": lambda answer: Speculator(None, SpecConfig(budget=22, adaptive=False), StepCosts()),
}


def texts(
    target: Decoder,
    constraints: list[TokenConstraint | None],
    *,
    drafter: Drafter | None = None,
    runner: Literal["eager", "graph"] = "eager",
    count: int,
    may_stop: bool = False,
) -> list[list[int]]:
    """Return the texts of requests that run at once."""
    engine = Engine(target, max_ctx=1024, slots=len(constraints), drafter=drafter, max_rows=64, runner=runner)
    requests = [
        Request([5, 6, 7, 0], count, SamplingParams(seed=1), constraint=each, may_stop=may_stop)
        for each in constraints
    ]
    tokens = {engine.add(request): [] for request in requests}
    ended = 0
    while ended < len(requests):
        for sequence, event in engine.step():
            if isinstance(event, Tokens):
                tokens[sequence] += event.ids
            ended += isinstance(event, Done)
    return list(tokens.values())


def test_a_planted_loop_is_closed_within_three_periods(looping: tuple[int, Decoder]) -> None:
    period, target = looping
    most = 3 * period + 30
    counted = [index % period for index in range(1, most + 1)]
    assert texts(target, [constraint(break_loops=False)], count=most) == [counted]
    expected = [*counted[: 3 * period], *PLANTED_CLOSING]
    for name, make in PROPOSERS.items():
        for runner, may_stop in (("eager", True), ("graph", True), ("graph", False)):
            own = constraint()
            options = {"drafter": make(counted), "runner": runner, "may_stop": may_stop, "count": most}
            [found] = texts(target, [own], **options)
            assert found[: len(expected)] == expected, (name, runner, may_stop)
            assert len(found) == most and own.loops_ended == 1
    for runner in ("eager", "graph"):
        drafter = PROPOSERS["lookup"](counted)
        several = [constraint(), None, constraint(budget=9)]
        together = texts(target, several, drafter=drafter, runner=runner, count=most)
        assert together[0][: len(expected)] == expected and together[1] == counted
        assert together[2][:12] == [*counted[:9], *PLANTED_CLOSING]


AGAIN = "Let me check the numbers again: one, two, three and four are right. "
ASKED = [*MESSAGES, {"role": "assistant", "content": "", "reasoning_content": AGAIN * 2}]


@pytest.mark.parametrize("sampling", [SamplingParams(seed=1), WARM], ids=["greedy", "warm"])
def test_the_pairs_own_loops_end_alike_with_every_tree(sampling: SamplingParams) -> None:
    options = {"messages": ASKED, "continue_final": True, "sampling": sampling, "max_tokens": 150}
    found = everywhere(**options)
    assert Output(session("controlled"), **options).key() == found.key()
    if sampling.temperature == 0:
        assert found.done.stats.reasoning_loops == 1 and LOOPED in found.done.stats.notes
        assert found.reasoning.endswith(CLOSING.strip()) and found.text
        kept = everywhere(**options, break_loops=False)
        assert kept.done.stats.reasoning_loops == 0 and not kept.text
        assert kept.reasoning.startswith(found.reasoning.removesuffix(CLOSING.rstrip()))


def test_the_switch_of_a_session_turns_it_off() -> None:
    made = session("plain")
    off = Session(made.engine, made.tokenizer, made.template, made.plan, break_loops=False)
    found = Output(off, messages=ASKED, continue_final=True, max_tokens=150)
    assert found.done.stats.reasoning_loops == 0 and not found.text
