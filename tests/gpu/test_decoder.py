"""A tiny random model's forward passes on the GPU against the CPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from bough.models.step import Step
from bough.state.sequences import SequenceStates
from tests.gpu.inputs import DEVICE, random_trees
from tests.gpu.numerics import assert_close
from workshop.steps import commit

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference_mode")]

ROWS = 16


def logits_of(path: Path, device: torch.device) -> Tensor:
    """Run prompt chunks and trees in turn, committing a path after each tree."""
    with GGUFFile.open(path) as file:
        model = Decoder.load(file, device=device)
    states = SequenceStates(model.spec, max_ctx=256, max_rows=ROWS, device=device)
    slots = torch.tensor([states.open()], device=device)
    generator, found = torch.Generator().manual_seed(3), []
    for turn in range(7):
        tokens = torch.randint(0, 200, (1, ROWS), generator=generator).to(device)
        last = torch.randint(0, ROWS, (1,), generator=generator).to(device)
        states.reserve(0, ROWS)
        lengths = states.buffers.lengths[slots]
        if turn in (0, 4):
            step = Step.chunk(slots, tokens, lengths)
            found.append(model.logits(model.forward(step, states.buffers).hidden).cpu())
            states.advance(step)
        else:
            parents = random_trees(ROWS, seed=turn, device=device).parents
            step = Step.tree(slots, tokens, parents, lengths)
            found.append(model.verify(step, states.buffers)[1].cpu())
            commit(states, step, last)
    return torch.cat(found)


def test_logits_match_the_cpu(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("qwen35", layers=4)
    expected = logits_of(path, torch.device("cpu"))
    assert_close(logits_of(path, DEVICE), expected, tolerance=2e-3)
