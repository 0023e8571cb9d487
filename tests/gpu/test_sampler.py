"""The engine's sampler on a GPU: grammar masks over a vocabulary of real size."""

import numpy as np
import pytest
import torch

from bough.engine.sampler import Sampler
from bough.models.step import Step
from tests.gpu.inputs import DEVICE
from tests.gpu.sampling_inputs import VOCABULARY, random_tree
from tests.gpu.texts import GREEDY

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference_mode")]


def test_each_row_has_its_own_mask() -> None:
    """Every fifth row has none."""
    rows, choose = 23, np.random.default_rng(1)
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(2))
    masks = [
        None if row % 5 == 4 else choose.integers(-(2**31), 2**31, VOCABULARY // 32, dtype=np.int32)
        for row in range(rows)
    ]
    sampler = Sampler(1, rows, VOCABULARY, DEVICE)
    sampler.begin(0, GREEDY, [1], masked=True)
    sampler.set_masks(0, masks)
    tokens, ancestors = random_tree(rows, VOCABULARY, torch.Generator(DEVICE))
    positions = torch.arange(rows, device=DEVICE)
    tree = (part[None] for part in (tokens, positions, torch.full_like(tokens, -1), ancestors))
    step = Step(torch.zeros(1, dtype=torch.int64, device=DEVICE), *tree)
    found = sampler.sample(logits.to(DEVICE), step)
    for row, (token, mask) in enumerate(zip(found.tolist(), masks, strict=True)):
        allowed = np.ones(VOCABULARY, bool)
        if mask is not None:
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)
        assert token == int(np.where(allowed, logits[row].numpy(), -np.inf).argmax()), f"row {row}"
