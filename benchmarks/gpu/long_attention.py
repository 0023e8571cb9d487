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
from pathlib import Path

import torch
from layer_checks import EPS, FAILED, HEAD, HEADS, KV_HEADS, LINES, PAGE, ROTATED, Poison, check, say, summary
from layers import milliseconds
from torch import Tensor

from treeflash.kernels.attention import kernel
from treeflash.kernels.attention import reference as attention
from treeflash.kernels.kv_cache import kernel as cache_kernel
from treeflash.kernels.kv_cache.format import FORMATS, HeadPool
from treeflash.kernels.kv_cache.reference import decode, encode, unpack
from treeflash.kernels.kv_cache.rotation import rotate, rotate_back
from treeflash.kernels.norm_rope import reference as norm
from treeflash.models.step import Step

SECONDS = 80  # behind which no further part begins
WORKERS = 14
LAYERS = 16  # with attention, of the 27B
NAMES = ("f16", "bf16", "q8_0", "q5_0", "q4_0", "tq3_0")
TIMED = ("f16", "q8_0", "q5_0", "q4_0", "tq3_0")
CONTEXTS = (8 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10)
# Rows, keys, stages and warps besides those that are chosen, and splits.
VARIANTS = (
    {"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 3, "num_warps": 4},
    {"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 7, "num_warps": 4},
    {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 3, "num_warps": 8},
    {"BLOCK_M": 128, "BLOCK_N": 32, "num_stages": 3, "num_warps": 8},
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 3, "num_warps": 8},
    {"SPLITS": 32},
)


def tree_of(rows: int, batch: int, device: str) -> Step:
    """Row i hangs below row (i - 1) // 2."""
    parents = (torch.arange(rows, device=device) - 1).div(2, rounding_mode="floor").expand(batch, rows)
    slots = torch.arange(batch, device=device)
    return Step.tree(slots, torch.zeros_like(parents), parents.contiguous(), torch.zeros_like(slots))


def filled(name: str, shape: tuple[int, ...], dim: int, device: str) -> HeadPool:
    """A pool of random rows."""
    pool = HeadPool.empty(FORMATS[name], shape, dim, torch.device(device))
    rows = torch.randn(*shape, dim, device=device)
    parts = encode(rotate(rows), pool.format) if pool.format.quantised else (rows,)
    for plane, part in zip(pool.planes, parts, strict=True):
        plane.copy_(part)
    return pool


def noise(name: str, shape: tuple[int, ...], dim: int) -> HeadPool:
    """Any numbers, at once: for times."""
    pool = HeadPool.empty(FORMATS[name], shape, dim, torch.device("cuda"))
    if pool.scales is None:
        pool.codes.normal_()
    else:
        pool.codes.random_(0, 256)
        pool.scales.uniform_(0.01, 0.02)
    return pool


class Case:
    """A step's rows over a context in pages that lie anywhere."""

    def __init__(
        self,
        pair: tuple[str, str],
        rows: int,
        lengths: tuple[int, ...],
        *,
        device: str = "cuda",
        heads: tuple[int, int, int] = (HEADS, KV_HEADS, HEAD),
        window: int | None = None,
        layers: int | None = None,
    ):
        query, kv, dim = heads
        batch, pages = len(lengths), -(-(max(lengths) + 64) // PAGE)
        shape = (batch * pages, kv, PAGE)
        self.window, self.step = window, tree_of(rows, batch, device)
        self.q = torch.randn(batch, rows, query, dim, device=device)
        self.gate = torch.randn(batch, rows, query, 2 * dim, device=device)[..., dim:]
        self.pools = [
            filled(name, shape, dim, device) if layers is None else noise(name, (layers, *shape), dim)
            for name in pair
        ]
        self.table = torch.randperm(batch * pages, device=device).view(batch, pages)
        self.lengths = torch.tensor(lengths, device=device)
        self.positions = self.lengths[:, None] + self.step.positions

    def _places(self) -> tuple[Tensor, ...]:
        assert self.step.ancestors is not None
        return self.table, self.lengths, self.step.ancestors, self.positions

    def found(self, pools: list[HeadPool] | None = None) -> Tensor:
        options = {"window": self.window, "gate": self.gate}
        return kernel.paged_attention(self.q, *(pools or self.pools), *self._places(), **options)

    def wanted(self) -> Tensor:
        return attention.paged_attention(
            self.q.double(), *self.pools, *self._places(), window=self.window, gate=self.gate.double()
        )


def check_pair(pair: tuple[str, str], device: str) -> None:
    tolerance = 1.5e-2 if "bf16" in pair else 2e-3
    shapes = [
        ((HEADS, KV_HEADS, HEAD), 11, (777, 130), None),
        ((HEADS, KV_HEADS, HEAD), 24, (64, 4100), None),
    ]
    if pair[0] == pair[1]:
        shapes += [((32, 8, 128), 3, (0, 1001), None), ((16, 8, 64), 1, (65, 63), None)]
        shapes += [((HEADS, KV_HEADS, HEAD), 7, (9000, 70), 500)]
    if device == "cpu":
        shapes = [((4, 2, 64), 3, (70, 3), None), ((2, 1, 64), 2, (300, 64), 30)]
    for heads, rows, lengths, window in shapes:
        case = Case(pair, rows, lengths, device=device, heads=heads, window=window)
        with Poison():
            found = case.found()
        name = f"{'/'.join(pair)}, heads {heads}, {rows} rows, context {lengths}, window {window}"
        check(name, found, case.wanted(), tolerance)


def check_variant(name: str, number: int) -> None:
    """Other tiles against those that are chosen, and compiled for the times that follow."""
    case = Case((name, name), 24, (5000,))
    plain = case.found()
    with Variant(number):
        check(f"{name}, {VARIANTS[number]}", case.found(), plain, 2e-3)


class Variant:
    """Other tiles or another number of splits while this is open."""

    def __init__(self, number: int):
        self._chosen = dict(VARIANTS[number])

    def __enter__(self) -> None:
        self._plain = kernel.tiles, kernel.SPLITS
        kernel.SPLITS = self._chosen.pop("SPLITS", kernel.SPLITS)
        kernel.tiles = lambda *shape: {**self._plain[0](*shape), **self._chosen}

    def __exit__(self, *failure: object) -> None:
        kernel.tiles, kernel.SPLITS = self._plain


def check_pairs(device: str) -> None:
    """Every pair, and every variant, in processes of their own."""
    if device == "cpu":
        for pair in (("q8_0", "q4_0"), ("f16", "tq3_0")):
            check_pair(pair, device)
        return
    pairs = sorted(itertools.product(NAMES, NAMES), key=lambda pair: pair[0] != pair[1])
    jobs = ["/".join(pair) for pair in pairs]
    jobs += [f"{name}:{number}" for name in ("f16", "q8_0", "q4_0") for number in range(len(VARIANTS))]
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for worker in range(WORKERS):
            out = Path(folder) / f"{worker}.jsonl"
            command = [sys.executable, __file__, "--out", str(out), "--jobs", *jobs[worker::WORKERS]]
            running.append((subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT), out))
        end = time.monotonic() + 70
        for process, out in running:
            try:
                text = process.communicate(timeout=max(1.0, end - time.monotonic()))[0].decode()
            except subprocess.TimeoutExpired:
                process.kill()
                text = process.communicate()[0].decode() + "FAIL out of time\n"
            for line in text.splitlines():
                if not line.startswith("PASS"):
                    say(line)
            lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
            LINES.extend(lines)
            FAILED.extend(line["check"] for line in lines if not line["passed"])
            if process.returncode not in (0, 1) or "FAIL out of time" in text:
                FAILED.append(f"a process of checks ended with {process.returncode}")


def check_write(device: str) -> None:
    """Codes against the reference: where the last bits of a sum differ, a value may go to the next code."""
    for dim, interleaved in ((256, False), (128, True), (64, False)):
        k, v = torch.randn(2, 1, 24, KV_HEADS, 2 * dim, device=device)[..., :dim] * 3
        weight = torch.randn(dim, device=device)
        positions = torch.randint(0, 200000, (1, 24), device=device)
        angles = norm.rope_angles(positions, torch.rand(ROTATED // 2, device=device))
        places = torch.randperm(4 * PAGE, device=device)[:24]
        split = {"pages": places // PAGE, "offsets": places % PAGE, "interleaved": interleaved}
        for name in NAMES:
            pools = []
            for implementation in (cache_kernel, norm):
                shape, target = (2, 4, KV_HEADS, PAGE), torch.device(device)
                both = HeadPool.empty(FORMATS[name], shape, dim, target)
                implementation.cache_heads(k, v, weight, EPS, *angles, keys=both[0], values=both[1], **split)
                pools.append(both)
            found, wanted = pools
            label = f"write {name}, heads of {dim}"
            if found.scales is None or wanted.scales is None:
                check(label, found.codes, wanted.codes, 1e-2 if name == "bf16" else 1e-3)
                continue
            levels = [unpack(pool.codes, pool.format, dim) for pool in pools]
            share = float((levels[0] != levels[1]).sum() / (2 * 24 * KV_HEADS * dim))
            say(f"{label}: {share:.1e} of the codes differ")
            both = [decode(pool.codes, pool.scales, pool.format, dim) for pool in pools]
            # A step of a code is that large a part of a row: the coarsest has 8 of them.
            check(label, *both, 2e-2 if name == "tq3_0" else 5e-3)
            check(f"{label}, codes that differ", torch.tensor([1 + share]), torch.ones(1), 1e-3)


def check_expand(device: str) -> None:
    for name in NAMES[2:]:
        pool = filled(name, (40, KV_HEADS, PAGE), HEAD, device)
        table = torch.randperm(40, device=device)
        rows = rotate_back(decode(pool.codes, pool.scales, pool.format, HEAD))
        rows = rows[table].transpose(1, 2).flatten(0, 1)
        for first, count in ((0, 1), (77, 1999)) if device == "cuda" else ((5, 9),):
            with Poison():
                found = cache_kernel.expand(pool, table, first, count)
            check(f"expand {name}, {first}, {count}", found, rows[first : first + count], 1e-3)


def check_rows_alone(device: str) -> None:
    """Row 0 among others is bit by bit what it is alone."""
    for name in ("f16", "q8_0", "q4_0", "tq3_0"):
        for length, window in ((1000, None), (40000, None), (9000, 500)):
            case = Case((name, name), 64, (length,), window=window)
            q, gate, positions = case.q, case.gate, case.positions
            results = []
            for rows in (1, 8, 24, 64):
                case.q, case.gate, case.step = q[:, :rows], gate[:, :rows], tree_of(rows, 1, device)
                case.positions = positions[:, :rows]
                results.append(case.found()[:, :1])
            equal = all(torch.equal(result, results[0]) for result in results)
            label = f"row 0 of 1, 8, 24, 64 rows, {name}, context {length}, window {window}"
            say("EQUAL" if equal else "DIFFERS", label)
            LINES.append({"check": label, "error": 0.0 if equal else 1.0, "passed": equal})
            if not equal:
                FAILED.append(label)


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


def attention_time(name: str, length: int, rows: int, window: int | None = None, repeats: int = 15) -> float:
    """Milliseconds a layer, over layers that together are larger than the second-level cache."""
    one = 2 * length * KV_HEADS * FORMATS[name].row_bytes(HEAD)
    layers = min(LAYERS, -(-(256 << 20) // one))
    case = Case((name, name), rows, (length,), window=window, layers=layers)
    pools = [[pool[i] for pool in case.pools] for i in range(layers)]
    return milliseconds(lambda: [case.found(pool) for pool in pools], repeats=repeats) / layers


def time_attention(device: str) -> None:
    bandwidth, rate = ceilings()
    say("format context rows | us a layer, ms a step, floor ms (read, products), times the floor, TB/s")
    for name, length, rows in itertools.product(TIMED, CONTEXTS, (1, 24)):
        ms = attention_time(name, length, rows)
        read = 2 * length * KV_HEADS * FORMATS[name].row_bytes(HEAD)
        floors = [read / bandwidth * 1e3, 4 * rows * HEADS * HEAD * length / rate * 1e3]
        step, limit = LAYERS * ms, LAYERS * max(floors)
        say(
            f"{name:6s} {length >> 10:4d}K {rows:3d} | {ms * 1e3:8.1f} {step:7.3f} "
            f"{LAYERS * floors[0]:7.3f} {LAYERS * floors[1]:7.3f} {step / limit:6.2f} {read / ms / 1e9:6.2f}"
        )
        LINES.append(
            {"time": "attention", "format": name, "context": length, "rows": rows, "us": ms * 1e3,
             "step_ms": step, "floor_ms": limit}
        )  # fmt: skip


def time_windows(device: str) -> None:
    for window, rows in itertools.product((2048, 8192), (1, 24)):
        ms = attention_time("q8_0", 128 << 10, rows, window)
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
                cache_kernel.cache_heads(k, v, weight, EPS, *angles, keys=both[0], values=both[1], **places)

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
        us = attention_time(name, length, rows) * 1e3
        say(f"{name} {length >> 10}K {rows} rows, as chosen: {us:.1f} us")
        for number, chosen in enumerate(VARIANTS):
            label = " ".join(f"{key} {value}" for key, value in chosen.items())
            try:
                with Variant(number):
                    us = attention_time(name, length, rows, repeats=7) * 1e3
                say(f"    {label}: {us:.1f} us")
                LINES.append(
                    {"time": "variant", "format": name, "context": length, "rows": rows, "us": us, **chosen}
                )
            except Exception:
                say("    could not", label, traceback.format_exc(limit=1).splitlines()[-1])


def run_jobs(jobs: list[str]) -> None:
    """What a process of checks was asked for: pairs `keys/values`, variants `format:number`."""
    for job in jobs:
        try:
            with torch.inference_mode():
                if ":" in job:
                    name, number = job.split(":")
                    check_variant(name, int(number))
                else:
                    keys, values = job.split("/")
                    check_pair((keys, values), "cuda")
        except Exception:
            say("FAIL", job, traceback.format_exc())
            # A variant that a card has no room for is nobody's fault.
            if ":" not in job:
                LINES.append({"check": job, "error": 1.0, "passed": False})


def keep(out: Path | None) -> None:
    if out is not None:
        with out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in LINES)
    LINES.clear()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--jobs", nargs="*", default=[])
    options = parser.parse_args()
    torch.manual_seed(0)
    run_jobs(options.jobs)
    keep(options.out)
    parts: list[Callable[[str], None]] = [check_write, check_expand, check_pairs] if not options.jobs else []
    if parts and options.device == "cuda":
        say(torch.cuda.get_device_name(), "torch", torch.__version__)
        parts += [check_rows_alone, time_attention, time_writes, time_windows, time_expand, time_variants]
    begin = time.monotonic()
    for part in parts:
        started = time.monotonic()
        if started - begin > SECONDS:
            say("no time left for", part.__name__)
            continue
        try:
            with torch.inference_mode():
                part(options.device)
        except Exception:
            FAILED.append(part.__name__)
            say("FAIL", part.__name__, traceback.format_exc())
        summary(part.__name__, LINES)
        say(f"part {part.__name__} took {time.monotonic() - started:.1f} s")
        keep(options.out)
    say("FAILED: " + "; ".join(FAILED) if FAILED else "all checks passed")
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
