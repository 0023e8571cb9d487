"""What the quantised products must satisfy on a CUDA device; knows no times."""

import json
import time
from pathlib import Path

import torch
from torch import Tensor

from treeflash.bench.tuning import random_rows
from treeflash.gguf.quants import dequantise
from treeflash.gguf.types import QuantType
from treeflash.kernels.quant_matmul import (
    BUCKETS,
    PackedWeight,
    cuda,
    layout_of,
    pack,
    packed_matmul,
    packed_matmuls,
    prepare,
    unpack,
)
from treeflash.kernels.quant_matmul.layout import DENSE, LAYOUTS
from treeflash.kernels.runtime.device import card_of

DEVICE = torch.device("cuda", 0)
Q = QuantType
TUNED = (Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q8_0)


class Log:
    """Prints lines, writes records, counts failures."""

    def __init__(self, path: str | None):
        self._file = Path(path).open("w") if path else None  # noqa: SIM115
        self.failures = 0

    def say(self, text: str) -> None:
        print(text, flush=True)

    def record(self, **fields: object) -> None:
        if self._file is not None:
            self._file.write(json.dumps(fields) + "\n")
            self._file.flush()

    def check(self, name: str, good: bool, detail: str = "") -> None:
        self.failures += not good
        self.record(check=name, passed=good, detail=detail)
        if not good or detail:
            self.say(f"{'PASS' if good else 'FAIL'} {name} {detail}")


def bound(type: QuantType) -> float:
    """What rounding to float16 explains in the worst of many rows with a few outliers. Where a minimum is
    taken off, it and the scale are each rounded before: arithmetic in torch that rounds at the same places
    gives 1.0e-3 for Q4_K and 1.3e-3 for Q5_K in 37x256, 4e-4 in 1000x5120; in 200 rows of 37x96, over 150
    seeds, up to 1.4e-3 for Q4_1 and 1.7e-3 for Q5_1, 0.8e-3 for Q4_0 and Q8_0."""
    return 2e-3 if layout_of(type).scales in ("six", "affine") else 1e-3


def error(found: Tensor, expected: Tensor) -> float:
    """The largest relative error of a row."""
    return float(((found.double() - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-300)).max())


def spread_rows(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Rows of very different magnitude, with outliers: float16 alone would overflow."""
    x = torch.randn(rows, columns, device=DEVICE, generator=generator)
    x[:, :: max(1, columns // 7)] *= 50
    return x * torch.logspace(-4, 6, rows, device=DEVICE)[:, None] if rows > 1 else x * 1e5


def check(log: Log) -> None:
    generator = torch.Generator(DEVICE).manual_seed(int(time.time()))
    start = time.time()
    prepare([*LAYOUTS.values(), DENSE], DEVICE)
    log.say(f"{len(BUCKETS) * (len(LAYOUTS) + 1)} variants ready in {time.time() - start:.1f} s")
    card, tilings = card_of(DEVICE), cuda.tilings_of(DEVICE)
    for type in (*TUNED, Q.F16):
        found = []
        for bucket in BUCKETS:
            matmul = cuda.variant(layout_of(type), bucket, tilings[bucket], DEVICE).matmul
            depth = cuda.stages(card, layout_of(type), bucket, tilings[bucket])
            found.append(f"{bucket}: r{matmul.registers} s{matmul.spilled} x{matmul.occupancy} d{depth}")
            log.record(
                variant=type.name, bucket=bucket, registers=matmul.registers, spilled=matmul.spilled,
                occupancy=matmul.occupancy, stages=depth,
            )  # fmt: skip
        log.say(f"variants {type.name} (registers, spilled bytes, blocks an SM, stages) {'; '.join(found)}")
    for type in (*LAYOUTS, Q.F16, Q.BF16, Q.F32):
        worst, wide = 0.0, type.block_elements == 256
        for rows, columns in ((37, 256 if wide else 96), (300, 1280), (1000, 5120), (5120, 1536), (128, 512)):
            data = random_rows(type, rows, columns, generator)
            weight = pack(data, type)
            if type not in (Q.F32, Q.BF16):
                name = f"repack {type.name} {rows}x{columns}"
                log.check(name, torch.equal(unpack(weight), dequantise(data, type)))
            values = unpack(weight).double()
            x = spread_rows(64, columns, generator)
            expected = x.double() @ values.T
            first = None
            for count in (1, 3, 8, 13, 16, 20, 24, 32, 41, 48, 64):
                out = torch.full((count, rows + 3), float("nan"), device=DEVICE)
                packed_matmul(x[:count], weight, out[:, :rows])
                found = error(out[:, :rows], expected[:count])
                worst = max(worst, found)
                name = f"product {type.name} {rows}x{columns} {count} rows"
                good = found < bound(type) and bool(out[:, rows:].isnan().all())
                log.check(name, good, "" if good else f"{found:.1e}")
                again = packed_matmul(x[:count], weight)
                log.check(f"{name} again", torch.equal(again, out[:, :rows]))
                first = out[0, :rows].clone() if first is None else first
                log.check(f"{name} row 0 equal", torch.equal(first, out[0, :rows]))
            moved = packed_matmul(torch.cat([x[40:41], x[:9], x[:1]]), weight)
            log.check(f"row 0 elsewhere {type.name} {rows}x{columns}", torch.equal(moved[10], first))
            for count in (65, 200):
                many = spread_rows(count, columns, generator)
                found = error(packed_matmul(many, weight), many.double() @ values.T)
                name = f"many {type.name} {rows}x{columns} {count} rows"
                log.check(name, found < bound(type), "" if found < bound(type) else f"{found:.1e}")
        log.say(f"worst relative error of a row, {type.name}: {worst:.2e}")
    weights = [
        pack(random_rows(t, n, 1024, generator), t) for t, n in ((Q.Q4_K, 200), (Q.Q6_K, 77), (Q.Q8_0, 96))
    ]
    check_together(log, generator)
    x = spread_rows(5, 1024, generator)
    log.check(
        "zero rows of x", not bool(packed_matmul(torch.zeros(3, 1024, device=DEVICE), weights[0]).any())
    )
    graph_check(log, weights, x)


def check_together(log: Log, generator: torch.Generator) -> None:
    """Launches that overlap give what they give alone, in a graph too, with a kernel before that is slow to
    make x and one behind that reads all of y at once."""
    mix = ((Q.Q5_K, 10240), (Q.Q4_K, 6144), (Q.Q8_0, 96), (Q.Q6_K, 1024), (Q.F16, 300))
    weights = [pack(random_rows(t, n, 5120, generator), t) for t, n in mix]
    for count in (1, 24, 33, 64):
        x = spread_rows(count, 5120, generator)
        alone = torch.cat([packed_matmul(x, weight) for weight in weights], 1)
        hidden = torch.zeros_like(x)
        mixer = torch.eye(5120, device=DEVICE)
        worst = []

        def step(hidden=hidden, mixer=mixer) -> Tensor:
            return packed_matmuls(hidden @ mixer + 0 * hidden, weights) * 1.0

        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            out = [step() for _ in range(3)]
            graph.capture_end()
        hidden.copy_(x)
        torch.cuda.synchronize()
        for _ in range(10):
            for part in out:
                part.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            worst.append(all(torch.equal(part, alone) for part in out))
        eager = all(torch.equal(packed_matmuls(x, weights), alone) for _ in range(10))
        log.check(
            f"launches together, {count} rows", all(worst) and eager, f"graph {sum(worst)}/10, eager {eager}"
        )


def graph_check(log: Log, weights: list[PackedWeight], x: Tensor) -> None:
    """A captured step that begins behind a memset and mixes torch kernels in gives what eager gives."""
    hidden = torch.zeros_like(x)

    def step() -> Tensor:
        other = torch.zeros(1 << 20, device=DEVICE)
        value = packed_matmuls(hidden, weights)
        return packed_matmul(
            value[:, :96].repeat(1, 11)[:, :1024].contiguous().tanh() + other[:1024], weights[1]
        )

    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        out = step()
        graph.capture_end()
    hidden.copy_(x)
    torch.cuda.synchronize()
    expected = step()
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(out, expected):
            break
    log.check("captured graph", torch.equal(out, expected), "replayed 20 times")
