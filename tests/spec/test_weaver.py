"""Weaver's head in both generations and both forms of file, against a plain implementation in float64."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bough.config import DraftConfig, EngineConfig
from bough.errors import ModelFileError, ModelNotFound, UnsupportedModel, UsageError
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.models import weaver
from bough.models.decoder import Decoder
from bough.models.dflash import DFlashDraft
from bough.models.newest import NewestHidden
from bough.models.weaver import BiasedNorm, WeaverHead
from bough.models.weaver_spec import WeaverFile
from bough.session.loading import load_session
from bough.spec.dflash import DFlashModel
from bough.spec.tree import Proposal
from bough.spec.weaver import CANDIDATES, WeaverModel
from bough.state.draft_ring import draft_buffers
from tests.models.plain_weaver import PlainWeaver
from tests.tiny_draft import arrays, draft_config, random_rows, save_draft
from tests.tiny_weaver import save_weaver, weaver_config

BLOCK, CONTEXT = 6, 30
ANCHORS = [7, 200, 31]


class LogRank:
    """Raw log probabilities, as of greedy requests."""

    def __call__(
        self, logits: Tensor, positions: Tensor, anchors: Tensor, slots: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        best = logits.log_softmax(-1).topk(count, -1)
        return best.indices, best.values

    def perturb(self, change: Tensor, slots: Tensor) -> Tensor:
        return change


class Case:
    """A tiny target, its draft and a head, after texts of different lengths."""

    def __init__(self, path: Path, folder: Path, *, learned: bool, form: str = "pth"):
        with GGUFFile.open(path) as file:
            self.target = Decoder.load(file)
            self._embedding, self._rows = (
                file.raw(name).view(np.float32).astype(np.float64)
                for name in ("token_embd.weight", "output.weight")
            )
            self.norm = torch.from_numpy(file.raw("output_norm.weight").copy()).view(torch.float32)
        self.spec = self.target.spec
        save_draft(folder, draft_config(self.spec, method={"block_size": BLOCK}))
        self._draft = DFlashDraft.load(folder, self.spec)
        config = weaver_config(self.spec.width, depth=BLOCK - 1, rope_base=5e3)
        head, tensors = save_weaver(folder / "head", config, learned=learned, form=form)
        self.head = WeaverHead.load(head)
        self.plain = PlainWeaver(config, arrays(tensors))

    def model(self) -> WeaverModel:
        slots = len(ANCHORS)
        draft = DFlashModel(
            self._draft, self.target, draft_buffers(self._draft.spec, max_ctx=256, slots=slots)
        )
        newest = NewestHidden.empty(slots, self.spec.width, "cpu")
        model = WeaverModel(self.head, draft, self.target, newest, final_norm=self.norm)
        for slot in range(slots):
            model.begin(slot)
            model.append(slot, self.features(slot))
            model.flush(slot)
        return model

    def features(self, slot: int) -> Tensor:
        """Of the draft's three layers, and of the target's last one."""
        return random_rows(CONTEXT + slot, 4 * self.spec.width, seed=3 + slot)

    def propose(self, model: WeaverModel | None = None) -> Proposal:
        slots = torch.arange(len(ANCHORS))
        return (model or self.model()).candidates(torch.tensor(ANCHORS), slots, LogRank(), 24)

    def error(self, proposals: Proposal) -> float:
        """The largest error of a path's scores, relative to the largest of them."""
        worst, largest, paths = 0.0, 0.0, 0
        for slot, anchor in enumerate(ANCHORS):
            after = self._scores(slot, anchor)
            proposal = proposals.one(slot)
            rows = [[(anchor,), proposal.ids[0].tolist(), proposal.scores[0].tolist()]]
            for chain, gains in zip(proposal.chains.tolist(), proposal.chain_scores.tolist(), strict=True):
                tokens = [token for token in chain if token >= 0]
                paths += bool(tokens)
                for depth in range(len(tokens)):
                    rows.append([(anchor, *tokens[:depth]), [tokens[depth]], [gains[depth]]])
            for path, ids, scores in rows:
                expected = after(path)
                for token, score in zip(ids, scores, strict=True):
                    assert token in expected, "other candidates"
                    worst = max(worst, abs(score - expected[token]))
                    largest = max(largest, abs(expected[token]))
        assert paths > 2 * len(ANCHORS)
        return worst / largest

    def _scores(self, slot: int, anchor: int) -> Callable[[tuple[int, ...]], dict[int, float]]:
        """What follows a path, the anchor first: the candidates' log probabilities."""
        # The draft's rows by the engine, whose own tests compare them.
        model = CASE_MODEL(self)
        block = model._draft.block(torch.tensor([anchor]), torch.tensor([slot]))
        rows, logits = block.hidden[0].double().numpy(), block.logits[0].double().numpy()
        residual = self.features(slot)[-1, 3 * self.spec.width :].double().numpy()
        last = residual / np.sqrt((residual**2).mean() + self.spec.eps) * self.norm.double().numpy()

        def after(path: tuple[int, ...]) -> dict[int, float]:
            marginals = logits[len(path) - 1]
            ids = np.argsort(-marginals)[:CANDIDATES]
            query = self.plain.added(last, rows, self._embedding[list(path)])
            scores = marginals[ids] + self._rows[ids] @ query
            scores -= scores.max() + np.log(np.exp(scores - scores.max()).sum())
            return dict(zip(ids.tolist(), scores.tolist(), strict=True))

        return after


CASE_MODEL = Case.model


@pytest.fixture(scope="module", params=[True, False], ids=["first", "second"])
def case(request: Any, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tiny_model("qwen35", layers=8), tmp_path_factory.mktemp("case"), learned=request.param)


def test_scores_of_paths_equal_the_plain_head(case: Case) -> None:
    assert case.error(case.propose()) <= 1e-5


@pytest.mark.parametrize("learned", [True, False])
def test_both_forms_of_file_give_the_same_head(
    tiny_model: Callable[..., Path], tmp_path: Path, learned: bool
) -> None:
    forms = [
        Case(tiny_model("qwen35", layers=8), tmp_path / form, learned=learned, form=form)
        for form in ("pth", "safetensors")
    ]
    first, second = (each.propose() for each in forms)
    assert torch.equal(first.chains, second.chains) and torch.equal(first.chain_scores, second.chain_scores)


STEP, PREFIX, LAST = WeaverHead.step, WeaverHead.prefix, NewestHidden.last
REST, NORM, HIDDEN = weaver.WeaverBlock.rest, BiasedNorm.__call__, WeaverModel._hidden
BUGS: dict[str, tuple[Any, str, Any]] = {
    "the target's state before its final norm": (
        WeaverModel, "_hidden", lambda model, features: features[..., model._columns :].contiguous(),
    ),
    "the target's state one position late": (
        NewestHidden, "last", lambda newest, slots: LAST(replace(newest, counts=newest.counts - 1), slots),
    ),
    "nodes at d, not d + 1": (
        WeaverHead, "step",
        lambda head, x, depths, prefix, above: STEP(head, x, (depths - 1).clamp(min=0), prefix, above),
    ),
    "the draft's rows offset by one": (
        WeaverHead, "prefix", lambda head, last, rows: PREFIX(head, last, rows.roll(1, 1)),
    ),
    "no row of the target": (
        WeaverHead, "prefix", lambda head, last, rows: PREFIX(head, torch.zeros_like(last), rows),
    ),
    "tokens before are not seen": (
        WeaverHead, "step",
        lambda head, x, depths, prefix, above: STEP(
            head, x, depths, prefix, [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in above]
        ),
    ),
    "norms without their bias": (
        BiasedNorm, "__call__", lambda norm, x: NORM(norm, x) - norm._bias,
    ),
    "every row of the prefix sees all": (
        weaver.WeaverBlock, "rest",
        lambda block, x, q, k, v, seen: REST(block, x, q, k, v, seen | torch.tensor(len(seen) == 1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_planted_errors_are_caught(case: Case, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, flawed = BUGS[bug]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, flawed)
        proposals = case.propose()
    try:
        assert case.error(proposals) > 1e-3
    except AssertionError as error:
        assert "other candidates" in str(error)


def test_a_marginal_that_is_not_added_is_caught(case: Case) -> None:
    class Replaced(LogRank):
        def __call__(self, *inputs: Any) -> tuple[Tensor, Tensor]:
            ids, scores = super().__call__(*inputs)
            return ids, torch.zeros_like(scores)

    slots = torch.arange(len(ANCHORS))
    proposals = case.model().candidates(torch.tensor(ANCHORS), slots, Replaced(), 24)
    assert case.error(proposals) > 1e-3


def test_a_tree_has_paths_that_the_draft_alone_ranks_lower(case: Case) -> None:
    proposal = case.propose().one(0)
    block = case.model()._draft.block(torch.tensor(ANCHORS[:1]), torch.tensor([0]))
    likeliest = block.logits[0].argmax(-1).tolist()
    assert any(
        token not in (-1, likeliest[depth])
        for chain in proposal.chains[:3].tolist()
        for depth, token in enumerate(chain)
    )


def test_committed_rolled_back_and_restored_states_are_those_of_the_text(case: Case) -> None:
    fresh = case.propose()

    def same(model: WeaverModel) -> None:
        again = case.propose(model)
        assert torch.equal(again.ids, fresh.ids) and torch.allclose(
            again.chain_scores, fresh.chain_scores, atol=1e-4
        )

    model = case.model()
    more = random_rows(4, 4 * case.spec.width, seed=99)
    for slot in range(len(ANCHORS)):
        model.append(slot, more)
        model.flush(slot)
        model.rollback(slot, 4)
    same(model)
    saved = [model.save(slot) for slot in range(len(ANCHORS))]
    other = case.model()
    for slot in range(len(ANCHORS)):
        other.append(slot, more)
    for slot, rings in enumerate(saved):
        other.restore(slot, rings)
    same(other)
    # The last positions by a captured step's commit, of which one slot accepts fewer.
    model, slots = case.model(), torch.arange(len(ANCHORS))
    for slot in range(len(ANCHORS)):
        model.begin(slot)
        model._draft._buffers.lengths[slot] = 0
        model.append(slot, case.features(slot)[: -3 + slot])
        model.flush(slot)
    rows = torch.cat([case.features(slot)[-3 + slot :] for slot in range(len(ANCHORS))])
    index = torch.tensor([[0, 1, 2], [3, 4, 0], [5, 0, 0]])
    model.commit(rows, index, torch.tensor([3, 2, 1]), slots)
    same(model)


def test_a_quantised_head_is_close(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    config = weaver_config(64, depth=5, d_rank=64, mlp_dim=96)
    path, _ = save_weaver(tmp_path, config, learned=True)
    whole, small = WeaverHead.load(path), WeaverHead.load(path, quant=QuantType.Q8_0)
    last, rows = random_rows(1, 1, 64), random_rows(1, 5, 64, seed=1)
    for (k, v), (small_k, small_v) in zip(whole.prefix(last, rows), small.prefix(last, rows), strict=True):
        assert 0 < float((k - small_k).norm() / k.norm()) < 0.03
        assert 0 < float((v - small_v).norm() / v.norm()) < 0.03
    assert WeaverFile(path, quant=QuantType.Q8_0).tensors["pos_emb"].type is QuantType.F32


class Planted:
    """What a pickle may name: code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this ran",)


def test_what_is_no_head_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = weaver_config(64, depth=5)
    path, tensors = save_weaver(tmp_path, config, learned=False)

    def refused(content: Any, message: str, kind: type[Exception] = UnsupportedModel) -> None:
        torch.save(content, path)
        with pytest.raises(kind, match=message):
            WeaverFile(path)

    def weights(**changes: Any) -> dict[str, Any]:
        state = {name: each for name, each in (tensors | changes).items() if each is not None}
        return {"config": config, "state_dict": state}

    refused([1], "holds list, needed a config and a state_dict", ModelFileError)
    refused({"config": config, "state_dict": {"a": 1}}, "needed a config and a state_dict", ModelFileError)
    refused(weights(**{"token_in.bias": None}), r"tensor 'token_in.bias' is missing, needed \[24\]")
    refused(weights(extra=torch.zeros(3)), r"'extra' has shape \[3\], needed no such tensor")
    refused(weights(**{"token_in.bias": torch.zeros(9)}), r"has shape \[9\], needed \[24\]")
    refused(weights(**{"token_in.bias": torch.zeros(24).int()}), r"of type torch.int32, needed")
    for change, message in (
        ({"num_heads": 7}, "num_heads is 7, needed heads of an even size"),
        ({"d_embed": 32}, "d_embed is 32, needed d_model, 64"),
        ({"activation": "gelu"}, "activation is 'gelu', needed 'swiglu' without pos_emb"),
    ):
        refused({"config": config | change, "state_dict": tensors}, message)
    refused({"config": {**config, "K": None}, "state_dict": tensors}, "K is missing", ModelFileError)
    refused({"config": config, "state_dict": Planted()}, "not a readable file of tensors", ModelFileError)
    path.write_bytes(pickle.dumps(Planted()))
    with pytest.raises(ModelFileError, match="not a readable file of tensors"):
        WeaverFile(path)
    assert "this ran" not in capsys.readouterr().out
    with pytest.raises(ModelNotFound, match="no such file"):
        WeaverFile(tmp_path / "absent.pth")


def test_a_head_of_others_is_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny_model(layers=8, mtp=True)
    with GGUFFile.open(path) as file:
        spec = Decoder.load(file).spec
    save_draft(tmp_path / "dflash", draft_config(spec, method={"block_size": BLOCK}))
    save_draft(tmp_path / "mlp", draft_config(spec, nested=True, method={"ar_approximation": "swiglu"}))

    def loaded(draft: str, config: dict[str, Any], mtp: str = "off") -> None:
        head, _ = save_weaver(tmp_path / "head", config, learned=False)
        settings = EngineConfig("cpu", 256, draft=DraftConfig(tmp_path / draft, head=head))
        assert settings.speculation is not None
        load_session(path, replace(settings, speculation=replace(settings.speculation, mtp=mtp)))

    fitting = weaver_config(spec.width, depth=15)
    loaded("dflash", fitting)
    with pytest.raises(UnsupportedModel, match=f"d_model is 32, needed the target's width, {spec.width}"):
        loaded("dflash", weaver_config(32, depth=15))
    with pytest.raises(UnsupportedModel, match="K is 4, needed the positions of the draft, 5"):
        loaded("dflash", weaver_config(spec.width, depth=4))
    with pytest.raises(UnsupportedModel, match="the draft has a head or a vocabulary of its own"):
        loaded("mlp", fitting)
    with pytest.raises(UsageError, match="a Weaver head and the MTP block are to propose together"):
        loaded("dflash", fitting, "on")
