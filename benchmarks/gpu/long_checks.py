"""What the benchmark of long attention checks: the cache's kernels on a GPU against their references."""

import itertools
import traceback
from collections.abc import Callable
from dataclasses import replace

import torch
from layer_checks import EPS, HEAD, HEADS, KV_HEADS, LINES, PAGE, ROTATED, Poison, check, say
from torch import Tensor

from treeflash.kernels.attention import cuda, paged_attention, triton_kernels
from treeflash.kernels.attention import reference as attention
from treeflash.kernels.kv_cache import triton_kernels as cache_kernel
from treeflash.kernels.kv_cache.format import FORMATS, HeadPool
from treeflash.kernels.kv_cache.reference import decode, encode, unpack
from treeflash.kernels.kv_cache.rotation import rotate, rotate_back
from treeflash.kernels.norm_rope import reference as norm
from treeflash.models.step import Step

NAMES = ("f16", "bf16", "q8_0", "q5_0", "q4_0", "tq3_0")
# Tiles of the CUDA kernel besides those that are chosen, and splits.
VARIANTS = (
    {"queries": 48},
    {"queries": 96},
    {"queries": 144, "stages": 2},
    {"stages": 2},
    {"stages": 3},
    {"stages": 4, "resident": 1},
    {"grouped": False},
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

    def found(
        self, pools: list[HeadPool] | None = None, attend: Callable[..., Tensor] = paged_attention
    ) -> Tensor:
        options = {"window": self.window, "gate": self.gate}
        return attend(self.q, *(pools or self.pools), *self._places(), **options)

    def kernel(self, pools: list[HeadPool] | None = None) -> str:
        """Which one `paged_attention` takes."""
        if not self.q.is_cuda:
            return "torch"
        return "cuda" if cuda.takes(self.q, *(pools or self.pools)) else "triton"

    def wanted(self) -> Tensor:
        return attention.paged_attention(
            self.q.double(), *self.pools, *self._places(), window=self.window, gate=self.gate.double()
        )


def check_pair(pair: tuple[str, str], device: str) -> None:
    tolerance = 1.5e-2 if "bf16" in pair else 2e-3
    shapes = [
        ((HEADS, KV_HEADS, HEAD), 11, (777, 130), None),
        ((HEADS, KV_HEADS, HEAD), 24, (64, 4100), None),
        ((HEADS, KV_HEADS, HEAD), 1, (20001, 1), None),
    ]
    if pair[0] == pair[1]:
        shapes += [((32, 8, 128), 3, (0, 1001), None), ((16, 8, 64), 1, (65, 63), None)]
        shapes += [((HEADS, KV_HEADS, HEAD), 7, (9000, 70), 500), ((HEADS, KV_HEADS, HEAD), 24, (9001,), 500)]
        shapes += [((HEADS, KV_HEADS, HEAD), rows, (17000, 63), None) for rows in (33, 48, 64)]
    if device == "cpu":
        shapes = [((4, 2, 64), 3, (70, 3), None), ((2, 1, 64), 2, (300, 64), 30)]
    for heads, rows, lengths, window in shapes:
        case = Case(pair, rows, lengths, device=device, heads=heads, window=window)
        name = f"{'/'.join(pair)}, heads {heads}, {rows} rows, context {lengths}, window {window}"
        wanted = case.wanted()
        with Poison():
            found = case.found() if device == "cuda" else case.found(attend=triton_kernels.paged_attention)
        check(f"{case.kernel()}, {name}", found, wanted, tolerance)
        if case.kernel() == "cuda" and rows == 24 and window is None and pair[0] == pair[1]:
            with Poison():
                found = case.found(attend=triton_kernels.paged_attention)
            check(f"triton, {name}", found, wanted, tolerance)


def check_variant(name: str, number: int) -> None:
    """Other tiles against those that are chosen, and compiled for the times that follow."""
    tolerance = 1e-3 if {"SPLITS", "grouped"} & set(VARIANTS[number]) else 1e-12
    for rows in (24, 1):
        case = Case((name, name), rows, (5000,))
        plain = case.found()
        with Variant(number):
            found = case.found()
        check(f"{name}, {rows} rows, {VARIANTS[number]}", found, plain, tolerance)


class Variant:
    """Other tiles or another number of splits while this is open."""

    def __init__(self, number: int):
        self._chosen = dict(VARIANTS[number])

    def __enter__(self) -> None:
        self._plain = cuda.tile_of, triton_kernels.SPLITS
        triton_kernels.SPLITS = cuda.SPLITS = self._chosen.pop("SPLITS", triton_kernels.SPLITS)
        cuda.tile_of = lambda *shape, **more: replace(self._plain[0](*shape, **more), **self._chosen)
        cuda._kernel.cache_clear()

    def __exit__(self, *failure: object) -> None:
        cuda.tile_of, triton_kernels.SPLITS = self._plain
        cuda.SPLITS = triton_kernels.SPLITS
        cuda._kernel.cache_clear()


def check_write(device: str) -> None:
    """Codes against the reference: where the last bits of a sum differ, a value may go to the next code."""
    for dim, interleaved in ((256, False), (128, True), (64, False))[-1 if device == "cpu" else 0 :]:
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
                parts = (k, k, v, (weight, weight), EPS, *angles)
                implementation.cache_heads(*parts, keys=both[0], values=both[1], **split)
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


def check_behind_writes(device: str) -> None:
    """Rows that the kernel in front has only just written, seen by attention that began before that."""
    for name, rows in itertools.product(("f16", "q8_0", "tq3_0"), (1, 24)):
        case, turns = Case((name, name), rows, (9000,)), 6
        parts = torch.randn(2, 2, 1, rows, KV_HEADS, HEAD, device=device)
        pages, offsets = torch.zeros(2, rows, dtype=torch.int64, device=device)
        angles = norm.rope_angles(case.positions, torch.rand(ROTATED // 2, device=device))
        options = {"keys": case.pools[0], "values": case.pools[1], "pages": pages, "offsets": offsets}

        def write(turn: int, parts: Tensor = parts, angles: tuple = angles, options: dict = options) -> None:
            cache_kernel.cache_heads(*parts[turn % 2], None, EPS, *angles, interleaved=False, **options)

        found = []
        write(0)
        case.found()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for turn in range(turns):
                write(turn)
                found.append(case.found())
        wrong, lengths = 0, range(8000, 9000, 17)
        for length in lengths:
            case.lengths.fill_(length)
            place = length + torch.arange(rows, device=device)
            pages.copy_(case.table[0, place // PAGE])
            offsets.copy_(place % PAGE)
            wanted = []
            for turn in range(2):
                write(turn)
                torch.cuda.synchronize()
                wanted.append(case.found())
            graph.replay()
            wrong += not all(torch.equal(each, wanted[turn % 2]) for turn, each in enumerate(found))
        label = f"{case.kernel()}, {name}, {rows} rows: as written by the kernel in front"
        check(f"{label}, lengths that differ", torch.tensor([1.0 + wrong]), torch.ones(1), 1e-6)


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


def check_rows_alone(name: str) -> None:
    """Row 0 among others is bit by bit what it is alone."""
    for length, window in ((1000, None), (40000, None), (9000, 500)):
        case = Case((name, name), 64, (length,), window=window)
        q, gate, positions = case.q, case.gate, case.positions
        results = []
        for rows in (1, 3, 8, 16, 24, 48, 64) if window is None else (1, 8, 24, 64):
            case.q, case.gate, case.step = q[:, :rows], gate[:, :rows], tree_of(rows, 1, "cuda")
            case.positions = positions[:, :rows]
            results.append(case.found()[:, :1])
        equal = all(torch.equal(result, results[0]) for result in results)
        label = f"{case.kernel()}, row 0 of 1 to 64 rows, {name}, context {length}, window {window}"
        say("EQUAL" if equal else "DIFFERS", label)
        LINES.append({"check": label, "error": 0.0 if equal else 1.0, "passed": equal})


def run_jobs(jobs: list[str], device: str) -> None:
    """What a process of checks was asked for: pairs `keys/values`, variants `format:number`, or a format."""
    for job in jobs:
        try:
            with torch.inference_mode():
                if ":" in job:
                    name, number = job.split(":")
                    check_variant(name, int(number))
                elif "/" in job:
                    keys, values = job.split("/")
                    check_pair((keys, values), device)
                else:
                    check_rows_alone(job)
        except Exception:
            # A variant that a card has no room for is nobody's fault.
            if ":" in job:
                say("could not", job, traceback.format_exc(limit=1).splitlines()[-1])
            else:
                say("FAIL", job, traceback.format_exc())
                LINES.append({"check": job, "error": 1.0, "passed": False})
