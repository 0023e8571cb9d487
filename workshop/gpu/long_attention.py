"""Times attention over long contexts in every KV cache format on a GPU, against the roofline.

    python -m workshop gpu.long_attention --out long_attention.jsonl

tests/gpu/test_attention.py and test_kv_cache.py check the kernels.
"""

import itertools
import traceback
from collections.abc import Callable
from typing import Annotated

import torch

from bough.kernels.attention import cuda, paged_attention
from bough.kernels.attention.triton_kernels import paged_attention as triton_attention
from bough.kernels.kv_cache import triton_kernels as cache_kernel
from bough.kernels.kv_cache.format import FORMATS, HeadPool
from bough.kernels.norm_rope import rope_angles
from bough.kernels.runtime.device import card_of
from tests.gpu.attention_tiles import OTHER_TILES, other_tiles
from tests.gpu.inputs import (
    DEVICE,
    EPS,
    HEAD_DIM,
    HEADS,
    KV_FORMATS,
    KV_HEADS,
    PAGE,
    ROTARY_DIM,
    ROW_COUNTS,
    PagedStep,
    noise_pool,
    random_trees,
)
from workshop.case import case
from workshop.report import Report, graph_ms

ATTENTION_LAYERS = 16  # of the 27B
TIMED = ("f16", "q8_0", "q5_0", "q4_0", "tq3_0")
CONTEXTS = (8 << 10, 64 << 10, 256 << 10)

Attend = Callable[..., torch.Tensor]


def ceilings(report: Report) -> tuple[float, float]:
    """Return the bytes and the operations a second that this card reaches."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE).random_(0, 256)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / graph_ms(lambda: target.copy_(source), repeats=10) * 1e3
    a, b = torch.randn(2, 8192, 8192, device=DEVICE, dtype=torch.float16)
    rate = 2 * 8192**3 / graph_ms(lambda: a @ b, repeats=10) * 1e3
    print(f"copies at {bandwidth / 1e12:.2f} TB/s, matmuls at {rate / 1e12:.0f} TFLOP/s", flush=True)
    report.write(time="ceilings", bandwidth=bandwidth, rate=rate)
    return bandwidth, rate


def timed_step(
    name: str, length: int, rows: int, window: int | None = None, **options
) -> tuple[PagedStep, list]:
    """Return a step and its layers, together larger than the L2 cache."""
    one = 2 * length * KV_HEADS * FORMATS[name].row_bytes(HEAD_DIM)
    layers = min(ATTENTION_LAYERS, -(-(256 << 20) // one))
    step = PagedStep((name, name), rows, (length,), window=window, layers=layers, **options)
    return step, [[pool[i] for pool in step.pools] for i in range(layers)]


def attention_ms(step: PagedStep, pools: list, repeats: int = 15, attend: Attend = paged_attention) -> float:
    """Return the milliseconds of a layer."""
    return graph_ms(lambda: [step.attention(attend, pool) for pool in pools], repeats=repeats) / len(pools)


def describe(report: Report) -> None:
    """Print the tiles of the CUDA kernel with their registers, shared memory and occupancy."""
    card = card_of(DEVICE)
    for name, rows in itertools.product(TIMED, (1, 8, 16, 24, 32, 64)):
        tile = cuda.tile_of(card, name, name, rows * HEADS // KV_HEADS)
        if tile is None:
            print(f"{name}: Triton", flush=True)
            continue
        built = cuda._kernel(tile, DEVICE)
        print(
            f"{name} {rows} rows: {tile.queries} queries, {tile.stages} stages, "
            f"{tile.shared_bytes} bytes shared, {built.registers} registers, "
            f"{built.spilled} bytes local, {built.occupancy} an SM",
            flush=True,
        )


def time_attention(report: Report) -> None:
    bandwidth, rate = ceilings(report)
    print(
        "format context rows kernel | us a layer, Triton us; floors us (read, matmul), ratio, TB/s",
        flush=True,
    )
    for name, length, rows in itertools.product(TIMED, CONTEXTS, (1, 24)):
        step, pools = timed_step(name, length, rows)
        ms = attention_ms(step, pools)
        other = attention_ms(step, pools, repeats=5, attend=triton_attention)
        read = 2 * length * KV_HEADS * FORMATS[name].row_bytes(HEAD_DIM)
        floors = [read / bandwidth * 1e3, 4 * rows * HEADS * HEAD_DIM * length / rate * 1e3]
        ran = "cuda" if cuda.takes(step.q, *pools[0]) else "triton"
        print(
            f"{name:6s} {length >> 10:4d}K {rows:3d} {ran:6s} | {ms * 1e3:8.1f} {other * 1e3:8.1f} "
            f"{1e3 * floors[0]:7.1f} {1e3 * floors[1]:7.1f} {ms / max(floors):6.2f} {read / ms / 1e9:6.2f}",
            flush=True,
        )
        report.write(
            time="attention", format=name, context=length, rows=rows, kernel=ran, us=ms * 1e3,
            triton_us=other * 1e3, floor_us=max(floors) * 1e3,
        )  # fmt: skip


def time_rows(report: Report) -> None:
    """Time a tree's attention by its rows; 37 or 60 of the 64 positions of the root's block are committed."""
    for name, length in itertools.product(("f16", "q8_0", "tq3_0"), (512, 4 << 10, 32 << 10)):
        for more in (37, 60) if length == 4 << 10 else (37,):
            times = []
            for rows in ROW_COUNTS:
                step, pools = timed_step(name, length + more, rows, trees=random_trees)
                us = attention_ms(step, pools, repeats=7) * 1e3
                times.append(f"{rows}: {us:.1f}")
                report.write(time="rows", format=name, context=length + more, rows=rows, us=us)
            print(f"{name} {length} + {more}, us a layer by rows:", ", ".join(times), flush=True)


def time_windows(report: Report) -> None:
    for window, rows in itertools.product((2048, 8192), (1, 24)):
        ms = attention_ms(*timed_step("q8_0", 128 << 10, rows, window))
        print(f"q8_0 128K, window {window}, {rows} rows: {ms * 1e3:.1f} us a layer", flush=True)
        report.write(time="window", window=window, rows=rows, us=ms * 1e3)


def time_writes(report: Report) -> None:
    for name, rows in itertools.product(KV_FORMATS, (1, 24, 64)):
        k, v = torch.randn(2, 1, rows, KV_HEADS, HEAD_DIM, device=DEVICE)
        weight, offsets = torch.randn(HEAD_DIM, device=DEVICE), torch.arange(rows, device=DEVICE)
        angles = rope_angles(offsets[None], torch.rand(ROTARY_DIM // 2, device=DEVICE))
        both = HeadPool.empty(FORMATS[name], (2, 1, KV_HEADS, PAGE), HEAD_DIM, DEVICE)
        mapping = {"pages": torch.zeros_like(offsets), "offsets": offsets, "interleaved": False}

        def work(k=k, v=v, weight=weight, angles=angles, both=both, mapping=mapping) -> None:
            for _ in range(50):
                parts = (k, k, v, (weight, weight), EPS, *angles)
                cache_kernel.cache_heads(*parts, keys=both[0], values=both[1], **mapping)

        us = graph_ms(work) * 20
        print(f"write {name}, {rows} rows: {us:.2f} us a layer", flush=True)
        report.write(time="write", format=name, rows=rows, us=us)


def time_expand(report: Report) -> None:
    count = 32 << 10  # 64 MiB of float16
    for name in KV_FORMATS[2:]:
        pool = noise_pool(name, (4 * count // PAGE, KV_HEADS, PAGE), HEAD_DIM)
        table = torch.randperm(4 * count // PAGE, device=DEVICE)

        def work(pool=pool, table=table) -> None:
            for part in range(4):
                cache_kernel.expand(pool, table, part * count, count)

        us = graph_ms(work) * 250
        moved = count * KV_HEADS * (FORMATS[name].row_bytes(HEAD_DIM) + 2 * HEAD_DIM)
        print(f"expand {name}, {count} tokens: {us:.1f} us, {moved / us / 1e6:.2f} TB/s", flush=True)
        report.write(time="expand", format=name, us=us)


def time_tiles(report: Report) -> None:
    """Time tiles and splits other than the chosen ones."""
    for name, length, rows in itertools.product(("q8_0", "q4_0", "f16"), (8 << 10, 64 << 10), (24, 1)):
        step, pools = timed_step(name, length, rows)
        us = attention_ms(step, pools) * 1e3
        print(f"{name} {length >> 10}K {rows} rows, as chosen: {us:.1f} us", flush=True)
        for chosen in OTHER_TILES:
            label = " ".join(f"{key} {value}" for key, value in chosen.items())
            try:
                with other_tiles(chosen):
                    us = attention_ms(step, pools, repeats=7) * 1e3
                print(f"    {label}: {us:.1f} us", flush=True)
                report.write(time="variant", format=name, context=length, rows=rows, us=us, **chosen)
            except Exception:
                print("    could not", label, traceback.format_exc(limit=1).splitlines()[-1], flush=True)


@case(seconds=80)
def main(report: Report, *, only: Annotated[str, "one part, for example rows"] = "") -> None:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    parts = (describe, time_attention, time_rows, time_windows, time_tiles, time_writes, time_expand)
    with torch.inference_mode():
        for part in parts:
            if not only or part.__name__.endswith(f"_{only}"):
                report.part(part)
