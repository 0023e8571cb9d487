"""Times the small kernels of a step on a GPU, alone and between the matmuls.

    python -m workshop gpu.rows --out rows.jsonl

tests/gpu/test_norm_rope.py and test_partial_sums.py check them.
"""

from collections.abc import Callable
from functools import partial

import torch

from bough.kernels.norm_rope import cuda as norm_cuda
from bough.kernels.norm_rope import triton_kernels as norm_triton
from bough.kernels.quant_matmul import PackedRows, PartialSums, cuda, pack_rows
from tests.gpu.inputs import DELTA_DIM, DEVICE, EPS, FEED_FORWARD, VALUE_HEADS, WIDTH
from workshop.case import case
from workshop.gpu.matmul import model_steps
from workshop.report import Report, graph_ms

DELTA_WIDTH = VALUE_HEADS * DELTA_DIM  # of a delta layer's output


class Rows:
    """Inputs of a layer's small kernels, in enough buffers that the L1 cache does not hold them."""

    def __init__(self, rows: int, sets: int = 16):
        self.x, self.add = torch.randn(2, sets, 1, rows, WIDTH, device=DEVICE)
        self.weight, self.head_weight = (
            torch.randn(WIDTH, device=DEVICE),
            torch.randn(DELTA_DIM, device=DEVICE),
        )
        self.wide = torch.randn(sets, 1, rows, 2 * FEED_FORWARD, device=DEVICE)
        self.heads = torch.randn(sets, 1, rows, VALUE_HEADS, DELTA_DIM, device=DEVICE)
        self.gate = torch.randn(sets, 1, rows, DELTA_WIDTH, device=DEVICE)
        self.sets = sets

    def norm(self, i: int, by: object) -> PackedRows:
        arguments = (self.x[i % self.sets], self.add[i % self.sets], self.weight, EPS)
        return (
            norm_cuda.add_rms_norm(*arguments)
            if by is norm_cuda
            else norm_triton.add_rms_norm(*arguments, pack=True)
        )[1]

    def silu(self, i: int, by: object) -> PackedRows:
        gate, up = self.wide[i % self.sets].chunk(2, -1)
        return norm_cuda.silu_mul(gate, up) if by is norm_cuda else norm_triton.silu_mul(gate, up, pack=True)

    def gated(self, i: int, by: object) -> PackedRows:
        arguments = (self.heads[i % self.sets], self.gate[i % self.sets], self.head_weight, EPS)
        if by is norm_cuda:
            return norm_cuda.gated_rms_norm(*arguments)
        return norm_triton.gated_rms_norm(*arguments, pack=True)


def time_rows(report: Report) -> None:
    """Launch a kernel 48 times in a row: Triton's, and CUDA's with 1 to 8 thread blocks a row."""
    chosen = dict(norm_cuda.CLUSTERS)
    for rows in (8, 24, 64):
        work = Rows(rows)
        for name, kind in (("norm", norm_cuda.NORM), ("silu", norm_cuda.SILU), ("gated", norm_cuda.GATED)):
            run = getattr(work, name)

            def chain(by: object, run: Callable = run) -> None:
                for i in range(48):
                    run(i, by)

            found = {"triton": round(graph_ms(partial(chain, norm_triton)) * 1e3 / 48, 2)}
            for cluster in (1, 2, 4, 8):
                try:
                    norm_cuda.CLUSTERS[kind] = cluster
                    found[f"cuda_{cluster}"] = round(graph_ms(partial(chain, norm_cuda)) * 1e3 / 48, 2)
                finally:
                    norm_cuda.CLUSTERS.update(chosen)
            report.kernel_time(f"rows: {name}", rows, found[f"cuda_{chosen[kind]}"], **found)


class Steps:
    """All matmuls of a 27B step, each after its small kernel."""

    def __init__(self, rows: int):
        self.steps, self.work = model_steps(), Rows(rows)
        self.out = torch.empty(rows, 248320, device=DEVICE)
        self.packed = {
            k: pack_rows(torch.randn(rows, k, device=DEVICE)) for k in (WIDTH, DELTA_WIDTH, FEED_FORWARD)
        }

    def run(self, by: object, kinds: tuple[str, ...]) -> None:
        """Launch the small kernels of these kinds only; the matmuls read their output."""
        makers = {WIDTH: "norm", DELTA_WIDTH: "gated", FEED_FORWARD: "silu"}
        for i, (weights, columns) in enumerate(self.steps):
            sizes = [weight.rows for weight in weights]
            kind = makers[columns]
            x = getattr(self.work, kind)(i, by) if kind in kinds else self.packed[columns]
            cuda.matmuls(x, weights, self.out[:, : sum(sizes)].split(sizes, 1))

    def run_partial_sums(self) -> None:
        """Launch as a step does: a norm or silu adds up the split-K partial sums of the matmul before it."""
        sums: PartialSums | None = None
        for i, (weights, columns) in enumerate(self.steps):
            if columns == DELTA_WIDTH:
                x = self.work.gated(i, norm_cuda)
            elif columns == FEED_FORWARD and sums is not None:
                x = norm_cuda.silu_mul(*sums.split([FEED_FORWARD, FEED_FORWARD]))
            elif columns == FEED_FORWARD:
                x = self.work.silu(i, norm_cuda)
            else:
                stream, add = self.work.x[i % self.work.sets], self.work.add[i % self.work.sets]
                x = norm_cuda.add_rms_norm(stream, add if sums is None else sums, self.work.weight, EPS)[1]
            following = self.steps[i + 1][1] if i + 1 < len(self.steps) else DELTA_WIDTH
            if len(weights) == 1 and following != DELTA_WIDTH:
                sums = cuda.partial_matmul(x, weights[0])
            else:
                sums, sizes = None, [weight.rows for weight in weights]
                cuda.matmuls(x, weights, self.out[:, : sum(sizes)].split(sizes, 1))


def time_between(report: Report) -> None:
    """Time the matmuls without small kernels, with each kind, with all, and with split-K partial sums."""
    every = ("norm", "silu", "gated")
    for rows in (8, 24):
        steps, found = Steps(rows), {}
        for name, by, kinds in (
            ("matmuls alone", norm_cuda, ()),
            *((f"with {kind}", norm_cuda, (kind,)) for kind in every),
            ("with all, Triton", norm_triton, every),
            ("with all, CUDA", norm_cuda, every),
        ):
            found[name] = graph_ms(partial(steps.run, by, kinds), repeats=15)
        found["with all, partial sums"] = graph_ms(steps.run_partial_sums, repeats=15)
        for name, ms in found.items():
            print(f"{rows} rows, {len(steps.steps)} groups of matmuls, {name}: {ms:.3f} ms", flush=True)
        report.write(time="between matmuls", rows=rows, ms=found)
        del steps
        torch.cuda.empty_cache()


@case(seconds=75)
def main(report: Report) -> None:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    with torch.inference_mode():
        for part in (time_between, time_rows):
            report.part(part)
