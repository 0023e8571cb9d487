"""ExpertCaches: the caches of a model's layers whose experts are in host memory, and what they share."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.kernels.experts.cache import stage_bytes, staged_at_once
from bough.kernels.experts.stack import Copies
from bough.models.layers import Experts


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """Distinct experts of steps' layers: those that had a place on the device, and those that were copied."""

    hits: int
    misses: int

    @property
    def share(self) -> float:
        """Return the share of hits."""
        return self.hits / max(1, self.hits + self.misses)


@dataclass(frozen=True, slots=True)
class ExpertCaches:
    """Of a model without experts in host memory it is empty."""

    layers: Sequence[Experts]
    totals: Tensor  # int64 [layers, 3], which the device writes and the host reads at any time
    counts: Tensor  # int64 [layers, experts]: steps that used each

    @classmethod
    def of(cls, experts: Sequence[Experts]) -> "ExpertCaches":
        """Give the caches of these layers one stage, for prompts; they are empty."""
        layers = [layer for layer in experts if layer.cache is not None]
        if not layers:
            return cls((), torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 0, dtype=torch.int64))
        device = layers[0].stacks[0].row_scale.device
        size = max(stage_bytes(layer.stacks) for layer in layers)
        stage = torch.empty(size, dtype=torch.uint8, device=device)
        on_gpu = device.type == "cuda"
        totals = torch.zeros(
            len(layers), 3, dtype=torch.int64, device="cpu" if on_gpu else device, pin_memory=on_gpu
        )
        counts = torch.zeros(len(layers), layers[0].stacks[0].count, dtype=torch.int64, device=device)
        for layer, mirror, uses in zip(layers, totals, counts, strict=True):
            assert layer.cache is not None
            layer.cache.share(stage, mirror, uses)
        return cls(layers, totals, counts)

    def fill(self, uses: Sequence[Sequence[int]] | None) -> None:
        """Give places to the experts of each layer that were used most, by `uses`; None: to the first."""
        for index, layer in enumerate(self.layers):
            assert layer.cache is not None
            counts = [0] * len(layer.cache.places) if uses is None else uses[index]
            layer.cache.fill(layer.stacks, sorted(range(len(counts)), key=lambda expert: -counts[expert]))

    def copy_rate(self) -> float:
        """Return the bytes a second at which missing experts come; measured over the stage of prompts."""
        from bough.kernels.experts import cache_kernels

        cache, stack = self.layers[0].cache, self.layers[0].stacks[0]
        assert cache is not None
        places = torch.arange(staged_at_once(stack.count), dtype=torch.int32, device=cache.stage.device)
        copies = Copies(places[:, None].repeat(1, 2), torch.full_like(places[:1], len(places)))
        target = cache.stage[: len(places) * stack.expert_bytes].view(-1, *stack.data.shape[1:])
        seconds = []
        for _ in range(2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            cache_kernels.copy(stack.cold, target, copies)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return target.numel() / min(seconds)

    @property
    def uses(self) -> list[list[int]]:
        """Return the steps that used each expert of each layer; the host waits for the device."""
        return self.counts.tolist()

    @property
    def use(self) -> ExpertUse | None:
        """Return the totals of all layers, without waiting for the device; None: all experts are there."""
        if not self.layers:
            return None
        _, hits, misses = self.totals.sum(0).tolist()
        return ExpertUse(hits, misses)
