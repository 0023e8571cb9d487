"""Distinct experts of a step's rows: the fixtures against their formula, and what a model's trees route."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bough.gguf.reader import GGUFFile
from bough.models.spec import ModelSpec
from workshop.expert_rows import counts, distinct, independent, made_up, recorded


def test_independent_rows_are_as_many_as_the_formula_says() -> None:
    for rows in (1, 8, 24, 64):
        steps = [made_up(0.0, rows, experts=256, used=8, seed=seed)[None] for seed in range(100)]
        # A row never takes an expert of the row before: a few more than with independent ones.
        expected = independent(rows, experts=256, used=8)
        assert counts(steps, [rows])[str(rows)] == pytest.approx(expected, rel=0.04)


def test_rows_that_share_choose_fewer() -> None:
    few, many = (
        np.mean([distinct(made_up(share, 24, experts=256, used=8, seed=seed), 24) for seed in range(50)])
        for share in (0.45, 0.0)
    )
    assert 0.6 < few / many < 0.75  # 92 of 137 in the published model of it


def test_of_a_models_trees(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Every layer with experts, every row of every tree; the first rows alone."""
    path = tiny_model("qwen3moe")
    with GGUFFile.open(path) as file:
        spec = ModelSpec.from_gguf(file)
    assert spec.experts is not None
    recorder = recorded(path, None, ["one two one two one two one two"], 24, 15)
    assert recorder.steps and all(
        step.shape[0] == len(spec.layers) and step.shape[2] == spec.experts.used for step in recorder.steps
    )
    means = counts(recorder.steps, [1, 2, 64])
    assert means["1"] == spec.experts.used and means["64"] is None
    recorder.saved(tmp_path / "routing.npz")
    chosen = np.load(tmp_path / "routing.npz")["chosen"]
    rows = recorder.steps[0].shape[1]
    assert np.array_equal(chosen[0, :, :rows], recorder.steps[0]) and (chosen[0, :, rows:] == -1).all()
