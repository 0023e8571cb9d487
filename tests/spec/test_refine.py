"""Drafts that refine rows by the token before them, in both file formats, against a plain implementation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bough.config import SpecConfig
from bough.engine.engine import Engine, Request
from bough.engine.sampler import Sampler, SamplingParams
from bough.errors import UnsupportedModel
from bough.gguf.reader import GGUFFile
from bough.kernels.native import Library
from bough.kernels.sampling import SamplingState, gumbel
from bough.kernels.sampling.reference import SHARPNESS
from bough.models.decoder import Decoder
from bough.models.dflash import DFlashDraft
from bough.models.draft_spec import RefineSpec
from bough.models.native import NativeDecoder, NativeLoader
from bough.models.refine import AdjacentInjection, CandidateMLP, Refiner
from bough.models.weights import WeightLoader
from bough.spec.costs import StepCosts
from bough.spec.dflash import DFlashModel
from bough.spec.speculator import Speculator
from bough.spec.tree import Proposal
from bough.state.draft_ring import draft_buffers
from tests.engine.driving import run as drive_to_end
from tests.models.plain_refine import PlainRefined
from tests.tiny_draft import arrays, draft_config, gguf_metadata, random_rows, save_draft, save_gguf

BLOCK, CANDIDATES, CONTEXT = 6, 16, 30
ANCHORS, CHAIN = [7, 200, 31], [11, 12, 13, 14, -1]
KINDS: dict[str, dict[str, Any]] = {
    "mlp": {"ar_approximation": "swiglu"},
    "dspine": {"transfer_rank": 24, "message_size": 20},
}
PROMPT = [72, 101, 108, 108, 111, 32, 119, 111] * 6


class LogRank:
    """Raw log probabilities, as of greedy requests."""

    def __call__(
        self, logits: Tensor, positions: Tensor, anchors: Tensor, slots: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        assert positions[:, 0].tolist() == [CONTEXT + slot + 1 for slot in slots.tolist()]
        best = logits.log_softmax(-1).topk(count, -1)
        return best.indices, best.values

    def perturb(self, change: Tensor, slots: Tensor) -> Tensor:
        return change


class Pair:
    def __init__(self, path: Path, folder: Path, kind: str, *, form: str = "safetensors", **changes: Any):
        with GGUFFile.open(path) as file:
            self.target = Decoder.load(file)
            self._head, self._embedding = (
                file.raw(name).view(np.float32).astype(np.float64)
                for name in ("output.weight", "token_embd.weight")
            )
        method = {**KINDS[kind], "block_size": BLOCK, **changes.pop("method", {})}
        self.config = draft_config(self.target.spec, nested=True, method=method, **changes)
        tensors = save_draft(folder, self.config)
        self.tensors, path = arrays(tensors), folder
        if form == "gguf":
            path = save_gguf(folder / "draft.gguf", gguf_metadata(self.config), tensors)
        self.draft = DFlashDraft.load(path, self.target.spec)

    def model(self, slots: int = 1) -> DFlashModel:
        buffers = draft_buffers(self.draft.spec, max_ctx=1024, slots=slots)
        model = DFlashModel(self.draft, self.target, buffers)
        for slot in range(slots):
            model.begin(slot)
        return model

    def features(self, slot: int) -> Tensor:
        return random_rows(CONTEXT + slot, 3 * self.target.spec.width, seed=3 + slot)

    def propose(self, rank: Any = None) -> Proposal:
        """Of three slots with texts of different lengths."""
        model, slots = self.model(len(ANCHORS)), torch.arange(len(ANCHORS))
        for slot in slots.tolist():
            model.append(slot, self.features(slot))
            model.flush(slot)
        chains = torch.tensor(CHAIN).expand(len(ANCHORS), -1)
        return model.candidates(torch.tensor(ANCHORS), slots, rank or LogRank(), 24, chains)

    def scores(self, slot: int) -> tuple[np.ndarray, Callable[[int, int], np.ndarray]]:
        """Marginal log probabilities [K, V], and the refined logits of a depth after a token."""
        plain = PlainRefined(self.config, self.tensors, causal="dspine_config" in self.config or None)
        plain.append(self.features(slot).numpy())
        mask = self.config["dflash_config"]["mask_token_id"]
        rows = self._embedding[[ANCHORS[slot]] + [mask] * (BLOCK - 1)]
        refinable, hidden = plain.rows(rows, ANCHORS[slot])
        logits = plain.logits(hidden[1:], self._head)

        def after(depth: int, token: int) -> np.ndarray:
            row = plain.refined(refinable[depth + 1], token, self._embedding[token])
            return plain.logits(row[None], self._head)[0]

        return logits, after

    def error(self, proposals: Proposal) -> float:
        """The largest error of the edges, relative to the largest of them."""
        worst = 0.0
        for slot, anchor in enumerate(ANCHORS):
            proposal, (logits, after) = proposals.one(slot), self.scores(slot)
            assert proposal.edges is not None
            for depth, ids in enumerate(proposal.ids.tolist()):
                best = np.argsort(-logits[depth])[: len(ids)].tolist()
                assert set(ids) == set(best), "other candidates"
                before = [anchor] * (len(ids) + 1)
                if depth:
                    before = [*proposal.ids[depth - 1].tolist(), max(CHAIN[depth - 1], 0)]
                for row, token in enumerate(before):
                    wanted = after(depth, token)[ids]
                    wanted -= wanted.max() + np.log(np.exp(wanted - wanted.max()).sum())
                    worst = max(worst, np.abs(proposal.edges[depth, row].numpy() - wanted).max())
        assert proposals.edges is not None
        return worst / float(proposals.edges.abs().max())


@pytest.fixture(scope="module")
def pairs(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    path = tiny_model("qwen35", layers=8)
    return {kind: Pair(path, tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
@pytest.mark.parametrize("kind", KINDS)
def test_edges_equal_the_plain_heads(
    tiny_model: Callable[..., Path], tmp_path: Path, kind: str, form: str
) -> None:
    scaled = {"method": {"output_multiplier": 0.7, "final_logit_softcapping": 9.0}}
    changes: dict[str, Any] = scaled if form == "safetensors" else {}
    pair = Pair(tiny_model("qwen35", layers=8), tmp_path, kind, form=form, **changes)
    rank, inner = (24, 20) if kind == "dspine" else (None, 96)
    assert pair.draft.spec.refine == RefineSpec(inner, rank, CANDIDATES)
    assert pair.draft.spec.causal == (kind == "dspine",) * 3
    proposal = pair.propose()
    assert proposal.edges is not None
    assert proposal.edges.shape == (len(ANCHORS), BLOCK - 1, CANDIDATES + 1, CANDIDATES)
    assert pair.error(proposal) <= 1e-5


REFINE, BETWEEN = Refiner.__call__, AdjacentInjection.between_rows
CODE, FEATURE, WRITTEN = AdjacentInjection._code, AdjacentInjection._feature, AdjacentInjection._written
MLP = CandidateMLP.__call__


def _after_injection(injection: AdjacentInjection, rows: Tensor, layer: int, anchors: Tensor) -> Tensor:
    """Predecessors are read one row after the other, each with its message."""
    rows = rows.clone()
    for t in range(1, rows.shape[1]):
        before = (
            injection._code(anchors)[:, None] if t == 1 else injection._feature(rows[:, t - 1 : t], layer)
        )
        here = rows[:, t : t + 1]
        rows[:, t : t + 1] = injection._written(here, injection._feature(here, layer), before, layer)
    return rows


BOTH_BUGS: dict[str, tuple[type, str, Any]] = {
    "parents of another depth": (
        Refiner,
        "__call__",
        lambda h, x, y, before, ids, target: REFINE(h, x, y, before.roll(1, 0), ids, target),
    ),
    "parents in another order": (
        Refiner,
        "__call__",
        lambda h, x, y, before, ids, target: REFINE(h, x, y, before.flip(1), ids, target),
    ),
    "rows after the final norm": (
        Refiner,
        "__call__",
        lambda h, x, y, before, ids, target: REFINE(h, y, y, before, ids, target),
    ),
    "slot offset by one": (
        Refiner,
        "__call__",
        lambda h, x, y, before, ids, target: REFINE(h, x.roll(1, 0), y.roll(1, 0), before, ids, target),
    ),
}
BUGS = {
    "mlp": {
        **BOTH_BUGS,
        "the row before its norm": (
            CandidateMLP,
            "__call__",
            lambda h, x, y, before, target: MLP(h, x, x, before, target),
        ),
        "embeddings of another token": (
            CandidateMLP,
            "__call__",
            lambda h, x, y, before, target: MLP(h, x, y, before + 1, target),
        ),
    },
    "dspine": {
        **BOTH_BUGS,
        "features after the injection": (AdjacentInjection, "between_rows", _after_injection),
        "no messages between rows": (AdjacentInjection, "between_rows", lambda h, x, layer, anchors: x),
        "another anchor": (
            AdjacentInjection,
            "between_rows",
            lambda h, x, layer, anchors: BETWEEN(h, x, layer, anchors + 1),
        ),
        "codes without sqrt(r)": (AdjacentInjection, "_code", lambda h, ids: CODE(h, ids) / h._scale),
        "features without sqrt(r)": (
            AdjacentInjection,
            "_feature",
            lambda h, rows, layer: FEATURE(h, rows, layer) / h._scale,
        ),
        "readout of another layer": (
            AdjacentInjection,
            "_feature",
            lambda h, rows, layer: FEATURE(h, rows, max(layer - 1, 0)),
        ),
        "receiver and predecessor swapped": (
            AdjacentInjection,
            "_written",
            lambda h, rows, receiver, predecessor, layer: WRITTEN(
                h, rows, predecessor, receiver.expand_as(predecessor), layer
            ),
        ),
    },
}


@pytest.mark.parametrize(("kind", "bug"), [(kind, bug) for kind in BUGS for bug in BUGS[kind]])
def test_planted_bugs_are_caught(
    pairs: dict[str, Pair], kind: str, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*BUGS[kind][bug])
    try:
        assert pairs[kind].error(pairs[kind].propose()) > 1e-3
    except AssertionError as error:
        assert "other candidates" in str(error)


def test_a_marginal_that_is_added_is_caught(pairs: dict[str, Pair]) -> None:
    class Added(LogRank):
        def perturb(self, change: Tensor, slots: Tensor) -> Tensor:
            return change + 1.0 * torch.randn(change.shape[-1])

    class Doubled(LogRank):
        """The refined score beside the marginal, not in its place."""

        def __call__(
            self, logits: Tensor, positions: Tensor, anchors: Tensor, slots: Tensor, count: int
        ) -> tuple[Tensor, Tensor]:
            ids, scores = super().__call__(logits, positions, anchors, slots, count)
            return ids, 2 * scores

    for rank in (Added(), Doubled()):
        for pair in pairs.values():
            assert pair.error(pair.propose(rank)) > 1e-3


def test_a_bidirectional_block_is_caught(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    pair = Pair(tiny_model("qwen35", layers=8), tmp_path, "dspine")
    pair.draft = DFlashDraft.load(tmp_path, pair.target.spec, causal=False)
    assert pair.draft.spec.causal == (False,) * 3
    try:
        assert pair.error(pair.propose()) > 1e-3
    except AssertionError as error:
        assert "other candidates" in str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_comes_after_the_scores(pairs: dict[str, Pair], kind: str) -> None:
    """Refined scores are divided by the temperature and get the noise that verification will add."""
    sampler = Sampler(len(ANCHORS), 64, 320, torch.device("cpu"))
    for slot in range(len(ANCHORS)):
        sampler.begin(slot, SamplingParams(0.7, seed=5 + slot), [], masked=False)
    proposals = pairs[kind].propose(sampler.rank)
    for slot in range(len(ANCHORS)):
        proposal, (_, after) = proposals.one(slot), pairs[kind].scores(slot)
        assert proposal.edges is not None
        for depth in (0, 2):
            ids, token = proposal.ids[depth], ANCHORS[slot] if depth == 0 else int(proposal.ids[depth - 1, 1])
            noise = gumbel(5 + slot, ids, torch.tensor(CONTEXT + slot + 1 + depth))
            wanted = SHARPNESS * (torch.from_numpy(after(depth, token))[ids] / 0.7 + noise)
            found = proposal.edges[depth, 1]
            assert torch.allclose(found.double(), wanted.log_softmax(-1), atol=1e-4)


def test_temperatures_of_a_change() -> None:
    state = SamplingState.empty(4, 40, "cpu", slots=3)
    state.begin(1, temperature=0.5)
    state.begin(2, temperature=1e-35)
    change = state.perturb(torch.full((3, 2), 4.0), torch.tensor([0, 1, 2]))
    assert change[:2].tolist() == [[4.0, 4.0], [4.0 / 0.5 * SHARPNESS] * 2] and change[2].isfinite().all()


def test_rows_of_the_head(tiny_model: Callable[..., Path]) -> None:
    """Equal wherever they come from: the head as floats or packed, a table beside tiles, a tied embedding."""
    ids = torch.tensor([[3, 319], [0, 77]])
    for options in ({}, {"tied": True}):
        with GGUFFile.open(tiny_model("qwen3", layers=4, **options)) as file:
            expanded, packed = Decoder.load(file), Decoder.load(file, expand=False)
            wanted = expanded.logits(torch.eye(expanded.spec.width)).T[ids]
            assert torch.allclose(expanded.head_rows(ids), wanted, atol=1e-6)
            assert torch.allclose(packed.head_rows(ids), wanted, atol=1e-6)
            tiled = Decoder(
                packed.spec, WeightLoader(file, device=torch.device("cpu"), tiles=True), packed.device
            )
            tiled.keep_head_rows(WeightLoader(file, device=torch.device("cpu")))
            assert torch.allclose(tiled.head_rows(ids), wanted, atol=1e-6)
            native = NativeDecoder(packed.spec, NativeLoader(file, Library(1)))
            assert torch.allclose(native.head_rows(ids), wanted, atol=1e-2)


def test_a_head_that_goes_wrong_costs_nothing_but_time(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise, infinities and NaN in the scores: the text is that of plain decoding."""
    pair, request = pairs["mlp"], Request(PROMPT, 9)
    plain = drive_to_end(Engine(pair.target, max_ctx=256, max_rows=64), request)[0]
    for value in (torch.nan, torch.inf, -torch.inf, 0.0, None):

        def broken(head: Refiner, *parts: Any, value: float | None = value) -> Tensor:
            scores = REFINE(head, *parts)
            return 9 * torch.randn_like(scores) if value is None else torch.full_like(scores, value)

        monkeypatch.setattr(Refiner, "__call__", broken)
        for settings in ({"budget": 22}, {"budget": 5, "chain": True}):
            config = SpecConfig(adaptive=False, lookup=False, **settings)
            drafter = Speculator(pair.model(), config, StepCosts())
            engine = Engine(pair.target, max_ctx=256, drafter=drafter, max_rows=64)
            assert drive_to_end(engine, request)[0] == plain, (value, settings)


def test_other_heads_beside_it_are_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with GGUFFile.open(tiny_model("qwen35", layers=8)) as file:
        spec = Decoder.load(file).spec
    for method, message in (
        ({"draft_vocab_size": 90}, "a vocabulary of its own, needed neither"),
        ({"sample_from_anchor": True}, "sample_from_anchor, needed neither"),
        ({"markov_rank": 8}, "is not part of a DFlash draft"),
    ):
        save_draft(tmp_path, draft_config(spec, method={**KINDS["mlp"], **method}))
        with pytest.raises(UnsupportedModel, match=message):
            DFlashDraft.load(tmp_path, spec)
