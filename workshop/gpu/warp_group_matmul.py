"""Times matmuls of few rows by warp-group mma beside those by mma of single warps, on a Hopper card.

    python -m workshop gpu.warp_group_matmul --out FILE [--types Q4_K Q6_K]

Each of a block's eight warps reads all rows of x from shared memory for its 16 rows of weights, which bounds
steps of 32 rows and more; a warp group's mma reads them once for 64 rows (kernels/quant_matmul/group.cu).
Microseconds of a matmul with weights that are not in the L2 cache, by the stages of the ring, beside the time
of its bytes at 4.4 TB/s. Checks that sums do not depend on the number of rows, and says whether they have the
bits of those by single warps (`bits_of_warps`): then some numbers of rows may have the one, others the other.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bough.bench.tuning import timed
from bough.gguf.types import QuantType
from bough.kernels.check.inputs import random_rows
from bough.kernels.quant_matmul import BUCKETS, PackedRows, PackedWeight, cuda, pack, pack_rows
from bough.kernels.quant_matmul.tiling import Tiling
from bough.kernels.runtime.device import card_of
from tests.gpu.inputs import DEVICE
from workshop.case import case
from workshop.report import Report

SHAPES = ((34816, 5120), (5120, 17408), (12800, 5120), (5120, 6144))
STAGES = range(1, 5)
# Sums in another order differ by 4e-6 to 2e-5 (simulated), a wrong order of columns by 1.
MOST_ERROR = 1e-4
TYPES = ("Q4_K", "Q5_K", "Q6_K", "Q8_0")


def multiply(x: PackedRows, out: Tensor, tiling: Tiling | None, weight: PackedWeight) -> None:
    cuda.matmuls(x, [weight], [out], tiling)


def in_turn(weights: list[PackedWeight], work: Callable[[PackedWeight], None]) -> Callable[[], None]:
    def all_of_them() -> None:
        for weight in weights:
            work(weight)

    return all_of_them


@contextmanager
def refilled_halfway(stages: int) -> Iterator[None]:
    """Let rings of so few stages be refilled in the middle of a unit, too."""
    least, cuda._MIN_HALFWAY_STAGES = cuda._MIN_HALFWAY_STAGES, stages
    cuda.variant.cache_clear()
    try:
        yield
    finally:
        cuda._MIN_HALFWAY_STAGES = least
        cuda.variant.cache_clear()


def packed(values: Tensor, *, grouped: bool) -> PackedRows:
    cuda.GROUPED_FROM = BUCKETS[0] if grouped else BUCKETS[-1] + 1
    return pack_rows(values)


def measure(report: Report, type: QuantType, shape: tuple[int, int]) -> None:
    rows, columns = shape
    generator = torch.Generator(DEVICE).manual_seed(3)
    weight = pack(random_rows(type, rows, columns, generator), type)
    copies = [weight, *(replace(weight, data=weight.data.clone()) for _ in range(int(4e8 / weight.nbytes)))]
    values, first = torch.randn(64, columns, device=DEVICE), None
    for bucket in BUCKETS:
        plain, grouped = (packed(values[:bucket], grouped=each) for each in (False, True))
        expected, found = (torch.empty(bucket, rows, device=DEVICE) for _ in range(2))
        us = {"bytes_us": round(weight.nbytes / 4.4e12 * 1e6, 2)}
        work = partial(multiply, plain, expected, None)
        us["warps_us"] = round(timed(in_turn(copies, work)) / len(copies) * 1e6, 2)
        for tiling in (Tiling(stages, wide=False, halfway=True) for stages in STAGES):
            depth = cuda.stages(card_of(DEVICE), weight.layout, bucket, tiling)
            if depth < 2 or f"groups_{depth}_us" in us:
                continue
            work = partial(multiply, grouped, found, tiling)
            us[f"groups_{depth}_us"] = round(timed(in_turn(copies, work)) / len(copies) * 1e6, 2)
            if depth < cuda._MIN_HALFWAY_STAGES:
                with refilled_halfway(depth):
                    us[f"halfway_{depth}_us"] = round(timed(in_turn(copies, work)) / len(copies) * 1e6, 2)
        multiply(plain, expected, None, weight)
        multiply(grouped, found, None, weight)
        error = float((found - expected).norm() / expected.norm())
        first = found[:8].clone() if first is None else first
        same = torch.equal(found[:8], first)
        facts = {"rows": bucket, "error": float(f"{error:.1e}"), "same": same, **us}
        facts["bits_of_warps"] = torch.equal(found, expected)
        report.check(f"{type.name} {shape}", error < MOST_ERROR and same, **facts)


@case(seconds=120)
def main(report: Report, *, types: Sequence[str] = TYPES) -> None:
    for name in types:
        for shape in SHAPES:

            def work(report: Report, name: str = name, shape: tuple[int, int] = shape) -> None:
                measure(report, QuantType[name], shape)

            report.part(work, needs=5)
