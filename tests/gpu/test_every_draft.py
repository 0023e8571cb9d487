"""Every proposer on a GPU, alone and all in one tree: the text of plain decoding, eagerly and captured."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bough.engine.engine import Request
from bough.engine.events import Done, Tokens
from bough.engine.sampler import SamplingParams
from tests.engine.driving import run
from tests.every_draft import PROPOSERS, EveryDraft
from tests.gpu.inputs import DEVICE

pytestmark = pytest.mark.gpu

PROMPT = [72, 101, 108, 108, 111, 32, 119, 111] * 20
SAMPLINGS = [SamplingParams(seed=1), SamplingParams(temperature=0.8, top_p=0.95, seed=2)]


@pytest.fixture(scope="module")
def drafts(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> EveryDraft:
    target = tiny_model(layers=8, mtp=True, width=256, mix="q4_k_m")
    return EveryDraft(target, tmp_path_factory.mktemp("drafts"), device=str(DEVICE))


@pytest.fixture(scope="module")
def plain(drafts: EveryDraft) -> list[list[int]]:
    engine = drafts.plain().engine
    return [run(engine, Request(PROMPT, 120, sampling))[0] for sampling in SAMPLINGS]


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("proposers", PROPOSERS)
def test_same_text(drafts: EveryDraft, plain: list[list[int]], proposers: str, adaptive: bool) -> None:
    for graphs in (False, True):
        engine = drafts.session(proposers, budget=22, adaptive=adaptive, graphs=graphs).engine
        assert engine.runner.captured == graphs
        for sampling, expected in zip(SAMPLINGS, plain, strict=True):
            assert run(engine, Request(PROMPT, 120, sampling))[0] == expected


@pytest.mark.parametrize("adaptive", [False, True])
def test_same_text_of_several_at_once(drafts: EveryDraft, plain: list[list[int]], adaptive: bool) -> None:
    engine = drafts.session("dflash2, mtp, lookup", budget=22, parallel=2, adaptive=adaptive).engine
    sequences = [engine.add(Request(PROMPT, 120, sampling)) for sampling in SAMPLINGS]
    found: list[list[int]] = [[] for _ in sequences]
    ended = 0
    while ended < len(sequences):
        for sequence, event in engine.step():
            if isinstance(event, Tokens):
                found[sequences.index(sequence)] += event.ids
            ended += isinstance(event, Done)
    assert found == plain
