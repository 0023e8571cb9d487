"""Finds a GPU's fastest tilings by timing a stack of matmuls. Saves nothing."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bough.gguf.types import QuantType
from bough.kernels.check.inputs import random_rows
from bough.kernels.quant_matmul import cuda
from bough.kernels.quant_matmul.layout import Layout, PackedWeight, pack
from bough.kernels.quant_matmul.rows import BUCKETS
from bough.kernels.quant_matmul.tiling import Tiling, built_in_tilings
from bough.kernels.runtime.device import Card

Q = QuantType
# Matrices (type, rows) that read the same x, and its columns.
Shapes = tuple[Sequence[tuple[QuantType, int]], int]
# The same with weights.
Step = tuple[list[PackedWeight], int]

# A delta layer and an attention layer of a 27B hybrid in the Q4_K_M mix: 0.5 GB.
LAYERS_27B: tuple[Shapes, ...] = (
    (((Q.Q5_K, 10240), (Q.Q4_K, 6144), (Q.Q8_0, 96)), 5120),
    (((Q.Q5_K, 5120),), 6144),
    (((Q.Q4_K, 34816),), 5120),
    (((Q.Q6_K, 5120),), 17408),
    (((Q.Q4_K, 13312), (Q.Q6_K, 1024)), 5120),
    (((Q.Q4_K, 5120),), 6144),
    (((Q.Q4_K, 34816),), 5120),
    (((Q.Q4_K, 5120),), 17408),
)
_MARGIN = 0.01  # by which a tiling must be faster than the built-in one
_CACHES = 3  # a stack is at least this many times as large as the L2 cache


@dataclass(frozen=True, slots=True)
class MeasuredTiling:
    seconds: float
    sums: Tensor


@dataclass(frozen=True, slots=True)
class Found:
    """The best tiling for a number of rows, and the time of the built-in one."""

    rows: int
    built_in: Tiling
    best: Tiling  # the built-in one if none is faster
    built_in_s: float
    best_s: float
    differing: tuple[Tiling, ...]  # with other sums: never used


def candidates(card: Card, bucket: int, layouts: Iterable[Layout]) -> list[Tiling]:
    """Return the built-in tiling, and those that differ in one or two settings; each variant once."""
    built_in, layouts = built_in_tilings(card.arch)[bucket], list(layouts)
    other, grouped = not built_in.halfway, cuda.grouped(card, bucket)
    tried = [
        built_in,
        *(replace(built_in, stages=stages) for stages in range(2, 6)),
        replace(built_in, halfway=other),
        replace(built_in, stages=3, halfway=other),
    ]
    distinct: dict[object, Tiling] = {}
    for tiling in tried:
        macros = [cuda.defines(card, layout, bucket, tiling, grouped=grouped) for layout in layouts]
        # Without bulk copies a stage is always filled at the start.
        variants = [(each["STAGES"], each["BULK"] and each["HALFWAY"]) for each in macros]
        distinct.setdefault(tuple(variants), tiling)
    return list(distinct.values())


def tune(
    card: Card,
    layouts: Iterable[Layout],
    measure: Callable[[Sequence[Tiling], int], Iterable[MeasuredTiling]],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[Found]:
    """Return the best tiling for each bucket that fits on the card.

    `measure` times each of the given tilings for a bucket.
    """
    layouts, done, built_in_of = list(layouts), 0, built_in_tilings(card.arch)
    plan = {
        bucket: candidates(card, bucket, layouts)
        for bucket in BUCKETS
        if all(cuda.stages(card, layout, bucket, built_in_of[bucket]) for layout in layouts)
    }
    total = sum(len(tilings) + 1 for tilings in plan.values())
    results = []
    for bucket, (built_in, *others) in plan.items():
        # The built-in one again at the end: a GPU's clock may rise meanwhile.
        tried = [built_in, *others, built_in]
        measured = []
        for timing in measure(tried, bucket):
            measured.append(timing)
            done += 1
            if progress is not None:
                progress(done, total)
        results.append(_best(bucket, tried, measured))
    return results


def _best(bucket: int, tried: Sequence[Tiling], measured: Sequence[MeasuredTiling]) -> Found:
    (built_in, *others, _), (first, *rest, last) = tried, measured
    seconds = min(first.seconds, last.seconds)
    pairs = zip(others, rest, strict=True)
    times = {tiling: each.seconds for tiling, each in pairs if torch.equal(each.sums, first.sums)}
    differing = tuple(tiling for tiling in others if tiling not in times)
    best = min(times, key=times.__getitem__, default=built_in)
    if times.get(best, seconds) >= seconds * (1 - _MARGIN):
        return Found(bucket, built_in, built_in, seconds, seconds, differing)
    return Found(bucket, built_in, best, seconds, times[best], differing)


class Stack:
    """Random weights on a GPU in the shapes of a model's layers, repeated until they exceed its L2 cache."""

    def __init__(self, shapes: Sequence[Shapes], device: torch.device):
        self._device, self._steps = device, random_steps(shapes, device)
        weights = [weight for step, _ in self._steps for weight in step]
        self.layouts = list(dict.fromkeys(weight.layout for weight in weights))
        size = _CACHES * torch.cuda.get_device_properties(device).L2_cache_size
        self._copies = [self._steps]
        for _ in range(-(-size // sum(weight.nbytes for weight in weights)) - 1):
            self._copies.append([([_copy(weight) for weight in step], k) for step, k in self._steps])

    def measure(self, tilings: Sequence[Tiling], bucket: int) -> Iterator[MeasuredTiling]:
        """Time each tiling; all are compiled first, so that the GPU is not idle between them."""
        for tiling in tilings:
            cuda.prepare(self.layouts, {bucket: tiling}, self._device)
        for tiling in tilings:
            yield self._measure(tiling, bucket)

    def _measure(self, tiling: Tiling, bucket: int) -> MeasuredTiling:
        generator = torch.Generator(self._device).manual_seed(bucket)
        packed = {}
        for columns in sorted({columns for _, columns in self._steps}):
            x = torch.randn(bucket, columns, device=self._device, generator=generator)
            packed[columns] = cuda.pack_rows(x)
        sizes = [sum(weight.rows for weight in weights) for weights, _ in self._steps]
        sums = torch.full((bucket, sum(sizes)), torch.nan, device=self._device)

        def launch() -> None:
            for steps in self._copies:
                for (weights, columns), out in zip(steps, sums.split(sizes, 1), strict=True):
                    outs = out.split([weight.rows for weight in weights], 1)
                    cuda.matmuls(packed[columns], weights, outs, tiling)

        seconds = timed(launch, groups=9, repeats=10)
        return MeasuredTiling(seconds / len(self._copies), sums)


def timed(launch: Callable[[], object], *, groups: int = 5, repeats: int = 2) -> float:
    """Return the median seconds of `launch`, replayed as a CUDA graph."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # matmuls on one device run in one stream
    with torch.cuda.stream(stream):
        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        launch()
        graph.capture_end()
    times = []
    for _ in range(groups + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / repeats / 1e3)
    return statistics.median(times[1:])


def random_steps(shapes: Iterable[Shapes], device: torch.device) -> list[Step]:
    """Return random weights of these shapes; those of equal shape and type are copies of each other."""
    generator = torch.Generator(device).manual_seed(2)
    packed_weights: dict[tuple[QuantType, int, int], PackedWeight] = {}
    steps = []
    for matrices, columns in shapes:
        weights = []
        for type, rows in matrices:
            key = (type, rows, columns)
            if key in packed_weights:
                weight = _copy(packed_weights[key])
            else:
                weight = packed_weights[key] = pack(random_rows(type, rows, columns, generator), type)
            weights.append(weight)
        steps.append((weights, columns))
    return steps


def _copy(weight: PackedWeight) -> PackedWeight:
    return replace(weight, data=weight.data.clone())
