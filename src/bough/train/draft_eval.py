"""Evaluation of a draft on held-out text: per-position accuracy, tree acceptance, acceptance in the engine.

Also the check before an export is used: the trainer's and the engine's logits must agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear

from bough.config import SpecConfig
from bough.engine.engine import Done, Engine, Request
from bough.engine.sampler import SamplingParams
from bough.errors import BoughError
from bough.kernels.tree.reference import accept_path
from bough.models.dflash import DFlashDraft
from bough.spec.costs import StepCosts
from bough.spec.dflash import DFlashModel
from bough.spec.draft_model import DraftModel
from bough.spec.mtp import MTPModel
from bough.spec.speculator import CANDIDATES, SPINE, Speculator
from bough.spec.tree import Proposal, build_tree
from bough.state.draft_ring import draft_buffers, mtp_buffers
from bough.train.draft_data import TextBatch, TokenData, make_batch
from bough.train.draft_export import WEIGHTS
from bough.train.draft_loss import Head, Tally, block_loss
from bough.train.draft_model import Readout, TrainedDraft
from bough.train.draft_target import FeatureReader, Frozen, TrainingTarget
from bough.train.features import FeatureStore
from bough.train.mtp_export import MTP_TARGET, load_block, read_block
from bough.train.mtp_model import TrainedMTP

BUDGET = SpecConfig().budget  # nodes per tree
_TREES = 96  # blocks for which a tree is built
_PARITY = 1e-3
_PREFIXES = 20


@dataclass(frozen=True, slots=True)
class Evaluation:
    step: int
    loss: float
    top1: list[float]  # by position after the anchor
    acceptance: float  # acceptance length with the likeliest chain
    tree_acceptance: float  # acceptance length with a tree of BUDGET nodes
    recall: list[float] | None = None  # by position: labels among the candidates of a DFlash2 draft


@torch.no_grad()
def evaluate(
    model: TrainedDraft | TrainedMTP,
    features: FeatureStore,
    frozen: Frozen,
    batches: Sequence[TextBatch],
    *,
    step: int,
) -> Evaluation:
    total: Tally | None = None
    accepted: list[int] = []
    readout = model.readout(frozen)
    for batch in batches:
        rows = block_rows(model, features, frozen, batch)
        tally = block_loss(
            rows,
            batch.labels,
            batch.valid,
            Head(frozen.head),
            kind="dpace",
            readout=readout,
            anchors=batch.tokens.gather(1, batch.anchors),
        )
        if total is None:
            total = tally
        else:
            total.merge(tally)
        if isinstance(model, TrainedDraft):  # what an MTP block proposes depends on the path
            accepted += _tree_acceptance(readout, rows, batch, frozen.head, _TREES - len(accepted))
    assert total is not None
    tree = sum(accepted) / len(accepted) if accepted else total.acceptance
    recall = total.recall if readout.candidates else None
    return Evaluation(step, total.mean_loss, total.top1, total.acceptance, tree, recall)


def block_rows(
    model: TrainedDraft | TrainedMTP, features: FeatureStore, frozen: Frozen, batch: TextBatch
) -> Tensor:
    """Return the rows [B, M, T, width] of the batch's blocks; matmuls run in bfloat16 on a GPU."""
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=batch.tokens.is_cuda):
        return model(features(batch), model.inputs(frozen, batch), batch.anchors)


def _tree_acceptance(readout: Readout, every: Tensor, batch: TextBatch, head: Tensor, most: int) -> list[int]:
    """Return the acceptance lengths of the trees of up to `most` complete blocks."""
    whole = batch.valid.all(-1).nonzero().tolist()
    counts = []
    for text, block in whole[:: max(1, len(whole) // max(most, 1))][: max(most, 0)]:
        rows, anchor = every[text, block, 1:], batch.tokens[text, batch.anchors[text, block]][None]
        proposal = _proposal(readout, rows, head, anchor)
        tree, _ = build_tree(anchor, proposal, nodes=BUDGET, spine=SPINE)
        tokens, parents = tree.lists()
        depths = [0] * len(tokens)
        for row in range(1, len(tokens)):
            depths[row] = depths[parents[row]] + 1
        labels = [*batch.labels[text, block].tolist(), -1]
        counts.append(len(accept_path(tokens, parents, [labels[depth] for depth in depths])))
    return counts


def _proposal(readout: Readout, rows: Tensor, head: Tensor, anchor: Tensor) -> Proposal:
    """Return what the engine would propose from a block's rows [K, width]."""
    normed = readout.norm(rows)
    logits = linear(normed.to(head.dtype), head).float()
    top = logits.topk(min(readout.candidates or CANDIDATES, logits.shape[1]), -1)
    proposal = Proposal.of(top.indices, top.values - logits.logsumexp(-1, keepdim=True))
    if readout.logits is None:
        return proposal
    before = torch.cat([proposal.ids[:-1], anchor.expand(len(rows) - 1, 1)], 1)
    before = torch.cat([anchor.expand(1, before.shape[1]), before])
    edges = readout.logits(rows, normed, before, proposal.ids, top.values)
    return replace(proposal, edges=edges.log_softmax(-1))


@dataclass(frozen=True, slots=True)
class MeasuredDraft:
    """Acceptance of a draft as measured in the engine."""

    acceptance: float  # tokens per step
    tokens: int
    steps: int


def measure(
    target: TrainingTarget,
    draft: Path,
    prompts: Sequence[list[int]],
    *,
    max_tokens: int = 128,
    sampling: SamplingParams | None = None,
) -> MeasuredDraft:
    """Decode with the draft alone, without prompt lookup, and with trees of BUDGET nodes at every step."""
    decoder, max_ctx = target.decoder, max(map(len, prompts)) + max_tokens
    speculator = Speculator(
        _proposer(target, draft, max_ctx),
        SpecConfig(budget=BUDGET, lookup=False, adaptive=False),
        StepCosts(),
        device=target.device,
    )
    engine = Engine(decoder, max_ctx=max_ctx, drafter=speculator, max_rows=BUDGET + 1)
    steps = tokens = 0
    for prompt in prompts:
        request = Request(
            prompt,
            max_tokens=max_tokens,
            sampling=sampling or SamplingParams(),
            stop_ids=target.tokenizer.stop_ids,
        )
        for event in engine.generate(request):
            if isinstance(event, Done):
                steps += event.stats.steps
                tokens += event.stats.step_tokens
    return MeasuredDraft(tokens / max(1, steps), tokens, steps)


def _proposer(target: TrainingTarget, path: Path, max_ctx: int) -> DraftModel:
    """Return the draft at `path`: a DFlash or DFlash2 draft, or a file of the target with an MTP block."""
    decoder, device = target.decoder, target.device
    if path.name == MTP_TARGET:
        block = load_block(path, device, decoder.dtype)
        return MTPModel(block, decoder, mtp_buffers(target.spec, max_ctx=max_ctx, device=device))
    loaded = DFlashDraft.load(path, target.spec, device=device, dtype=decoder.dtype)
    if loaded.refiner is not None:
        target.keep_head_rows()
    return DFlashModel(loaded, decoder, draft_buffers(loaded.spec, max_ctx=max_ctx, device=device))


@torch.no_grad()
def check_mtp_parity(target: TrainingTarget, folder: Path, data: TokenData, numbers: Sequence[int]) -> float:
    """Return the same for an MTP block, which drafts the text's own tokens."""
    decoder, device = target.decoder, target.device
    block = load_block(folder / MTP_TARGET, device, torch.float32)
    model = TrainedMTP(target.spec, target.final_norm, str(folder)).to(device)
    read_block(folder / MTP_TARGET, model)
    reader, frozen = FeatureReader(decoder, model.spec.taps), Frozen(decoder, 0, 1)
    head, slots, worst = frozen.head.float(), torch.zeros(1, dtype=torch.int64, device=device), 0.0
    for number in numbers[: max(1, _PREFIXES // 4)]:
        batch = make_batch(data, [number], anchors=4, block=model.spec.block_size, seed=number).to(device)
        features, rows = reader(batch.tokens), model.inputs(frozen, batch)
        trained = model(features, rows, batch.anchors)
        for place, anchor in enumerate(batch.anchors[0].tolist()):
            buffers = mtp_buffers(target.spec, max_ctx=anchor + model.spec.block_size, device=device)
            buffers.ring.starts[0] = 1
            block.append(features[:, :anchor], slots, buffers)
            hidden, above = buffers.newest.last(slots)[:, 0], block.nothing(1)
            for depth in range(model.spec.block_size - 1):
                x = block.fuse(rows[:, place, depth], hidden)
                hidden, row = block.step(x, torch.full_like(slots, depth), above, slots, buffers)
                above = torch.cat([above[0], row[0][:, None]], 1), torch.cat([above[1], row[1][:, None]], 1)
                ours, theirs = linear(trained[0, place, depth + 1], head), linear(hidden[0], head)
                worst = max(worst, float((ours - theirs).norm() / theirs.norm()))
    _refuse_disparity(folder, worst)
    return worst


@torch.no_grad()
def check_parity(target: TrainingTarget, folder: Path, data: TokenData, numbers: Sequence[int]) -> float:
    """Return the largest relative difference between the trainer's and the engine's logits, same weights.

    Raises if the two forward passes disagree: such a draft would train well and be accepted rarely.
    """
    decoder, device = target.decoder, target.device
    draft = DFlashDraft.load(folder, target.spec, device=device, dtype=torch.float32)
    if draft.refiner is not None:
        target.keep_head_rows()
    model = TrainedDraft(draft.spec).to(device)
    weights = load_file(folder / WEIGHTS, device=str(device))
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    reader = FeatureReader(decoder, draft.spec.taps)
    frozen = Frozen(decoder, draft.spec.mask_id, draft.spec.block_size)
    head, readout = frozen.head.float(), model.readout(frozen)
    worst, left = 0.0, _PREFIXES
    for number in numbers:
        batch = make_batch(data, [number], anchors=4, block=draft.spec.block_size, seed=number).to(device)
        features = reader(batch.tokens)
        rows = frozen.embeddings(batch.tokens.gather(1, batch.anchors))
        trained = model(features, rows, batch.anchors)
        for block, anchor in enumerate(batch.anchors[0].tolist()):
            buffers = draft_buffers(draft.spec, max_ctx=anchor + draft.spec.block_size, device=device)
            slots = torch.zeros(1, dtype=torch.int64, device=device)
            draft.append(features[:, :anchor], slots, buffers)
            residual, served = draft.rows(rows[:, block], slots, buffers)
            normed = readout.norm(trained[0, block])
            ours, theirs = linear(normed, head), linear(served[0], head)
            worst = max(worst, float((ours - theirs).norm() / theirs.norm()))
            if readout.logits is not None:
                ids = theirs.topk(readout.candidates, -1).indices
                marginals = theirs.gather(-1, ids)
                logits = readout.logits(trained[0, block], normed, ids, ids, marginals)
                if draft.refiner is not None:
                    logits = logits - draft.refiner(residual[0], served[0], ids, ids, decoder)
                if draft.selector is not None:
                    logits = logits - marginals[:, None] - draft.selector(served[0], ids, ids)
                worst = max(worst, float(logits.norm() / theirs.norm()))
            left -= 1
        if left <= 0:
            break
    _refuse_disparity(folder, worst)
    return worst


def _refuse_disparity(folder: Path, worst: float) -> None:
    if not worst <= _PARITY:
        raise BoughError(
            f"{folder}: the trainer's and the engine's logits differ by {worst:.2g}, needed <= {_PARITY:g}",
            "this is a bug in bough: please report it",
        )


def held_out_batches(
    data: TokenData, numbers: np.ndarray, *, size: int, anchors: int, block: int, device: torch.device
) -> list[TextBatch]:
    """Return the held-out texts as batches of `size`, with the same anchors at every evaluation."""
    groups = [numbers[start : start + size].tolist() for start in range(0, len(numbers), size)]
    return [
        make_batch(data, group, anchors=anchors, block=block, seed=number).to(device)
        for number, group in enumerate(groups)
    ]
