"""A draft that can propose only the first tokens of the vocabulary: other proposals, the same text."""

from dataclasses import replace

import pytest
import torch

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Request, Tokens, VerifiedTree
from bough.errors import UsageError
from bough.gguf.quantise import quantise
from bough.gguf.types import QuantType
from bough.kernels.quant_matmul import first_rows, pack, unpack
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from tests.engine.test_embedded_pair import SAMPLINGS
from tests.gpu.texts import embedded_pair
from tests.session.fake_gpu import dry_run, gpu_plan

TARGET, DRAFT = embedded_pair()
CONFIG = EngineConfig(
    "cpu",
    512,
    cpu_backend="torch",
    speculation=SpecConfig(adaptive=False, lookup=False),
    draft=DraftConfig(DRAFT),
)
SHORT = replace(CONFIG, draft=DraftConfig(DRAFT, shortlist=2048))


def test_the_text_is_the_same_and_proposals_are_in_the_shortlist() -> None:
    whole, short = load_session(TARGET, CONFIG), load_session(TARGET, SHORT)
    prompt = whole.encode(TextRequest(messages=[{"role": "user", "content": "def fibonacci(n):"}]))
    for sampling in (SAMPLINGS["greedy"], SAMPLINGS["T 0.7"]):
        texts, proposed = [], []
        for session in (whole, short):
            found = list(session.engine.generate(Request(prompt, 40, sampling, trees=True)))
            texts.append([token for event in found if isinstance(event, Tokens) for token in event.ids])
            # A tree's root is not proposed.
            trees = [event for event in found if isinstance(event, VerifiedTree)]
            proposed.append({token for tree in trees for token in tree.tokens[1:]})
        assert texts[0] == texts[1]
        assert max(proposed[0]) >= 2048 > max(proposed[1]) and len(proposed[1]) > 20


def test_logits_after_the_shortlist_are_minus_infinity() -> None:
    target = load_session(TARGET, SHORT).engine.target
    hidden = torch.randn(2, 3, target.spec.width, generator=torch.Generator().manual_seed(1))
    found, expected = target.draft_logits(hidden), target.logits(hidden)
    assert found.shape == expected.shape
    torch.testing.assert_close(found[..., :2048], expected[..., :2048])
    assert found[..., 2048:].eq(-torch.inf).all() and expected.isfinite().all()


@pytest.mark.parametrize("type", [QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0])
def test_the_first_rows_of_tiles(type: QuantType) -> None:
    weights = torch.randn(300, 512, generator=torch.Generator().manual_seed(2))
    packed = pack(quantise(weights, type), type)
    assert torch.equal(unpack(first_rows(packed, 256)), unpack(packed)[:256])


def test_its_memory_is_planned_and_its_kernels_are_found() -> None:
    gpu = replace(SHORT, device="cuda", cpu_backend="auto")
    more = gpu_plan(TARGET, gpu).weights - gpu_plan(TARGET, replace(gpu, draft=DraftConfig(DRAFT))).weights
    assert 2048 * 512 // 2 < more < 2048 * 512 * 2
    assert "rank_kernel" in {launch.name for launch in dry_run(TARGET, gpu).launches}


def test_a_shortlist_has_whole_blocks_of_rows() -> None:
    with pytest.raises(UsageError, match="`shortlist` is 1000, needed a multiple of 128 up to 16384"):
        load_session(TARGET, replace(CONFIG, draft=DraftConfig(DRAFT, shortlist=1000)))
