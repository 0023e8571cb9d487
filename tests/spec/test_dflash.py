"""Proposals of the DFlash draft with the target's embedding and head, against the plain draft."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bough.engine.sampler import Sampler, SamplingParams
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from bough.models.dflash import DFlashDraft
from bough.spec.dflash import DFlashModel
from bough.state.draft_ring import draft_buffers
from tests.models.plain_dflash import PlainDraft
from tests.tiny_draft import arrays, draft_config, poisoned, random_rows, save_draft

SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
SHAPED = {"input_embedding_scale": 0.5, "output_multiplier": 3.0, "final_logit_softcapping": 2.0}


class Proposer:
    """A tiny target with a draft, and what the plain draft says its proposals have to be."""

    def __init__(self, model: Path, folder: Path, **changes: Any):
        with GGUFFile.open(model) as file:
            self.target = Decoder.load(file)
            self._head, self._embedding = (
                file.raw(name).view(np.float32).copy() for name in ("output.weight", "token_embd.weight")
            )
        self.config = draft_config(self.target.spec, layer_types=SLIDING, sliding_window=13, **changes)
        self._tensors = arrays(save_draft(folder, self.config))
        draft = DFlashDraft.load(folder, self.target.spec)
        self.block = DFlashModel(draft, self.target, poisoned(draft, context=30))
        self.open()

    def open(self) -> None:
        self.block.begin(0)
        self._plain = PlainDraft(self.config, self._tensors, context=30)
        self._length = 0

    def append(self, count: int, *, seed: int, pieces: int = 1) -> None:
        features = random_rows(count, 3 * self.target.spec.width, seed=seed)
        self._plain.append(features.numpy())
        self._length += count
        for piece in features.tensor_split(pieces):
            self.block.append(0, piece)

    def check(self, anchor: int, count: int = 6) -> None:
        asked: list[tuple[Tensor, Tensor]] = []
        spec = self.target.spec
        sampler = Sampler(1, 64, spec.vocab_size, torch.device("cpu"))
        sampler.begin(0, SamplingParams(seed=0), [], masked=False)

        def rank(
            logits: Tensor, positions: Tensor, anchors: Tensor, slots: Tensor, count: int
        ) -> tuple[Tensor, Tensor]:
            asked.append((positions[0], anchors))
            return sampler.rank(logits, positions, anchors, slots, count)

        self.block.flush(0)
        found = self.block.candidates(torch.tensor([anchor]), torch.tensor([0]), rank, count)
        proposal = found.one(0)
        mask = {**self.config, **self.config.get("dflash_config", {})}["mask_token_id"]
        hidden = self._plain.block(self._embedding[[anchor] + [mask] * 15])[1:]
        logits = self._plain.logits(hidden, self._head)
        scores = logits - logits.max(1, keepdims=True)
        scores -= np.log(np.exp(scores).sum(1, keepdims=True))
        best = np.sort(scores, 1)[:, ::-1][:, :count]
        assert proposal.ids.shape == (15, count) and not len(proposal.chains)
        assert np.abs(proposal.scores.numpy() - best).max() < 1e-4
        assert np.abs(np.take_along_axis(scores, proposal.ids.numpy(), 1) - best).max() < 1e-4
        [(positions, told)] = asked
        assert positions.tolist() == list(range(self._length + 1, self._length + 16))
        assert told.tolist() == [anchor]


@pytest.mark.parametrize("method", [{}, SHAPED])
def test_proposals(method: dict[str, float], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    proposer = Proposer(tiny_model("qwen35"), tmp_path, nested=True, method=method)
    proposer.append(40, seed=1)
    proposer.check(7)
    for number, count in enumerate((3, 8, 1, 70, 2)):
        proposer.append(count, seed=10 + number)
        proposer.check(20 + number)


def test_features_may_come_in_pieces(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Whether they wait for company or for a proposal, or there are none, makes no difference."""
    proposer = Proposer(tiny_model("qwen35"), tmp_path)
    proposer.check(5)
    proposer.append(90, seed=1, pieces=90)
    proposer.append(0, seed=2)
    proposer.check(7)
    proposer.append(63, seed=3, pieces=9)
    proposer.append(130, seed=4, pieces=2)
    proposer.check(8)
    proposer.check(9)


def test_open_forgets_everything(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    proposer = Proposer(tiny_model("qwen35"), tmp_path)
    proposer.append(75, seed=1)
    proposer.append(9, seed=2)
    proposer.check(3)
    proposer.append(20, seed=3)  # still waiting
    proposer.open()
    proposer.check(3)
    proposer.append(4, seed=4)
    proposer.check(3)
    proposer.append(80, seed=5)
    proposer.check(3)


@pytest.mark.parametrize("length", [5, 13, 29, 30, 77])
def test_a_saved_ring_goes_on_as_the_original_did(
    length: int, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Shorter than the window, as long as the rings, and longer than they are."""
    proposer = Proposer(tiny_model("qwen35"), tmp_path)
    proposer.append(length, seed=1)
    saved = proposer.block.save(0)
    for attempt in range(2):
        # What the ring held meanwhile, and what still waited, is gone.
        proposer.open()
        proposer.append(90 + attempt, seed=7)
        proposer.check(4)
        proposer.append(3, seed=8)
        proposer.open()
        proposer.append(length, seed=1)
        proposer.block.restore(0, saved)
        proposer.check(3)
        proposer.append(20, seed=3)
        proposer.check(5)


@torch.inference_mode()
def test_paths_of_many_slots_at_once(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """More rows than a small step has; slots without accepted rows may have another's number."""
    with GGUFFile.open(tiny_model("qwen35")) as file:
        target = Decoder.load(file)
    config = draft_config(target.spec, layer_types=SLIDING, sliding_window=13)
    save_draft(tmp_path, config)
    draft = DFlashDraft.load(tmp_path, target.spec)
    made = [DFlashModel(draft, target, draft_buffers(draft.spec, max_ctx=64, slots=6)) for _ in range(2)]
    before, features = (random_rows(count, 3 * target.spec.width, seed=count) for count in (9, 64))
    counts, slots = torch.tensor([3, 1, 0, 16, 5, 0]), torch.tensor([4, 0, 4, 2, 5, 2])
    rows = torch.randint(0, 64, (6, 30), generator=torch.Generator().manual_seed(1))
    for slot in range(6):
        for model in made:
            model.begin(slot)
            model.append(slot, before[: 3 + slot])
            model.flush(slot)
    made[0].commit(features, rows, counts, slots)
    for row, count, slot in zip(rows, counts.tolist(), slots.tolist(), strict=True):
        made[1].append(slot, features[row[:count]])
        made[1].flush(slot)
    for name in ("keys", "values", "lengths"):
        one, other = (getattr(model._buffers, name) for model in made)
        for found, wanted in zip(one, other, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
