"""Attention over long contexts in every cache format on a GPU: checked, then timed against the floor.

PYTHONPATH=src python benchmarks/gpu/long_attention.py --out long_attention.jsonl
TRITON_INTERPRET=1 PYTHONPATH=src python benchmarks/gpu/long_attention.py --device cpu

Pairs of formats and tiles are checked by processes of their own, side by side, since each is compiled first.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from layer_checks import EPS, FAILED, HEAD, HEADS, KV_HEADS, LINES, PAGE, ROTATED, say, summary
from layers import milliseconds
from long_checks import (
    NAMES,
    VARIANTS,
    Case,
    Variant,
    check_behind_writes,
    check_expand,
    check_pair,
    check_write,
    noise,
    run_jobs,
)

from treeflash.kernels.attention import cuda, paged_attention
from treeflash.kernels.attention.triton_kernels import paged_attention as triton_attention
from treeflash.kernels.kv_cache import triton_kernels as cache_kernel
from treeflash.kernels.kv_cache.format import FORMATS, HeadPool
from treeflash.kernels.norm_rope import reference as norm
from treeflash.kernels.runtime.device import card_of

SECONDS = 80  # behind which no further part begins
WORKERS = 14
LAYERS = 16  # with attention, of the 27B
TIMED = ("f16", "q8_0", "q5_0", "q4_0", "tq3_0")
CONTEXTS = (8 << 10, 64 << 10, 256 << 10)


Running = list[tuple[subprocess.Popen, Path]]
Attend = Callable[..., torch.Tensor]


def start_jobs(folder: Path) -> Running:
    """Every pair, format and variant, in processes that run beside the first checks."""
    pairs = sorted(itertools.product(NAMES, NAMES), key=lambda pair: pair[0] != pair[1])
    jobs = ["/".join(pair) for pair in pairs] + list(TIMED)
    jobs += [f"{name}:{number}" for name in ("f16", "q8_0", "q4_0") for number in range(len(VARIANTS))]
    running = []
    for worker in range(WORKERS):
        out = folder / f"{worker}.jsonl"
        command = [sys.executable, __file__, "--out", str(out), "--jobs", *jobs[worker::WORKERS]]
        running.append((subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT), out))
    return running


def check_pairs(device: str, running: Running) -> None:
    """What those processes found; on a CPU two pairs."""
    if device == "cpu":
        check_pair(("q8_0", "q4_0"), device)
        check_pair(("f16", "tq3_0"), device)
    end = time.monotonic() + 70
    for process, out in running:
        try:
            text = process.communicate(timeout=max(1.0, end - time.monotonic()))[0].decode()
        except subprocess.TimeoutExpired:
            process.kill()
            text = process.communicate()[0].decode()
        for line in text.splitlines():
            if line != "all checks passed":
                say(line)
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        LINES.extend(lines)
        FAILED.extend(line["check"] for line in lines if not line["passed"])
        if process.returncode not in (0, 1):
            FAILED.append(f"a process of checks ended with {process.returncode}")


def ceilings() -> tuple[float, float]:
    """Bytes and operations a second that this card reaches."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_(0, 256)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / milliseconds(lambda: target.copy_(source), repeats=10) * 1e3
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.float16)
    rate = 2 * 8192**3 / milliseconds(lambda: a @ b, repeats=10) * 1e3
    say(f"copies at {bandwidth / 1e12:.2f} TB/s, products at {rate / 1e12:.0f} TFLOP/s")
    LINES.append({"time": "ceilings", "bandwidth": bandwidth, "rate": rate})
    return bandwidth, rate


def timed_case(name: str, length: int, rows: int, window: int | None = None) -> tuple[Case, list]:
    """Layers that together are larger than the second-level cache."""
    one = 2 * length * KV_HEADS * FORMATS[name].row_bytes(HEAD)
    layers = min(LAYERS, -(-(256 << 20) // one))
    case = Case((name, name), rows, (length,), window=window, layers=layers)
    return case, [[pool[i] for pool in case.pools] for i in range(layers)]


def attention_time(case: Case, pools: list, repeats: int = 15, attend: Attend = paged_attention) -> float:
    """Milliseconds a layer."""
    return milliseconds(lambda: [case.found(pool, attend) for pool in pools], repeats=repeats) / len(pools)


def describe(device: str) -> None:
    """Tiles of the CUDA kernel, and what the driver says of them."""
    card = card_of(torch.device("cuda", 0))
    for name, rows in itertools.product(TIMED, (1, 8, 16, 24, 32, 64)):
        tile = cuda.tile_of(card, name, name, rows * HEADS // KV_HEADS)
        if tile is None:
            say(f"{name}: Triton")
            continue
        built = cuda._kernel(tile, torch.device("cuda", 0))
        say(
            f"{name} {rows} rows: {tile.queries} queries, {tile.stages} stages, "
            f"{tile.shared_bytes} bytes shared, {built.registers} registers, "
            f"{built.spilled} bytes local, {built.occupancy} an SM"
        )


def time_attention(device: str) -> None:
    bandwidth, rate = ceilings()
    say("format context rows kernel | us a layer, with Triton; floors us (read, products), times it, TB/s")
    for name, length, rows in itertools.product(TIMED, CONTEXTS, (1, 24)):
        case, pools = timed_case(name, length, rows)
        ms = attention_time(case, pools)
        other = attention_time(case, pools, repeats=5, attend=triton_attention)
        read = 2 * length * KV_HEADS * FORMATS[name].row_bytes(HEAD)
        floors = [read / bandwidth * 1e3, 4 * rows * HEADS * HEAD * length / rate * 1e3]
        ran = case.kernel(pools[0])
        say(
            f"{name:6s} {length >> 10:4d}K {rows:3d} {ran:6s} | {ms * 1e3:8.1f} {other * 1e3:8.1f} "
            f"{1e3 * floors[0]:7.1f} {1e3 * floors[1]:7.1f} {ms / max(floors):6.2f} {read / ms / 1e9:6.2f}"
        )
        LINES.append(
            {"time": "attention", "format": name, "context": length, "rows": rows, "kernel": ran,
             "us": ms * 1e3, "triton_us": other * 1e3, "floor_us": max(floors) * 1e3}
        )  # fmt: skip


def time_rows(device: str) -> None:
    """What a tree costs by its rows."""
    for name, length in itertools.product(("q8_0", "f16"), (8 << 10, 64 << 10)):
        times = []
        for rows in (1, 8, 16, 24, 32, 48, 64):
            us = attention_time(*timed_case(name, length, rows), repeats=7) * 1e3
            times.append(f"{rows}: {us:.1f}")
            LINES.append({"time": "rows", "format": name, "context": length, "rows": rows, "us": us})
        say(f"{name} {length >> 10}K, us a layer by rows:", ", ".join(times))


def time_windows(device: str) -> None:
    for window, rows in itertools.product((2048, 8192), (1, 24)):
        ms = attention_time(*timed_case("q8_0", 128 << 10, rows, window))
        say(f"q8_0 128K, window {window}, {rows} rows: {ms * 1e3:.1f} us a layer")
        LINES.append({"time": "window", "window": window, "rows": rows, "us": ms * 1e3})


def time_writes(device: str) -> None:
    for name, rows in itertools.product(NAMES, (1, 24, 64)):
        k, v = torch.randn(2, 1, rows, KV_HEADS, HEAD, device=device)
        weight, behind = torch.randn(HEAD, device=device), torch.arange(rows, device=device)
        angles = norm.rope_angles(behind[None], torch.rand(ROTATED // 2, device=device))
        both = HeadPool.empty(FORMATS[name], (2, 1, KV_HEADS, PAGE), HEAD, torch.device(device))
        places = {"pages": torch.zeros_like(behind), "offsets": behind, "interleaved": False}

        def work(k=k, v=v, weight=weight, angles=angles, both=both, places=places) -> None:
            for _ in range(50):
                parts = (k, k, v, (weight, weight), EPS, *angles)
                cache_kernel.cache_heads(*parts, keys=both[0], values=both[1], **places)

        us = milliseconds(work) * 20
        say(f"write {name}, {rows} rows: {us:.2f} us a layer")
        LINES.append({"time": "write", "format": name, "rows": rows, "us": us})


def time_expand(device: str) -> None:
    count = 32 << 10  # 64 MiB of float16
    for name in NAMES[2:]:
        pool = noise(name, (4 * count // PAGE, KV_HEADS, PAGE), HEAD)
        table = torch.randperm(4 * count // PAGE, device=device)

        def work(pool=pool, table=table) -> None:
            for part in range(4):
                cache_kernel.expand(pool, table, part * count, count)

        us = milliseconds(work) * 250
        moved = count * KV_HEADS * (FORMATS[name].row_bytes(HEAD) + 2 * HEAD)
        say(f"expand {name}, {count} tokens: {us:.1f} us, {moved / us / 1e6:.2f} TB/s")
        LINES.append({"time": "expand", "format": name, "us": us})


def time_variants(device: str) -> None:
    """Tiles and splits besides those chosen; the best of each column is what to choose."""
    for name, length, rows in itertools.product(("q8_0", "q4_0", "f16"), (8 << 10, 64 << 10), (24, 1)):
        case, pools = timed_case(name, length, rows)
        us = attention_time(case, pools) * 1e3
        say(f"{name} {length >> 10}K {rows} rows, as chosen: {us:.1f} us")
        for number, chosen in enumerate(VARIANTS):
            label = " ".join(f"{key} {value}" for key, value in chosen.items())
            try:
                with Variant(number):
                    us = attention_time(case, pools, repeats=7) * 1e3
                say(f"    {label}: {us:.1f} us")
                LINES.append(
                    {"time": "variant", "format": name, "context": length, "rows": rows, "us": us, **chosen}
                )
            except Exception:
                say("    could not", label, traceback.format_exc(limit=1).splitlines()[-1])


def keep(out: Path | None) -> None:
    if out is not None:
        with out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in LINES)
    LINES.clear()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--jobs", nargs="*", help="of a process of checks: keys/values, format or format:variant"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.jobs:
        run_jobs(options.jobs, options.device)
        keep(options.out)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return measure(options.device, options.out, Path(folder))


def measure(device: str, out: Path | None, folder: Path) -> int:
    running = start_jobs(folder) if device == "cuda" else []
    parts: list[Callable[[str], None]] = [check_write, check_expand, partial(check_pairs, running=running)]
    if device == "cuda":
        say(torch.cuda.get_device_name(), "torch", torch.__version__)
        parts += [check_behind_writes, describe, time_attention, time_rows, time_windows, time_variants]
        parts += [time_writes, time_expand]
    begin = time.monotonic()
    for part in parts:
        started, name = time.monotonic(), getattr(part, "__name__", "check_pairs")
        if started - begin > SECONDS:
            say("no time left for", name)
            continue
        try:
            with torch.inference_mode():
                part(device)
        except Exception:
            FAILED.append(name)
            say("FAIL", name, traceback.format_exc())
        summary(name, LINES)
        say(f"part {name} took {time.monotonic() - started:.1f} s")
        keep(out)
    say("FAILED: " + "; ".join(FAILED) if FAILED else "all checks passed")
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
