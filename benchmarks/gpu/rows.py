"""The small kernels of a step on a GPU: checked against references, then timed alone and between products.

PYTHONPATH=src python benchmarks/gpu/rows.py --out rows.jsonl

--device cpu tries the Triton kernels' checks (with TRITON_INTERPRET=1).
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from layer_checks import (
    BUCKETS,
    EPS,
    FAILED,
    HEAD,
    INNER,
    KV_HEADS,
    LINES,
    PAGE,
    WIDTH,
    Poison,
    check,
    check_packed,
    say,
    summary,
    tree_of,
)
from layers import milliseconds, report
from matmul import model_steps
from matmul_checks import TUNED
from row_checks import check_chain, check_embedding, check_places, equal

from treeflash.bench.tuning import random_rows
from treeflash.kernels.commit import reference as commit
from treeflash.kernels.commit import triton_kernels as commit_kernel
from treeflash.kernels.norm_rope import cuda as norm_cuda
from treeflash.kernels.norm_rope import reference as norm
from treeflash.kernels.norm_rope import ring
from treeflash.kernels.norm_rope import triton_kernels as norm_kernel
from treeflash.kernels.quant_matmul import (
    PackedRows,
    PartialSums,
    cuda,
    pack,
    pack_rows,
    packed_matmul,
    partial_matmul,
)
from treeflash.kernels.runtime.device import card_of
from treeflash.kernels.runtime.nvrtc import compile_cubin

SECONDS = 75  # behind which no further part begins
HEADS_INNER = (48, 128)  # heads of a delta layer's output
HEAD_DIMS = (128, 32)
# Rows and widths by blocks a row.
_EVERY = ((1, WIDTH), (8, WIDTH), (24, 1000), (64, WIDTH), (3, 100), (2, INNER))
SIZES = {1: _EVERY, 2: _EVERY[1:2], 4: _EVERY[1:2], 8: _EVERY}


def check_rows() -> None:
    """The CUDA kernels before a product: against the reference's floats, for other cards and Hopper; row 0
    bit-equal in every number of rows."""
    chosen = dict(norm_cuda.CLUSTERS)
    first: dict[str, PackedRows] = {}
    try:
        for cluster, sizes in SIZES.items():
            norm_cuda.CLUSTERS.update(dict.fromkeys(chosen, cluster))
            compile_rows({width for _, width in sizes})
            for rows, width in sizes:
                _check_rows(f"{rows} x {width}, {cluster} blocks a row", rows, width)
        norm_cuda.CLUSTERS.update(chosen)
        wide = torch.randn(64, 2 * INNER, device="cuda")
        weight = torch.randn(INNER, device="cuda")
        for rows in BUCKETS:
            x, y = wide[None, :rows, :INNER], wide[None, :rows, INNER:]
            found = {
                "norm": norm_cuda.add_rms_norm(x, y, weight, EPS)[1],
                "silu": norm_cuda.silu_mul(x, y),
                "gated": norm_cuda.gated_rms_norm(
                    x[..., :6144].contiguous().unflatten(-1, HEADS_INNER), y[..., :6144], weight[:128], EPS
                ),
            }
            for name, packed in found.items():
                one = first.setdefault(name, packed)
                equal(f"{name} of row 0, {rows} rows", packed.data[:, 0], one.data[:, 0])
                equal(f"{name} scale of row 0, {rows} rows", packed.scale[:1], one.scale[:1])
    finally:
        norm_cuda.CLUSTERS.update(chosen)


def compile_rows(widths: set[int]) -> None:
    """What `_check_rows` needs, several at a time: one block a row, as on other cards, takes seconds each."""
    card = card_of(torch.device("cuda", torch.cuda.current_device()))
    shapes = {
        shape
        for width in widths
        for shape in (
            *(norm_cuda.shape_of(kind, width, clusters=True) for kind in (norm_cuda.NORM, norm_cuda.SILU)),
            *(
                norm_cuda.shape_of(norm_cuda.GATED, heads_of(width) * dim, dim, clusters=True)
                for dim in HEAD_DIMS
            ),
        )
    }

    def build(shape: norm_cuda.Shape) -> bytes:
        return compile_cubin(norm_cuda.source(), defines=shape.defines(card.pdl), arch=card.arch)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(build, shapes))


def heads_of(width: int) -> int:
    return 4 * (width // 512) + 1


def _check_rows(name: str, rows: int, width: int) -> None:
    wide = torch.randn(1, rows, 2 * width + 8, device="cuda")
    wide *= 10.0 ** torch.randint(-6, 6, (1, rows, 1), device="cuda")
    x, y, weight = wide[..., :width], wide[..., width + 4 : 2 * width + 4], torch.randn(width, device="cuda")
    assert norm_cuda.takes(x, y), "made for such rows"
    with Poison():
        total, packed = norm_cuda.add_rms_norm(x, y, weight, EPS)
        alone = norm_cuda.add_rms_norm(x, None, weight, EPS)[1]
        product = norm_cuda.silu_mul(x.clamp(-30, 30), y)
    check(f"rows: total {name}", total, x + y, 1e-6)
    check_packed(f"rows: norm {name}", packed, norm.add_rms_norm(x, y, weight, EPS)[1])
    check_packed(f"rows: norm alone {name}", alone, norm.rms_norm(x, weight, EPS))
    check_packed(f"rows: silu {name}", product, norm.silu_mul(x.clamp(-30, 30), y))
    for dim in HEAD_DIMS:
        count, weight = heads_of(width), torch.randn(dim, device="cuda")
        heads = torch.randn(1, rows, count, dim, device="cuda")
        gate = torch.randn(1, rows, count * dim + 4, device="cuda")[..., 4:]
        with Poison():
            packed = norm_cuda.gated_rms_norm(heads, gate, weight, EPS)
        check_packed(
            f"rows: gated {count} heads of {dim}, {name}",
            packed,
            norm.gated_rms_norm(heads, gate, weight, EPS),
        )


def check_open() -> None:
    """Sums left open are those of the closed product, bit by bit, and norm and silu of them likewise."""
    generator = torch.Generator("cuda").manual_seed(6)
    for type in TUNED:
        for n, k in ((5120, 6144), (5120, INNER), (2 * INNER, 5120), (300, 512), (128, 5120)):
            weight = pack(random_rows(type, n, k, generator), type)
            for rows in (1, 8, 24, 61):
                name = f"{type.name} {n}x{k}, {rows} rows"
                x = pack_rows(torch.randn(rows, k, device="cuda"))
                with Poison():
                    wanted = packed_matmul(x, weight)
                    sums = partial_matmul(x, weight)
                closed = sums.reduced()
                equal(f"open {name}", closed, wanted)
                if n == WIDTH:
                    stream, factor = torch.randn(1, rows, n, device="cuda"), torch.randn(n, device="cuda")
                    results = [
                        norm_cuda.add_rms_norm(stream, add, factor, EPS) for add in (sums, closed[None])
                    ]
                    equal(f"norm of open {name}: total", results[0][0], results[1][0])
                    packed = [result[1] for result in results]
                elif n == 2 * INNER:
                    packed = [
                        norm_cuda.silu_mul(*sums.split([INNER, INNER])),
                        norm_cuda.silu_mul(*closed[None].chunk(2, -1)),
                    ]
                else:
                    continue
                equal(f"rows of open {name}", packed[0].data[:, :rows], packed[1].data[:, :rows])
                equal(f"rows of open {name}: scales", packed[0].scale, packed[1].scale)


def check_commit(device: str) -> None:
    """The path that stays and the rows that move, against the reference; pages in any order, odd widths."""
    for rows in (1, 8, 24, 64):
        step = tree_of(rows, 2, device=device)
        slots = torch.tensor([2, 0], device=device)
        for last in ([rows - 1, -1], [0, rows // 2]):
            state = [
                torch.randint(0, 64, (3, 64), device=device),
                *torch.randint(0, 9, (2, 3), device=device),
            ]
            results = []
            for implementation in (commit_kernel, commit):
                path, count, lengths = (part.clone() for part in state)
                kept = implementation.commit_path(
                    step.ancestors, torch.tensor(last, device=device), slots, path=path, count=count,
                    lengths=lengths,
                )  # fmt: skip
                generator = torch.Generator().manual_seed(1)
                planes = [
                    torch.randint(0, 255, (2, 40, KV_HEADS, PAGE, width), generator=generator)
                    .to(device)
                    .to(dtype)
                    for width, dtype in ((HEAD, torch.float16), (6, torch.float16), (21, torch.uint8))
                ]
                table = torch.randperm(39, generator=generator).view(3, 13).to(device)
                implementation.move_rows(planes, kept, slots, table)
                results.append((kept.counts, kept.starts, kept.source, path, count, lengths, *planes))
            for number, (found, wanted) in enumerate(zip(*results, strict=True)):
                name = f"commit {rows} rows, last {last}, tensor {number}"
                equal(name, found, wanted)


def check_ring(device: str) -> None:
    rows, heads, dim, size = 16, 8, 128, 40
    cos, sin = norm.rope_angles(
        torch.randint(0, 9000, (2, rows), device=device), torch.rand(dim // 2, device=device)
    )
    k, v = torch.randn(2, 2, rows, heads, dim + 4, device=device)[..., :dim]
    weight = torch.randn(dim, device=device)
    rings = torch.randn(2, 3, size, heads, dim, device=device).half()
    for counts in ((0, 16), (1, 5)):
        places = {
            "slots": torch.tensor([2, 0], device=device),
            "lengths": torch.tensor([33, 99, 30], device=device),
            "count": torch.tensor(counts, device=device),
        }
        found = []
        for implementation in (ring, norm):
            pools = [part.clone() for part in rings]
            implementation.ring_heads(k, v, weight, EPS, cos, sin, keys=pools[0], values=pools[1], **places)
            found.append(torch.stack(pools))
        check(f"rings, {counts}", found[0], found[1], 1e-4)
        equal(f"rings, {counts}: what is touched", found[0] == rings, found[1] == rings)


class Rows:
    """Inputs of a layer's small kernels, in as many buffers as keep them out of the first-level cache."""

    def __init__(self, rows: int, sets: int = 16):
        self.x, self.add = torch.randn(2, sets, 1, rows, WIDTH, device="cuda")
        self.weight, self.head_weight = torch.randn(WIDTH, device="cuda"), torch.randn(128, device="cuda")
        self.wide = torch.randn(sets, 1, rows, 2 * INNER, device="cuda")
        self.heads = torch.randn(sets, 1, rows, *HEADS_INNER, device="cuda")
        self.gate = torch.randn(sets, 1, rows, 6144, device="cuda")
        self.sets = sets

    def norm(self, i: int, by: object) -> PackedRows:
        arguments = (self.x[i % self.sets], self.add[i % self.sets], self.weight, EPS)
        return (
            norm_cuda.add_rms_norm(*arguments)
            if by is norm_cuda
            else norm_kernel.add_rms_norm(*arguments, pack=True)
        )[1]

    def silu(self, i: int, by: object) -> PackedRows:
        gate, up = self.wide[i % self.sets].chunk(2, -1)
        return norm_cuda.silu_mul(gate, up) if by is norm_cuda else norm_kernel.silu_mul(gate, up, pack=True)

    def gated(self, i: int, by: object) -> PackedRows:
        arguments = (self.heads[i % self.sets], self.gate[i % self.sets], self.head_weight, EPS)
        if by is norm_cuda:
            return norm_cuda.gated_rms_norm(*arguments)
        return norm_kernel.gated_rms_norm(*arguments, pack=True)


def time_rows() -> None:
    """A kernel behind itself, 48 times: Triton's, and CUDA's with 1 to 8 blocks a row."""
    chosen = dict(norm_cuda.CLUSTERS)
    for rows in (8, 24, 64):
        work = Rows(rows)
        for name, kind in (("norm", norm_cuda.NORM), ("silu", norm_cuda.SILU), ("gated", norm_cuda.GATED)):
            run = getattr(work, name)

            def chain(by: object, run: Callable = run) -> None:
                for i in range(48):
                    run(i, by)

            found = {"triton": round(milliseconds(partial(chain, norm_kernel)) * 1e3 / 48, 2)}
            for cluster in (1, 2, 4, 8):
                try:
                    norm_cuda.CLUSTERS[kind] = cluster
                    found[f"cuda_{cluster}"] = round(milliseconds(partial(chain, norm_cuda)) * 1e3 / 48, 2)
                finally:
                    norm_cuda.CLUSTERS.update(chosen)
            report(f"rows: {name}", rows, found[f"cuda_{chosen[kind]}"], **found)


class Steps:
    """All products of a 27B step with the small kernel that stands before each of them."""

    def __init__(self, rows: int):
        self.steps, self.work = model_steps(), Rows(rows)
        self.out = torch.empty(rows, 248320, device="cuda")
        self.packed = {k: pack_rows(torch.randn(rows, k, device="cuda")) for k in (5120, 6144, INNER)}

    def run(self, by: object, kinds: tuple[str, ...]) -> None:
        """With the small kernels of these kinds only; what they give is what the products read."""
        makers = {5120: "norm", 6144: "gated", INNER: "silu"}
        for i, (weights, columns) in enumerate(self.steps):
            sizes = [weight.rows for weight in weights]
            kind = makers[columns]
            x = getattr(self.work, kind)(i, by) if kind in kinds else self.packed[columns]
            cuda.matmuls(x, weights, self.out[:, : sum(sizes)].split(sizes, 1))

    def run_open(self) -> None:
        """As the step does it: sums before a norm or silu stay open."""
        left: PartialSums | None = None
        for i, (weights, columns) in enumerate(self.steps):
            if columns == 6144:
                x = self.work.gated(i, norm_cuda)
            elif columns == INNER and left is not None:
                x = norm_cuda.silu_mul(*left.split([INNER, INNER]))
            elif columns == INNER:
                x = self.work.silu(i, norm_cuda)
            else:
                stream, add = self.work.x[i % self.work.sets], self.work.add[i % self.work.sets]
                x = norm_cuda.add_rms_norm(stream, add if left is None else left, self.work.weight, EPS)[1]
            following = self.steps[i + 1][1] if i + 1 < len(self.steps) else 6144
            if len(weights) == 1 and following != 6144:
                left = cuda.partial_matmul(x, weights[0])
            else:
                left, sizes = None, [weight.rows for weight in weights]
                cuda.matmuls(x, weights, self.out[:, : sum(sizes)].split(sizes, 1))


def time_between() -> None:
    """What the small kernels add to the products: none, each kind, all of them, and with sums left open."""
    every = ("norm", "silu", "gated")
    for rows in (8, 24):
        steps, found = Steps(rows), {}
        for name, by, kinds in (
            ("products alone", norm_cuda, ()),
            *((f"with {kind}", norm_cuda, (kind,)) for kind in every),
            ("with all, Triton", norm_kernel, every),
            ("with all, CUDA", norm_cuda, every),
        ):
            found[name] = milliseconds(partial(steps.run, by, kinds), repeats=15)
        found["with all, sums open"] = milliseconds(steps.run_open, repeats=15)
        for name, ms in found.items():
            say(f"{rows} rows, {len(steps.steps)} groups of products, {name}: {ms:.3f} ms")
        LINES.append({"time": "between products", "rows": rows, "ms": found})
        del steps
        torch.cuda.empty_cache()


def part_of(check: Callable[[str], None], device: str) -> Callable[[], None]:
    def run() -> None:
        check(device)

    run.__name__ = check.__name__
    return run


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = options.device == "cuda"
    say(torch.cuda.get_device_name() if on_gpu else "CPU", "torch", torch.__version__)
    anywhere = (check_commit, check_ring, check_embedding, check_places)
    parts = [part_of(check, options.device) for check in anywhere]
    if on_gpu:
        parts = [check_rows, check_open, check_chain, *parts, time_between, time_rows]
    begin = time.monotonic()
    for part in parts:
        if time.monotonic() - begin > SECONDS:
            say("no time left for", part.__name__)
            continue
        try:
            with torch.inference_mode():
                part()
        except Exception:
            FAILED.append(part.__name__)
            say("FAIL", part.__name__)
            traceback.print_exc()
            sys.stderr.flush()
        summary(part.__name__, LINES)
        if options.out is not None:
            with options.out.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in LINES)
        LINES.clear()
    say("FAILED: " + "; ".join(FAILED) if FAILED else "all checks passed")
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
