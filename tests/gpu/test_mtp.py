"""The target's MTP block on a GPU: proposals as on a CPU, and the text of plain decoding."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bough.config import EngineConfig, SpecConfig
from bough.engine.engine import Engine, Request
from bough.engine.sampler import SamplingParams
from bough.session.loading import load_session
from tests.engine.driving import run
from tests.gpu.inputs import DEVICE

pytestmark = pytest.mark.gpu

PROMPT = [72, 101, 108, 108, 111, 32, 119, 111] * 20
FIXED = SpecConfig(budget=40, adaptive=False, lookup=False)


@pytest.fixture(scope="module")
def path(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(mtp=True, width=256, mix="q4_k_m")


def engine(path: Path, device: str, speculation: SpecConfig | None, *, graphs: bool = True) -> Engine:
    config = EngineConfig(device=device, max_ctx=2048, speculation=speculation)
    return load_session(path, config, graphs=graphs).engine


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding(path: Path, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3)
    request = Request(prompt=PROMPT, max_tokens=200, sampling=sampling)
    plain, _ = run(engine(path, str(DEVICE), None), request)
    for graphs in (False, True):
        speculative = engine(path, str(DEVICE), FIXED, graphs=graphs)
        assert speculative.runner.captured == graphs
        assert run(speculative, request)[0] == plain


@torch.inference_mode()
def test_proposals_are_the_cpus(path: Path) -> None:
    found = []
    for device in ("cpu", str(DEVICE)):
        made = engine(path, device, FIXED, graphs=False)
        run(made, Request(prompt=PROMPT, max_tokens=1, sampling=SamplingParams(seed=3)))

        def rank(logits, positions, anchors, slots, count):
            ids = torch.arange(count, device=logits.device).expand(*logits.shape[:2], -1)
            return ids, logits[..., :count].float()

        draft = made.drafter._draft
        draft.flush(0)
        anchor = torch.tensor([9], device=made.target.device)
        proposal = draft.candidates(anchor, torch.zeros_like(anchor), rank, 4)
        found.append(proposal.chain_scores.cpu())
    finite = found[0].isfinite()
    assert torch.equal(finite, found[1].isfinite())
    # Sorted: near-ties may come in another order.
    ours, theirs = (scores[finite].sort().values for scores in found)
    assert (ours - theirs).abs().max() < 0.05 * ours.abs().max()
