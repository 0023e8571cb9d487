"""The attention scorer on the GPU against the CPU: the same order of units, also for a second question."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bough.compress.scorer import Query
from bough.session.attention_scorer import AttentionScorer
from tests.gpu.inputs import DEVICE

pytestmark = pytest.mark.gpu

UNITS = [f"Sentence {n} is about the harbour and number {n * 7919 % 1000}. " for n in range(60)]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen35"])
def test_scores_are_those_of_the_cpu(tiny_model: Callable[..., Path], family: str) -> None:
    path = tiny_model(family)
    here, there = (AttentionScorer.load(path, device=device) for device in (torch.device("cpu"), DEVICE))
    for question in ("What is about number 433?", "the harbour"):
        expected = torch.tensor(here.score(UNITS, [Query(question)]))
        found = torch.tensor(there.score(UNITS, [Query(question)]))
        assert (found - expected).norm() / expected.norm() < 0.05
