"""Proposals of the target's MTP block, against the plain block in float64."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bough.errors import UnsupportedModel
from bough.gguf.reader import GGUFFile
from bough.models import mtp
from bough.models.decoder import Decoder
from bough.models.mtp import KeyValue, MTPBlock, MTPBuffers
from bough.models.newest import NewestHidden
from bough.models.spec import has_mtp
from bough.models.step import Step
from bough.spec import mtp as proposer
from bough.spec.calibration import Calibration
from bough.spec.mtp import BEAMS, STEPS, MTPModel
from bough.spec.tree import Proposal
from bough.state.draft_ring import mtp_buffers
from bough.state.sequences import SequenceStates
from tests.models.plain_mtp import PlainMTP, read_arrays

TEXT = [(7 * i * i + 3 * i + 11) % 300 for i in range(70)]
COUNT = 10  # candidates
SLOT = torch.tensor([0])
MODELS = {"qwen35": {}, "qwen35moe": {}, "tied": {"tied": True}, "wide": {"width": 128}}


def log_rank(
    logits: Tensor, positions: Tensor, anchors: Tensor, slots: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    assert positions.shape == logits.shape[:2]
    best = logits.log_softmax(-1).topk(count, -1)
    return best.indices, best.values


class Case:
    """A tiny target with its block, after a text, and what the plain block says of it."""

    def __init__(self, path: Path, *, context: int = 1024):
        self.spec, tensors = read_arrays(path)
        with GGUFFile.open(path) as file:
            self.target = Decoder.load(file)
            self.block = MTPBlock.load(file, self.spec, device=torch.device("cpu"), dtype=torch.float32)
        self.context = context
        self._plain = PlainMTP(self.spec, tensors, context=context)

    def model(self) -> MTPModel:
        model = MTPModel(self.block, self.target, self.buffers())
        model.begin(0)
        return model

    def buffers(self) -> MTPBuffers:
        return mtp_buffers(self.spec, max_ctx=self.context)

    @torch.inference_mode()
    def run(self, text: list[int]) -> tuple[Tensor, Tensor]:
        """Return the features and the final hidden states of a text."""
        states = SequenceStates(self.spec, max_ctx=1024)
        slots = torch.tensor([states.open()])
        states.reserve(0, len(text))
        step = Step.chunk(slots, torch.tensor([text]), states.buffers.lengths[slots])
        output = self.target.forward(step, states.buffers, taps=self.block.taps)
        return output.features[0], output.hidden[0]

    def error(self, proposal: Proposal, text: list[int], hidden: Tensor) -> float:
        """Return the largest error of the proposal's log probabilities, relative to the largest of them."""
        largest, worst = 0.0, 0.0
        states = hidden.double().numpy()
        paths = [([], proposal.ids[0].tolist(), proposal.scores[0].tolist())]
        for chain, scores in zip(proposal.chains.tolist(), proposal.chain_scores.tolist(), strict=True):
            depth = chain.index(-1)
            paths += [(chain[:d], [chain[d]], [scores[d]]) for d in range(depth)]
        cache: dict[tuple[int, ...], list] = {}
        for path, ids, scores in paths:
            if tuple(path) not in cache:
                cache[tuple(path)] = self._plain.log_probabilities(text, states, path)
            expected = cache[tuple(path)][len(path)]
            largest = max(largest, abs(expected).max())
            worst = max(worst, *(abs(expected[id] - score) for id, score in zip(ids, scores, strict=True)))
        return worst / largest


@torch.inference_mode()
def error_of(case: Case, *, length: int = 40, pieces: int = 3) -> float:
    text = TEXT[:length]
    features, hidden = case.run(text[:-1])
    model = case.model()
    for piece in features.tensor_split(pieces):
        model.append(0, piece)
    model.flush(0)
    proposal = model.candidates(torch.tensor([text[-1]]), SLOT, log_rank, COUNT).one(0)
    return case.error(proposal, text, hidden)


@pytest.fixture(scope="module")
def case(tiny_model: Callable[..., Path]) -> Case:
    return Case(tiny_model(mtp=True))


@pytest.mark.parametrize("name", MODELS)
def test_forward_equals_the_plain_block(tiny_model: Callable[..., Path], name: str) -> None:
    family = name if name.startswith("qwen") else "qwen35"
    case = Case(tiny_model(family, mtp=True, **MODELS[name]))
    for length in (2, 3, 40):
        assert error_of(case, length=length) <= 1e-5


@pytest.mark.parametrize("context", [16, 20])
def test_a_ring_shorter_than_the_text(tiny_model: Callable[..., Path], context: int) -> None:
    case = Case(tiny_model(mtp=True), context=context)
    for pieces in (1, 3, 20):
        assert error_of(case, length=60, pieces=pieces) <= 1e-5


@torch.inference_mode()
def test_positions_without_features(case: Case, tiny_model: Callable[..., Path]) -> None:
    """Of a long prompt the newest positions alone have features."""
    short = Case(tiny_model(mtp=True), context=24)
    features, hidden = short.run(TEXT[:60])
    model = short.model()
    model.append(0, features[:10])
    model.append(0, features[60 - model.context_length :], skipped=50 - model.context_length)
    proposal = model.candidates(torch.tensor([TEXT[60]]), SLOT, log_rank, COUNT).one(0)
    assert short.error(proposal, TEXT[:61], hidden) <= 1e-5


def swapped_fuse(block: MTPBlock, embeddings: Tensor, hidden: Tensor) -> Tensor:
    return FUSE(block, hidden, embeddings)


FUSE, STEP, NEWEST, COMMIT = MTPBlock.fuse, MTPBlock.step, NewestHidden.last, MTPBlock.commit
ATTENTION = mtp.block_attention


def newest_is_older(newest: NewestHidden, slots: Tensor) -> Tensor:
    return NEWEST(replace(newest, counts=newest.counts - 1), slots)


def hidden_of_the_token_itself(block: MTPBlock, features: Tensor, slots: Tensor, *rest) -> None:
    width = block.spec.width
    later = torch.cat([features[:, 1:, width:], features[:, -1:, width:]], 1)
    COMMIT(block, torch.cat([features[..., :width], later], -1), slots, *rest)


def blind_to_drafts(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *rest, **options) -> Tensor:
    k, v = (torch.cat([torch.zeros_like(part[:, :-1]), part[:, -1:]], 1) for part in (k, v))
    return ATTENTION(q, k, v, positions, *rest, **options)


def later_positions(x: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    return ANGLES(x + (x.shape[1] == 1), frequencies)


def with_the_first_path(block: MTPBlock, x: Tensor, depths: Tensor, above: KeyValue, *rest) -> tuple:
    first = (above[0][:1].expand_as(above[0]), above[1][:1].expand_as(above[1]))
    return STEP(block, x, depths, first, *rest)


def with_the_first_state(block: MTPBlock, embeddings: Tensor, hidden: Tensor) -> Tensor:
    drafted = hidden.shape[1] == BEAMS
    return FUSE(block, embeddings, hidden[:, :1].expand_as(hidden) if drafted else hidden)


def begin_at_zero(model: MTPModel, slot: int) -> None:
    model._buffers.ring.lengths.zero_()
    model._waiting[slot] = []


ANGLES = mtp.rope_angles
BUGS = {
    "the embedding comes second": (MTPBlock, "fuse", swapped_fuse),
    "the hidden state of one position before": (NewestHidden, "last", newest_is_older),
    "the hidden state of the token itself": (MTPBlock, "commit", hidden_of_the_token_itself),
    "drafted rows are not seen": (mtp, "block_attention", blind_to_drafts),
    "drafted rows are one position off": (mtp, "rope_angles", later_positions),
    "paths are not those of the nodes": (MTPBlock, "step", with_the_first_path),
    "nodes at d, not d + 1": (
        MTPBlock,
        "step",
        lambda block, x, depths, *rest: STEP(block, x, (depths - 1).clamp(min=0), *rest),
    ),
    "the hidden state of another node": (MTPBlock, "fuse", with_the_first_state),
    "the first position is seen": (MTPModel, "begin", begin_at_zero),
    "another layer is tapped": (MTPBlock, "taps", property(lambda block: (-1, len(block.spec.layers) - 2))),
}
NORMS = ["_final_norm", "_embedding_norm", "_hidden_norm", "_norm", "_query_norm", "_key_norm", "_ffn_norm"]


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(case: Case, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BUGS[bug])
    assert error_of(case, length=12, pieces=1) > 1e-4


@pytest.mark.parametrize("norm", [*NORMS, "_head_norm"])
def test_a_norm_without_its_weight_is_caught(case: Case, norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case.block, norm, torch.ones_like(getattr(case.block, norm)))
    assert error_of(case, length=12) > 1e-4


@torch.inference_mode()
def test_the_proposal(case: Case) -> None:
    features, _ = case.run(TEXT[:20])
    model = case.model()
    model.append(0, features)
    model.flush(0)
    asked: list[list[int]] = []

    def rank(
        logits: Tensor, positions: Tensor, anchors: Tensor, slots: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        asked.append(positions[0].tolist())
        return log_rank(logits, positions, anchors, slots, count)

    proposal = model.candidates(torch.tensor([5]), SLOT, rank, COUNT).one(0)
    # The anchor is at position 20.
    assert asked[0] == [21] and [len(positions) for positions in asked] == [1] + (STEPS - 1) * [BEAMS]
    for number, positions in enumerate(asked):
        assert positions[0] == 21 + number and max(positions) <= 21 + number  # the best child first
    assert proposal.depth == model.depth == 15 and proposal.ids.shape == (15, COUNT)
    paths = [tuple(chain[: chain.index(-1)]) for chain in proposal.chains.tolist() if chain[0] >= 0]
    assert len(set(paths)) == len(paths) > 10 and {len(path) for path in paths} == set(range(2, STEPS + 1))
    # The candidates that are learnt from follow the path that they say.
    given = proposal.given.tolist()
    assert given[0] == [-1] * 15 and given[STEPS][0] == -2
    for depth in range(1, STEPS):
        assert given[depth][:depth] == proposal.ids[:depth, 0].tolist()
        assert (proposal.ids[depth] >= 0).all()
    chain = model.candidates(torch.tensor([5]), SLOT, rank, 1).one(0)
    assert chain.ids.shape == (15, 1)
    best = [tuple(path[: path.index(-1)]) for path in chain.chains.tolist() if path[0] >= 0]
    assert best == [tuple(proposal.ids[:STEPS, 0].tolist())]


def same(first: MTPModel, second: MTPModel) -> bool:
    """Whether two models propose the same."""
    one, other = (
        model.candidates(torch.tensor([9]), SLOT, log_rank, COUNT).one(0) for model in (first, second)
    )
    return torch.equal(one.ids, other.ids) and torch.allclose(one.chain_scores, other.chain_scores, atol=1e-5)


@torch.inference_mode()
def test_commits_and_rollbacks_leave_the_state_of_the_text(case: Case) -> None:
    features, _ = case.run(TEXT[:40])
    whole = case.model()
    whole.append(0, features)
    whole.flush(0)
    committed = case.model()
    committed.append(0, features[:25])
    committed.flush(0)
    # Rejected rows follow the accepted ones.
    for start, count in ((25, 1), (26, 5), (31, 9)):
        rejected = features[:4].flip(0)
        rows = torch.cat([features[start : start + count], rejected])
        committed.commit(rows, torch.arange(len(rows))[None], torch.tensor([count]), SLOT)
    assert same(whole, committed)
    committed.commit(features, torch.arange(3, 11)[None], torch.tensor([6]), SLOT)
    assert not same(whole, committed)
    committed.rollback(0, 6)
    assert same(whole, committed)
    waiting = case.model()
    waiting.append(0, features[:30])
    waiting.append(0, torch.cat([features[30:], features[:3]]))
    waiting.rollback(0, 3)
    waiting.flush(0)
    assert same(whole, waiting)


@torch.inference_mode()
def test_save_and_restore(case: Case) -> None:
    features, _ = case.run(TEXT[:40])
    model = case.model()
    model.append(0, features[:30])
    saved = model.save(0)
    model.append(0, features[30:])
    model.flush(0)
    other = case.model()
    other.append(0, features[10:20])
    other.restore(0, saved)
    other.append(0, features[30:])
    other.flush(0)
    assert same(model, other)


@torch.inference_mode()
@pytest.mark.parametrize("count", [COUNT, 1])
def test_several_sequences_at_once(case: Case, count: int) -> None:
    """Each has the proposal that it has alone; commits of none leave a slot as it was."""
    model = MTPModel(case.block, case.target, mtp_buffers(case.spec, max_ctx=case.context, slots=3))
    features, _ = case.run(TEXT[:40])
    for slot, length in enumerate((12, 30, 21)):
        model.begin(slot)
        model.append(slot, features[:length])
        model.flush(slot)
    rows, counts = torch.tensor([[30, 31, 0], [21, 0, 0], [5, 6, 7]]), torch.tensor([2, 1, 0])
    model.commit(features, rows, counts, torch.tensor([1, 2, 1]))
    anchors, slots = torch.tensor([7, 8, 9]), torch.tensor([2, 0, 1])
    together = model.candidates(anchors, slots, log_rank, count)
    for index, (slot, length) in enumerate(((2, 22), (0, 12), (1, 32))):
        alone = case.model()
        alone.append(0, features[:length])
        alone.flush(0)
        expected = alone.candidates(anchors[index : index + 1], SLOT, log_rank, count).one(0)
        found = together.one(index)
        for name in ("ids", "chains", "given"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), (slot, name)
        assert torch.allclose(found.chain_scores, expected.chain_scores, atol=1e-5)


def test_learning_follows_the_path(case: Case) -> None:
    """A deeper candidate is judged only where the text followed the path that it was scored after."""
    given = torch.tensor([[-1, -1, -1], [4, -1, -1], [4, 6, -1]])
    ids, scores = torch.tensor([[4], [6], [8]]), torch.log(torch.tensor([[0.5], [0.5], [0.5]]))
    proposal = replace(Proposal.of(ids, scores), given=given)
    rows = []
    for followed in ([3, 6, 8], [4, 6, 8]):
        calibration = Calibration()
        for _ in range(50):
            calibration.observe(proposal, followed)
        rows.append(calibration.correction().applied(scores).flatten().tolist())
    untouched = Calibration().correction().applied(scores).flatten().tolist()
    assert rows[0][0] < untouched[0] and rows[0][2] == untouched[2]
    assert rows[1][0] > untouched[0] and rows[1][2] > untouched[2]


def test_files_without_a_usable_block(tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model()) as file:
        spec = Decoder.load(file).spec
        assert not has_mtp(file, spec)
        with pytest.raises(UnsupportedModel, match="no MTP block"):
            MTPBlock.load(file, spec, device=torch.device("cpu"), dtype=torch.float32)
    with GGUFFile.open(tiny_model(mtp=True)) as file:
        spec = Decoder.load(file).spec
        assert has_mtp(file, spec) and not has_mtp(file, replace(spec, mtp_layers=2))
    assert proposer.STEPS >= 2
