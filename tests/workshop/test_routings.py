"""The routings with which the cache of experts is measured."""

import numpy as np
import pytest
import torch

from bough.kernels.experts import reference
from workshop.gpu.routings import DISTINCT, Fed, LayerCache, with_hits

SIZES = {"experts": 256, "used": 8, "slots": 128, "steps": 17}


@pytest.mark.parametrize("rows", DISTINCT)
@pytest.mark.parametrize("share", [1.0, 0.95, 0.88, 0.66])
def test_so_many_experts_have_a_place(rows: int, share: float) -> None:
    chosen, hits = with_hits(share, rows, **SIZES, seed=rows)
    assert chosen.shape == (17, rows, 8) and abs(hits - share) < 0.02
    cache, misses = LayerCache(256, 128), 0
    for step in chosen:
        union = np.unique(step)
        assert len(union) == DISTINCT[rows]
        assert all(len(set(row)) == 8 for row in step.tolist())
        misses += cache.use(union.tolist())
    assert 1 - misses / (17 * DISTINCT[rows]) == pytest.approx(hits)


def test_uniform_routing_hits_about_as_often_as_there_are_places() -> None:
    chosen, hits = with_hits(None, 8, **SIZES, seed=1)
    assert abs(hits - 0.5) < 0.1 and 50 < np.mean([len(np.unique(step)) for step in chosen]) < 64


def test_layers_are_fed_one_after_the_other() -> None:
    chosen = np.stack([with_hits(0.88, 8, **SIZES, seed=seed)[0] for seed in range(3)], 1)
    fed = Fed((17, 3, 8), 256, torch.device("cpu"))
    fed.load(chosen)
    for step in (*range(17), 0):
        for layer in range(3):
            logits = fed(torch.zeros(8, 257))
            assert torch.equal(reference.route(logits[:, :-1], 8)[1], torch.from_numpy(chosen[step, layer]))
