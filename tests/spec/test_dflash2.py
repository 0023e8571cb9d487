"""The conditional proposals of a DFlash2 draft, and that text stays the target's with them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from bough.config import SpecConfig
from bough.engine.engine import Engine, Request
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from bough.models.dflash import CandidateSelector, DFlashDraft
from bough.spec.calibration import Calibration
from bough.spec.costs import StepCosts
from bough.spec.dflash import DFlashModel
from bough.spec.speculator import Speculator
from bough.spec.tree import Proposal
from bough.state.draft_ring import draft_buffers
from tests.engine.driving import run as drive_to_end
from tests.engine.test_lossless import SAMPLINGS
from tests.models.plain_dflash import PlainDraft
from tests.models.test_dflash2 import PUBLISHED
from tests.tiny_draft import arrays, draft_config, gguf_metadata, random_rows, save_draft, save_gguf

ANCHOR, DEPTH, CANDIDATES = 7, 7, 6
CHAIN = [11, 12, 13, 14, -1, -1, -1]
PROMPT = [72, 101, 108, 108, 111, 32, 119, 111] * 6


class Pair:
    """A tiny target and a DFlash2 draft of it."""

    def __init__(self, path: Path, folder: Path, *, form: str = "safetensors"):
        with GGUFFile.open(path) as file:
            self.target = Decoder.load(file)
            self._head, self._embedding = (
                file.raw(name).view(np.float32).copy() for name in ("output.weight", "token_embd.weight")
            )
        self.config = draft_config(self.target.spec, **PUBLISHED)
        tensors = save_draft(folder, self.config)
        self._tensors, saved = arrays(tensors), folder
        if form == "gguf":
            saved = save_gguf(folder / "draft.gguf", gguf_metadata(self.config), tensors)
        self._draft = DFlashDraft.load(saved, self.target.spec)

    def model(self) -> DFlashModel:
        model = DFlashModel(self._draft, self.target, draft_buffers(self._draft.spec, max_ctx=1024))
        model.begin(0)
        return model

    def propose(self, count: int) -> Proposal:
        def rank(
            logits: Tensor, positions: Tensor, anchors: Tensor, slots: Tensor, count: int
        ) -> tuple[Tensor, Tensor]:
            best = logits.log_softmax(-1).topk(count, -1)
            return best.indices, best.values

        model = self.model()
        model.append(0, self._features())
        model.flush(0)
        slot, chains = torch.tensor([0]), torch.tensor(CHAIN)[None]
        return model.candidates(torch.tensor([ANCHOR]), slot, rank, count, chains).one(0)

    def plain_scores(self) -> tuple[np.ndarray, Callable[[int, int, int], float]]:
        """Log probabilities [K, V], and what the selector adds: of a depth, a token and one before it."""
        plain = PlainDraft(self.config, self._tensors)
        plain.append(self._features().numpy())
        mask = self.config["dflash_config"]["mask_token_id"]
        hidden = plain.block(self._embedding[[ANCHOR] + [mask] * DEPTH])[1:]
        logits = plain.logits(hidden, self._head)
        scores = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        return scores - logits.max(1, keepdims=True), lambda depth, before, token: plain.pair_score(
            hidden[depth], before, token
        )

    def error(self, proposal: Proposal) -> float:
        """The largest error of the edges, relative to the largest of them."""
        scores, pair = self.plain_scores()
        assert proposal.edges is not None
        worst, largest = 0.0, float(proposal.edges.abs().max())
        for depth, ids in enumerate(proposal.ids.tolist()):
            before = [ANCHOR] * (CANDIDATES + 1)
            if depth:
                before = [*proposal.ids[depth - 1].tolist(), max(CHAIN[depth - 1], 0)]
            for row, token in enumerate(before):
                wanted = np.array([scores[depth, id] + pair(depth, token, id) for id in ids])
                wanted -= wanted.max() + np.log(np.exp(wanted - wanted.max()).sum())
                worst = max(worst, np.abs(proposal.edges[depth, row].numpy() - wanted).max())
        return worst / largest

    def _features(self) -> Tensor:
        return random_rows(30, 3 * self.target.spec.width, seed=3)

    def drafter(self, **settings) -> Speculator:
        config = SpecConfig(**{"adaptive": False, "lookup": False, **settings})
        return Speculator(self.model(), config, StepCosts())


@pytest.fixture(scope="module")
def pair(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tiny_model("qwen35", layers=8), tmp_path_factory.mktemp("second"))


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_edges_equal_the_plain_selectors(tiny_model: Callable[..., Path], tmp_path: Path, form: str) -> None:
    pair = Pair(tiny_model("qwen35", layers=8), tmp_path, form=form)
    proposal = pair.propose(24)
    assert proposal.ids.shape == (DEPTH, CANDIDATES) and proposal.edges.shape == (DEPTH, CANDIDATES + 1, 6)
    assert pair.error(proposal) <= 1e-5
    assert bool((proposal.edges <= 0).all())
    # They differ from parent to parent: the selector says something.
    assert float((proposal.edges[1, 0] - proposal.edges[1, 1]).abs().max()) > 0.1


SELECT = CandidateSelector.__call__
BUGS: dict[str, Callable[[CandidateSelector, Tensor, Tensor, Tensor], Tensor]] = {
    "the hidden state of the row before": lambda s, hidden, before, ids: SELECT(
        s, hidden.roll(1, 0), before, ids
    ),
    "parents of another depth": lambda s, hidden, before, ids: SELECT(s, hidden, before.roll(1, 0), ids),
    "parents in another order": lambda s, hidden, before, ids: SELECT(s, hidden, before.flip(1), ids),
    "no selector": lambda s, hidden, before, ids: SELECT(s, 0 * hidden, before, ids),
    "tokens in place of those before": lambda s, hidden, before, ids: SELECT(
        s, hidden, ids, before
    ).transpose(1, 2),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(pair: Pair, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CandidateSelector, "__call__", BUGS[bug])
    assert pair.error(pair.propose(24)) > 1e-3


def test_a_chain_is_the_selectors_walk(pair: Pair) -> None:
    scores, add = pair.plain_scores()
    before, walked = ANCHOR, []
    for depth in range(DEPTH):
        best = np.argsort(-scores[depth])[:CANDIDATES].tolist()
        before = max(best, key=lambda id: scores[depth, id] + add(depth, before, id))
        walked.append(before)
    chain = pair.propose(1)
    assert chain.ids[:, 0].tolist() == walked == chain.chains[0].tolist()
    assert chain.given.tolist()[3] == [*walked[:3], -1, -1, -1, -1]
    assert chain.scores[:, 0].tolist() == chain.chain_scores[0].tolist()


def test_learning_follows_the_parents() -> None:
    ids = torch.tensor([[4, 5], [6, 7]])
    edges = torch.log(torch.tensor([[[0.5, 0.5]] * 3, [[0.9, 0.1], [0.2, 0.8], [0.5, 0.5]]]))
    proposal = replace(Proposal.of(ids, edges[:, 0]), edges=edges)
    corrections = []
    for followed in ([4, 6], [5, 6], [9, 6]):
        calibration = Calibration()
        for _ in range(60):
            calibration.observe(proposal, followed)
        corrections.append(calibration.correction().applied(edges[:, 0])[1].tolist())
    untouched = Calibration().correction().applied(edges[:, 0])[1].tolist()
    # After 4 the score 0.9 holds; after 5 the text has the token that was given 0.2; 9 was no candidate.
    assert corrections[0][0] > untouched[0]
    assert corrections[1][0] < corrections[0][0]
    assert corrections[2] == untouched


@pytest.mark.parametrize("sampling", ["greedy", "T 0.7, filters", "T 1.0, everything"])
def test_same_text(pair: Pair, sampling: str) -> None:
    request = Request(prompt=PROMPT, max_tokens=128, sampling=SAMPLINGS[sampling])

    def text(drafter: Speculator | None, runner: Literal["eager", "graph"] = "eager") -> list[int]:
        engine = Engine(pair.target, max_ctx=1024, drafter=drafter, max_rows=64, runner=runner)
        return drive_to_end(engine, request)[0]

    plain = text(None)
    assert text(pair.drafter(budget=22), "graph") == plain
    for settings in ({"budget": 63}, {"budget": 22, "lookup": True}, {"budget": 7, "chain": True}):
        assert text(pair.drafter(**settings)) == plain, settings
