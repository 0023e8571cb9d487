"""Evaluation of a draft on held-out text: per-position accuracy, tree acceptance, acceptance in the engine.

Also the check before an export is used: the trainer's and the engine's logits must agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear

from treeflash.config import SpecConfig
from treeflash.engine.engine import Done, Engine, Request
from treeflash.engine.sampler import SamplingParams
from treeflash.errors import TreeFlashError
from treeflash.kernels.tree.reference import accept_path
from treeflash.models.dflash import DFlashDraft
from treeflash.spec.dflash import DFlashModel
from treeflash.spec.policy import StepCosts
from treeflash.spec.speculator import CANDIDATES, SPINE, Speculator
from treeflash.spec.tree import Proposal, build_tree
from treeflash.state.draft_ring import draft_buffers
from treeflash.train.draft_data import Batch, TokenData, make_batch
from treeflash.train.draft_export import WEIGHTS
from treeflash.train.draft_loss import Tally, block_loss
from treeflash.train.draft_model import DraftModel
from treeflash.train.draft_target import FeatureReader, Frozen, Target

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


@torch.no_grad()
def evaluate(
    model: DraftModel, reader: FeatureReader, frozen: Frozen, batches: Sequence[Batch], *, step: int
) -> Evaluation:
    total: Tally | None = None
    accepted: list[int] = []
    for batch in batches:
        hidden = block_rows(model, reader, frozen, batch)
        tally = block_loss(hidden, batch.labels, batch.valid, frozen.head, kind="dpace")
        if total is None:
            total = tally
        else:
            total.merge(tally)
        accepted += _tree_acceptance(hidden, batch, frozen.head, _TREES - len(accepted))
    assert total is not None
    tree = sum(accepted) / len(accepted) if accepted else total.acceptance
    return Evaluation(step, total.mean_loss, total.top1, total.acceptance, tree)


def block_rows(model: DraftModel, reader: FeatureReader, frozen: Frozen, batch: Batch) -> Tensor:
    """Return the hidden states [B, M, T, width] of the batch's blocks; matmuls run in bfloat16 on a GPU."""
    anchors = batch.tokens.gather(1, batch.anchors)
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=batch.tokens.is_cuda):
        return model(reader(batch.tokens), frozen.embeddings(anchors), batch.anchors)


def _tree_acceptance(hidden: Tensor, batch: Batch, head: Tensor, most: int) -> list[int]:
    """Return the acceptance lengths of the trees of up to `most` complete blocks."""
    whole = batch.valid.all(-1).nonzero().tolist()
    counts = []
    for text, block in whole[:: max(1, len(whole) // max(most, 1))][: max(most, 0)]:
        logits = linear(hidden[text, block, 1:].to(head.dtype), head).float()
        top = logits.topk(min(CANDIDATES, logits.shape[1]), -1)
        scores = top.values - logits.logsumexp(-1, keepdim=True)
        anchor = batch.tokens[text, batch.anchors[text, block]][None]
        tree, _ = build_tree(anchor, Proposal.of(top.indices, scores), nodes=BUDGET, spine=SPINE)
        tokens, parents = tree.lists()
        depths = [0] * len(tokens)
        for row in range(1, len(tokens)):
            depths[row] = depths[parents[row]] + 1
        labels = [*batch.labels[text, block].tolist(), -1]
        counts.append(len(accept_path(tokens, parents, [labels[depth] for depth in depths])))
    return counts


@dataclass(frozen=True, slots=True)
class Measured:
    """Acceptance of a draft as measured in the engine."""

    acceptance: float  # tokens per step
    tokens: int
    steps: int


def measure(
    target: Target,
    draft: Path,
    prompts: Sequence[list[int]],
    *,
    max_tokens: int = 128,
    sampling: SamplingParams | None = None,
) -> Measured:
    """Decode with the draft alone, without prompt lookup, and with trees of BUDGET nodes at every step."""
    decoder = target.decoder
    loaded = DFlashDraft.load(draft, target.spec, device=target.device, dtype=decoder.dtype)
    max_ctx = max(map(len, prompts)) + max_tokens
    buffers = draft_buffers(loaded.spec, max_ctx=max_ctx, device=target.device)
    speculator = Speculator(
        DFlashModel(loaded, decoder, buffers),
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
    return Measured(tokens / max(1, steps), tokens, steps)


@torch.no_grad()
def check_parity(target: Target, folder: Path, data: TokenData, numbers: Sequence[int]) -> float:
    """Return the largest relative difference between the trainer's and the engine's logits, same weights.

    Raises if the two forward passes disagree: such a draft would train well and be accepted rarely.
    """
    decoder, device = target.decoder, target.device
    draft = DFlashDraft.load(folder, target.spec, device=device, dtype=torch.float32)
    model = DraftModel(draft.spec).to(device)
    weights = load_file(folder / WEIGHTS, device=str(device))
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    reader = FeatureReader(decoder, draft.spec.taps)
    frozen = Frozen(decoder, draft.spec.mask_id, draft.spec.block_size)
    head = frozen.head.float()
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
            served = draft.block(rows[:, block], slots, buffers)
            ours, theirs = linear(trained[0, block], head), linear(served[0], head)
            worst = max(worst, float((ours - theirs).norm() / theirs.norm()))
            left -= 1
        if left <= 0:
            break
    if not worst <= _PARITY:
        raise TreeFlashError(
            f"{folder}: the trainer's and the engine's logits differ by {worst:.2g}, needed <= {_PARITY:g}",
            "this is a bug in treeflash: please report it",
        )
    return worst


def held_out_batches(
    data: TokenData, numbers: np.ndarray, *, size: int, anchors: int, block: int, device: torch.device
) -> list[Batch]:
    """Return the held-out texts as batches of `size`, with the same anchors at every evaluation."""
    groups = [numbers[start : start + size].tolist() for start in range(0, len(numbers), size)]
    return [
        make_batch(data, group, anchors=anchors, block=block, seed=number).to(device)
        for number, group in enumerate(groups)
    ]
