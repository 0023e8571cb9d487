"""A draft call on a CPU reports what the call over static buffers reports."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bough.engine.sampler import Sampler, SamplingParams
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from bough.models.dflash import DFlashDraft
from bough.spec.calibration import Calibration, Share
from bough.spec.dflash import DFlashModel
from bough.spec.draft_call import TREE_WORDS, Ask, DraftCall, HostDraftCall, TreeShape
from bough.spec.policy import FEW_ROWS
from bough.spec.tree import Proposal
from bough.state.draft_ring import draft_buffers
from tests.tiny_draft import draft_config, random_rows, save_draft


@torch.inference_mode()
@pytest.mark.parametrize("candidates", [1, 8])
def test_the_same_reports_as_over_static_buffers(
    tiny_model: Callable[..., Path], tmp_path: Path, candidates: int
) -> None:
    with GGUFFile.open(tiny_model()) as file:
        target = Decoder.load(file)
    save_draft(tmp_path, draft_config(target.spec))
    draft = DFlashDraft.load(tmp_path, target.spec)
    model = DFlashModel(draft, target, draft_buffers(draft.spec, max_ctx=64, slots=3))
    sampler = Sampler(3, 64, target.spec.vocab_size, torch.device("cpu"))
    for slot in range(3):
        model.begin(slot)
        sampler.begin(slot, SamplingParams(seed=slot), [], masked=False)
        model.append(slot, random_rows(5 + slot, len(draft.spec.taps) * target.spec.width, seed=slot))
    calibration = Calibration()
    parts = ({model: calibration}, Share("cpu"), sampler.rank)
    forest = torch.zeros(3, TREE_WORDS, dtype=torch.int64)
    options = {"shape": TreeShape(model.depth, 20, candidates, -4.0), "forest": forest}
    ways = [kind(*parts, **options) for kind in (DraftCall, HostDraftCall)]
    asks = [Ask(0, 5, [], 0.0), Ask(1, 9, [7, 8, 9], -0.25), Ask(2, 3, list(range(15)), -0.5)]
    for some in (asks[:1], asks[1:2], asks):
        found = []
        for call in ways:
            call(some)
            reports, size = call.read(call.report()), call.tree(6).size
            found.append(call.reports())
            assert size == 6 and [each.tokens for each in reports] == [each.tokens for each in found[-1]]
        for one, other in zip(*found, strict=True):
            assert (one.tokens, one.parents) == (other.tokens, other.parents)
            assert one.probabilities == pytest.approx(other.probabilities, rel=1e-5)
            assert one.packed is not None and other.packed is not None
            assert torch.equal(one.packed, other.packed)
            compare(one.proposals[0], other.proposals[0])
    calibration.observe(found[0][0].proposals[0], [1, 2, 3])  # a report is enough to learn from
    whole = ways[1].reports()[0]
    ways[1](asks, short=True)
    short = ways[1].reports()[0]
    assert len(short.proposals[0].ids) == FEW_ROWS - 1 < len(whole.proposals[0].ids) == draft.spec.depth
    ways[1](asks)
    compare(ways[1].reports()[0].proposals[0], whole.proposals[0])


def compare(one: Proposal, other: Proposal) -> None:
    assert torch.equal(one.ids, other.ids) and torch.equal(one.scores, other.scores)
    assert one.given is None and other.given is None and one.edges is None and other.edges is None
