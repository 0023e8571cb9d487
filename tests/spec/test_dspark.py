"""The proposals of a DSpark draft, in both file formats, and that text stays the target's with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bough.config import SpecConfig
from bough.engine.engine import Engine, Request
from bough.errors import ModelFileError, UnsupportedModel
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from bough.models.dflash import DFlashDraft, MarkovHead
from bough.models.draft_spec import DraftSpec
from bough.models.weights import WeightLoader
from bough.spec.costs import StepCosts
from bough.spec.dflash import DFlashModel
from bough.spec.speculator import Speculator
from bough.spec.tree import Proposal
from bough.state.draft_ring import draft_buffers
from tests.engine.driving import run as drive_to_end
from tests.engine.test_lossless import SAMPLINGS
from tests.models.plain_dflash import PlainDraft
from tests.tiny_draft import arrays, draft_config, gguf_metadata, random_rows, save_draft, save_gguf

ANCHOR, BLOCK = 7, 6
CHAIN = [11, 12, 13, 14, -1, -1]
PROMPT = [72, 101, 108, 108, 111, 32, 119, 111] * 6
MARKOV = {"markov_rank": 24, "block_size": BLOCK}


class Pair:
    def __init__(self, path: Path, folder: Path, *, form: str = "safetensors", **changes: Any):
        with GGUFFile.open(path) as file:
            self.target = Decoder.load(file)
            self._head, self._embedding = (
                file.raw(name).view(np.float32).copy() for name in ("output.weight", "token_embd.weight")
            )
        method = {**MARKOV, **changes.pop("method", {})}
        self.config = draft_config(self.target.spec, nested=True, method=method, **changes)
        self.config["architectures"] = ["Qwen3DSparkModel"]
        tensors = save_draft(folder, self.config)
        self._tensors, path = arrays(tensors), folder
        if form == "gguf":
            path = save_gguf(folder / "draft.gguf", gguf_metadata(self.config), tensors)
        self.draft = DFlashDraft.load(path, self.target.spec)

    @property
    def depth(self) -> int:
        return self.draft.spec.depth

    def model(self) -> DFlashModel:
        model = DFlashModel(self.draft, self.target, draft_buffers(self.draft.spec, max_ctx=1024))
        model.begin(0)
        return model

    def propose(self, count: int = 24) -> Proposal:
        def rank(
            logits: Tensor, positions: Tensor, anchors: Tensor, slots: Tensor, count: int
        ) -> tuple[Tensor, Tensor]:
            assert positions[0].tolist() == list(range(31, 31 + self.depth))
            best = logits.log_softmax(-1).topk(count, -1)
            return best.indices, best.values

        model = self.model()
        model.append(0, random_rows(30, 3 * self.target.spec.width, seed=3))
        model.flush(0)
        chain = torch.tensor(CHAIN[: self.depth])
        slot, chains = torch.tensor([0]), chain[None]
        return model.candidates(torch.tensor([ANCHOR]), slot, rank, count, chains).one(0)

    def error(self, proposal: Proposal) -> float:
        """The largest error of the edges, relative to the largest of them."""
        plain = PlainDraft(self.config, self._tensors)
        plain.append(random_rows(30, 3 * self.target.spec.width, seed=3).numpy())
        mask = self.config["dflash_config"]["mask_token_id"]
        hidden = plain.block(self._embedding[[ANCHOR] + [mask] * (BLOCK - 1)])[-self.depth :]
        own = plain.own_ids() is not None
        logits = plain.own_logits(hidden) if own else plain.logits(hidden, self._head)
        assert proposal.edges is not None
        worst, largest = 0.0, float(proposal.edges.abs().max())
        for depth, ids in enumerate(proposal.ids.tolist()):
            best = np.argsort(-logits[depth])[: len(ids)].tolist()
            assert set(ids) == set(best), "other candidates"
            before = [ANCHOR] * (len(ids) + 1)
            if depth:
                before = [*proposal.ids[depth - 1].tolist(), max(CHAIN[depth - 1], 0)]
            for row, token in enumerate(before):
                wanted = logits[depth, ids] + [plain.pair_score(hidden[depth], token, id) for id in ids]
                wanted -= wanted.max() + np.log(np.exp(wanted - wanted.max()).sum())
                wanted += np.log(plain.confidence(hidden[depth], token))
                worst = max(worst, np.abs(proposal.edges[depth, row].numpy() - wanted).max())
        return worst / largest

    def drafter(self, **settings) -> Speculator:
        config = SpecConfig(**{"adaptive": False, "lookup": False, **settings})
        return Speculator(self.model(), config, StepCosts())


@pytest.fixture(scope="module")
def pair(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tiny_model("qwen35", layers=8), tmp_path_factory.mktemp("dspark"))


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
@pytest.mark.parametrize("from_anchor", [None, True, False])
def test_edges_equal_the_plain_heads(
    tiny_model: Callable[..., Path], tmp_path: Path, form: str, from_anchor: bool | None
) -> None:
    method = {} if from_anchor is None else {"sample_from_anchor": from_anchor}
    pair = Pair(tiny_model("qwen35", layers=8), tmp_path, form=form, method=method)
    # Slots are shifted by one unless the file says otherwise.
    assert pair.depth == (BLOCK - 1 if from_anchor is False else BLOCK)
    proposal = pair.propose()
    assert proposal.ids.shape == (pair.depth, 24) and proposal.edges.shape == (pair.depth, 25, 24)
    assert pair.error(proposal) <= 1e-5


SCORE, CONFIDENCE = MarkovHead.__call__, MarkovHead.confidence
BUGS = {
    "parents of another depth": ("__call__", lambda h, y, before, ids: SCORE(h, y, before.roll(1, 0), ids)),
    "parents in another order": ("__call__", lambda h, y, before, ids: SCORE(h, y, before.flip(1), ids)),
    "no head": ("__call__", lambda h, y, before, ids: 0 * SCORE(h, y, before, ids)),
    "tables swapped": (
        "__call__",
        lambda h, y, before, ids: SCORE(h, y, ids, before).transpose(1, 2),
    ),
    "confidence of another row": ("confidence", lambda h, y, before: CONFIDENCE(h, y.roll(1, 0), before)),
    "no confidence": ("confidence", lambda h, y, before: None),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(pair: Pair, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MarkovHead, *BUGS[bug])
    assert pair.error(pair.propose()) > 1e-3


def test_slots_that_are_not_shifted_are_caught(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    block = DFlashDraft.block
    monkeypatch.setattr(DFlashDraft, "block", lambda draft, *rows: block(draft, *rows).roll(1, 1))
    with pytest.raises(AssertionError, match="other candidates"):
        pair.error(pair.propose())


@pytest.mark.parametrize("sampling", ["greedy", "T 1.0, everything"])
def test_same_text(pair: Pair, sampling: str) -> None:
    request = Request(prompt=PROMPT, max_tokens=96, sampling=SAMPLINGS[sampling])

    def text(drafter: Speculator | None, **options) -> list[int]:
        engine = Engine(pair.target, max_ctx=1024, drafter=drafter, max_rows=64, **options)
        return drive_to_end(engine, request)[0]

    plain = text(None)
    assert text(pair.drafter(budget=22), runner="graph") == plain
    for settings in ({"budget": 63, "lookup": True}, {"budget": 6, "chain": True}):
        assert text(pair.drafter(**settings)) == plain, settings


def test_configs_of_the_speculators_library(pair: Pair) -> None:
    backbone = {**pair.config, "dflash_config": None, "architectures": None}
    method = {"block_size": BLOCK, "mask_token_id": 3, "aux_hidden_state_layer_ids": [2, 4, 6]}
    config = {"architectures": ["DSparkSpeculator"], "transformer_layer_config": backbone, **method}
    spec = DraftSpec.from_config(config, source="draft", target_depth=8)
    assert spec.taps == (1, 3, 5) and spec.block_size == BLOCK
    assert spec.width == pair.target.spec.width and spec.rope_theta == pair.draft.spec.rope_theta


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_a_vocabulary_of_its_own(tiny_model: Callable[..., Path], tmp_path: Path, form: str) -> None:
    pair = Pair(tiny_model("qwen35", layers=8), tmp_path, form=form, method={"draft_vocab_size": 90})
    proposal = pair.propose()
    known = set(PlainDraft(pair.config, pair._tensors).own_ids() or [])
    assert len(known) == 90 and set(proposal.ids.flatten().tolist()) <= known
    assert pair.error(proposal) <= 1e-5
    for name in ("greedy", "T 1.0, everything"):
        request = Request(PROMPT, 40, SAMPLINGS[name])
        plain, _ = drive_to_end(Engine(pair.target, max_ctx=256, max_rows=64), request)
        engine = Engine(pair.target, max_ctx=256, drafter=pair.drafter(budget=22), max_rows=64)
        assert drive_to_end(engine, request)[0] == plain


OWN_BUGS = {
    "distances read as ids": lambda ids: ids - torch.arange(len(ids)),
    "ids read as distances": lambda ids: (ids + torch.arange(len(ids))).clamp(max=319),
    "rows shifted by one": lambda ids: ids.roll(1),
}


@pytest.mark.parametrize("bug", OWN_BUGS)
def test_wrong_tables_are_noticed(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    read = WeightLoader.token_ids

    def wrong(loader: WeightLoader, name: str, count: int, *, below: int) -> Tensor:
        return OWN_BUGS[bug](read(loader, name, count, below=below))

    monkeypatch.setattr(WeightLoader, "token_ids", wrong)
    pair = Pair(tiny_model("qwen35", layers=8), tmp_path, method={"draft_vocab_size": 90})
    try:
        assert pair.error(pair.propose()) > 1e-2
    except (AssertionError, ValueError) as error:
        assert "other candidates" in str(error) or "not in list" in str(error)


def test_tables_that_are_damaged_are_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    pair = Pair(tiny_model("qwen35", layers=8), tmp_path, method={"draft_vocab_size": 90})
    tensors = load_file(tmp_path / "model.safetensors")
    for changed, message in (
        ({"d2t": tensors["d2t"] + 300}, "token ids from 300 to"),
        ({"d2t": tensors["d2t"] - torch.arange(90) // 2 * 2}, "holds .* token ids"),
        ({"d2t": tensors["d2t"][:80]}, r"d2t has shape \[80\], needed \[90\]"),
        ({"d2t": tensors["d2t"].float()}, "is of type F32, needed I64"),
        ({"lm_head.weight": tensors["lm_head.weight"][:80]}, r"lm_head.weight has shape"),
    ):
        save_file({**tensors, **changed}, tmp_path / "model.safetensors")
        with pytest.raises((ModelFileError, UnsupportedModel), match=message):
            DFlashDraft.load(tmp_path, pair.target.spec)


def test_reduced_vocabularies_and_plain_drafts_are_refused(
    pair: Pair, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    target = pair.target.spec
    config = draft_config(target, method={**MARKOV, "draft_vocab_size": 100})
    tensors = save_draft(tmp_path / "small", config)
    save_file({n: t for n, t in tensors.items() if n != "d2t"}, tmp_path / "small" / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="vocab_size is 100, needed the rows of the target's"):
        DFlashDraft.load(tmp_path / "small", target)
    save_draft(tmp_path / "plain", draft_config(target, method={"sample_from_anchor": True}))
    with pytest.raises(UnsupportedModel, match="needed False for a draft without a Markov head"):
        DFlashDraft.load(tmp_path / "plain", target)
