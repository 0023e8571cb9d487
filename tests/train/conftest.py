"""Targets to train drafts for."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bough.train.draft_target import TrainingTarget, load_target


@pytest.fixture(scope="session")
def tiny_target(tiny_model: Callable[..., Path]) -> TrainingTarget:
    """A hybrid target with random weights."""
    return load_target(tiny_model("qwen35", layers=4), device="cpu")
