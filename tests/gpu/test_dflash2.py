"""A DFlash2 draft on a GPU: the text of plain decoding, eagerly and captured."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Request
from bough.engine.sampler import SamplingParams
from bough.gguf.reader import GGUFFile
from bough.models.spec import ModelSpec
from bough.session.loading import load_session
from tests.engine.driving import run
from tests.gpu.inputs import DEVICE
from tests.tiny_draft import SECOND, draft_config, save_draft

pytestmark = pytest.mark.gpu

PROMPT = [72, 101, 108, 108, 111, 32, 119, 111] * 20


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding(
    tiny_model: Callable[..., Path], tmp_path: Path, temperature: float
) -> None:
    path = tiny_model(width=256, mix="q4_k_m")
    with GGUFFile.open(path) as file:
        method = {**SECOND, "block_size": 8, "selector_rank": 32, "selector_top_k": 16}
        save_draft(tmp_path, draft_config(ModelSpec.from_gguf(file), nested=True, method=method))
    request = Request(prompt=PROMPT, max_tokens=200, sampling=SamplingParams(temperature=temperature, seed=3))
    plain = EngineConfig(device=str(DEVICE), max_ctx=2048, speculation=None)
    expected, _ = run(load_session(path, plain).engine, request)
    for chain in (False, True):
        for graphs in (False, True):
            config = EngineConfig(
                device=str(DEVICE),
                max_ctx=2048,
                speculation=SpecConfig(budget=40, adaptive=False, chain=chain),
                draft=DraftConfig(tmp_path),
            )
            engine = load_session(path, config, graphs=graphs).engine
            assert engine.runner.captured == graphs
            assert run(engine, request)[0] == expected
