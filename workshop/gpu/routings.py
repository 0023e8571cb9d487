"""Routings that steps follow whatever their rows are: how many experts of a layer, and which have a place."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from bough.kernels.experts import reference, triton_kernels
from bough.kernels.experts.stack import Routing

# Distinct experts of a layer by rows, 8 of 256: each row shares 45% with the one before, rising to 80% within
# 8 rows, as others measured of Qwen3-30B-A3B (python -m workshop expert_rows; imp#1374).
DISTINCT = {1: 8, 8: 30, 24: 56}


class LayerCache:
    """The places of one layer's experts, as the device has them after `fill`."""

    def __init__(self, experts: int, slots: int):
        self.places = [*range(slots), *[-1] * (experts - slots)]
        self.owners, self.stamps, self.now = list(range(slots)), [-slot for slot in range(slots)], 0

    def use(self, experts: list[int]) -> int:
        """Count a step's misses, and give them places."""
        self.now += 1
        misses = sum(self.places[expert] < 0 for expert in experts)
        reference.resolve(sorted(experts), self.places, self.owners, self.stamps, self.now)
        return misses


def with_hits(
    share: float | None, rows: int, *, experts: int, used: int, slots: int, steps: int, seed: int
) -> tuple[np.ndarray, float]:
    """Return what a layer's rows choose, [steps, rows, used], and the share of hits; None: at random."""
    random, cache = np.random.default_rng(seed), LayerCache(experts, slots)
    chosen, misses, total = [], 0, 0
    for _ in range(steps):
        if share is None:
            step = np.stack([random.choice(experts, used, replace=False) for _ in range(rows)])
            union = np.unique(step)
        else:
            count = min(DISTINCT.get(rows, used * rows), experts)
            hot = [expert for expert in range(experts) if cache.places[expert] >= 0]
            cold = [expert for expert in range(experts) if cache.places[expert] < 0]
            wanted = share * (total + count) - (total - misses)  # of the hits so far, too
            hits = int(np.clip(np.floor(wanted + random.random()), max(0, count - len(cold)), count))
            hits = min(hits, len(hot))
            union = np.concatenate([random.permutation(hot)[:hits], random.permutation(cold)[: count - hits]])
            step = _spread(union, rows, used, random)
        misses += cache.use(union.tolist())
        total += len(union)
        chosen.append(step)
    return np.stack(chosen), 1 - misses / total


def _spread(union: np.ndarray, rows: int, used: int, random: np.random.Generator) -> np.ndarray:
    """Return experts [rows, used], different in a row, that are together those of `union`."""
    order = random.permutation(union)
    return np.stack([np.take(order, range(row * used, (row + 1) * used), mode="wrap") for row in range(rows)])


class Fed:
    """Logits of routings for the layers of one forward pass after the other; the device counts them."""

    def __init__(self, shape: tuple[int, int, int], experts: int, device: torch.device):
        """shape: steps, layers, rows."""
        self._logits = torch.full((*shape, experts + 1), -9.0, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._layer = 0

    def load(self, chosen: np.ndarray) -> None:
        """Begin with the first of these steps [steps, layers, rows, used]."""
        places = torch.from_numpy(chosen).long().to(self._logits.device)
        ranks = torch.arange(places.shape[-1], 0, -1, dtype=torch.float32, device=places.device)
        self._logits.fill_(-9.0).scatter_(-1, places, ranks.expand(places.shape).contiguous())
        self._step.zero_()

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the next layer's logits [rows, experts + 1] in place of these."""
        fed = self._logits[:, self._layer].index_select(0, self._step)[0]
        self._layer = (self._layer + 1) % self._logits.shape[1]
        if self._layer == 0:
            self._step.add_(1).remainder_(len(self._logits))
        return fed


@contextmanager
def feeding(fed: Mapping[int, Fed]) -> Iterator[None]:
    """Have steps routed as they are fed, by their rows."""
    route = triton_kernels.route

    def routed(logits: Tensor, used: int, tokens: int) -> Routing:
        return route(fed[len(logits)](logits) if len(logits) in fed else logits, used, tokens)

    with patch.object(triton_kernels, "route", routed):
        yield
