"""Quantised products on a CUDA device: checks every layout against float64, then times them.

python benchmarks/gpu/matmul.py --out lines.jsonl [--parts check,bandwidth,time,model,prefill,triton,tune]
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from treeflash.gguf.quants import dequantise
from treeflash.gguf.types import QuantType
from treeflash.kernels.quant_matmul import (
    BUCKETS,
    PackedWeight,
    backend,
    cuda,
    expand_weight,
    kernel,
    layout_of,
    pack,
    pack_rows,
    packed_matmul,
    packed_products,
    prepare,
    unpack,
)
from treeflash.kernels.quant_matmul.layout import DENSE, LAYOUTS

DEVICE = torch.device("cuda", 0)
Q = QuantType
TUNED = (Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q8_0)
ROWS = (1, 8, 16, 24, 32, 48, 64)
SHAPES = ((17408, 5120), (5120, 17408), (14336, 5120), (10240, 5120), (5120, 6144))
HALVES = {
    Q.Q4_0: (0,), Q.Q4_1: (0, 2), Q.Q5_0: (0,), Q.Q5_1: (0, 2), Q.Q8_0: (0,), Q.Q3_K: (108,), Q.Q4_K: (0, 2),
    Q.Q5_K: (0, 2), Q.Q6_K: (208,), Q.IQ4_NL: (0,), Q.IQ4_XS: (0,), Q.MXFP4: (),
}  # fmt: skip


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


def blocks(type: QuantType, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Random packed rows with scales that a trained matrix could have."""
    count = rows * columns // type.block_elements
    if type in (Q.F16, Q.BF16, Q.F32):
        dtype = {Q.F16: torch.float16, Q.BF16: torch.bfloat16, Q.F32: torch.float32}[type]
        values = torch.randn(rows, columns, device=DEVICE, generator=generator) * 0.02
        return values.to(dtype).view(torch.uint8)
    data = torch.randint(
        0, 256, (count, type.block_bytes), dtype=torch.uint8, device=DEVICE, generator=generator
    )
    for offset in HALVES[type]:
        values = torch.randn(count, 1, device=DEVICE, generator=generator) * 1e-3
        data[:, offset : offset + 2] = values.half().view(torch.uint8)
    if type == Q.MXFP4:
        data[:, 0] = torch.randint(112, 124, (count,), dtype=torch.uint8, device=DEVICE, generator=generator)
    return data.view(rows, -1)


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
    card = cuda.card_of(DEVICE)
    for type in (*TUNED, Q.F16):
        found = []
        for bucket in BUCKETS:
            matmul = cuda.variant(layout_of(type), bucket, DEVICE).matmul
            depth = cuda.stages(card, layout_of(type), bucket)
            found.append(f"{bucket}: r{matmul.registers} s{matmul.spilled} x{matmul.occupancy} d{depth}")
            log.record(
                variant=type.name, bucket=bucket, registers=matmul.registers, spilled=matmul.spilled,
                occupancy=matmul.occupancy, stages=depth,
            )  # fmt: skip
        log.say(f"variants {type.name} (registers, spilled bytes, blocks an SM, stages) {'; '.join(found)}")
    for type in (*LAYOUTS, Q.F16, Q.BF16, Q.F32):
        worst, wide = 0.0, type.block_elements == 256
        for rows, columns in ((37, 256 if wide else 96), (300, 1280), (1000, 5120), (5120, 1536), (128, 512)):
            data = blocks(type, rows, columns, generator)
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
                log.check(
                    name,
                    found < 1e-3 and bool(out[:, rows:].isnan().all()),
                    "" if found < 1e-3 else f"{found:.1e}",
                )
                again = packed_matmul(x[:count], weight)
                log.check(f"{name} again", torch.equal(again, out[:, :rows]))
                first = out[0, :rows].clone() if first is None else first
                log.check(f"{name} row 0 equal", torch.equal(first, out[0, :rows]))
            moved = packed_matmul(torch.cat([x[40:41], x[:9], x[:1]]), weight)
            log.check(f"row 0 elsewhere {type.name} {rows}x{columns}", torch.equal(moved[10], first))
            for count in (65, 200):
                many = spread_rows(count, columns, generator)
                found = error(packed_matmul(many, weight), many.double() @ values.T)
                log.check(
                    f"many {type.name} {rows}x{columns} {count} rows",
                    found < 1e-3,
                    "" if found < 1e-3 else f"{found:.1e}",
                )
        log.say(f"worst relative error of a row, {type.name}: {worst:.2e}")
    weights = [pack(blocks(t, n, 1024, generator), t) for t, n in ((Q.Q4_K, 200), (Q.Q6_K, 77), (Q.Q8_0, 96))]
    x = spread_rows(5, 1024, generator)
    parts = torch.cat([packed_matmul(x, weight) for weight in weights], 1)
    log.check("several matrices side by side", torch.equal(packed_products(x, weights), parts), "equal")
    log.check(
        "zero rows of x", not bool(packed_matmul(torch.zeros(3, 1024, device=DEVICE), weights[0]).any())
    )
    graph_check(log, weights, x)


def graph_check(log: Log, weights: list[PackedWeight], x: Tensor) -> None:
    """A captured step that begins behind a memset and mixes torch kernels in gives what eager gives."""
    hidden = torch.zeros_like(x)

    def step() -> Tensor:
        other = torch.zeros(1 << 20, device=DEVICE)
        value = packed_products(hidden, weights)
        return packed_matmul(
            value[:, :96].repeat(1, 11)[:, :1024].contiguous().tanh() + other[:1024], weights[1]
        )

    stream = torch.cuda.Stream()
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


def timed(launch: Callable[[], object], *, groups: int = 5, repeats: int = 2) -> float:
    """Median seconds of what `launch` does, in a CUDA graph."""
    stream = torch.cuda.Stream()
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


def copies(weight: PackedWeight, bytes: float = 6.4e8) -> list[PackedWeight]:
    count = int(bytes / weight.nbytes) + 1
    return [weight, *(with_data(weight, weight.data.clone()) for _ in range(count - 1))]


def with_data(weight: PackedWeight, data: Tensor) -> PackedWeight:
    return PackedWeight(
        data,
        weight.row_scale,
        weight.expand_factor,
        weight.expand_scale,
        weight.layout,
        weight.rows,
        weight.columns,
    )


def bandwidth(log: Log) -> None:
    source, target = (torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE).random_() for _ in range(2))
    seconds = timed(lambda: target.copy_(source))
    log.say(f"copy of 2 GiB: {2 * source.numel() / seconds / 1e9:.0f} GB/s read and written")
    log.record(time="copy", gbps=2 * source.numel() / seconds / 1e9)


def time_products(log: Log) -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    for type in TUNED:
        for rows, columns in (*SHAPES, (248320, 5120)):
            if rows > 200000 and type != Q.Q6_K:
                continue
            data = blocks(type, rows, columns, generator)
            torch.cuda.synchronize()
            start = time.time()
            weight = pack(data, type)
            torch.cuda.synchronize()
            packing = data.numel() / (time.time() - start) / 1e9
            time_weight(log, type, weight, ROWS, f" repack {packing:.0f} GB/s")
    for type in (Q.Q3_K, Q.IQ4_XS, Q.IQ4_NL, Q.Q4_0, Q.Q5_0, Q.F16):
        weight = pack(blocks(type, 17408, 5120, generator), type)
        time_weight(log, type, weight, (1, 24, 64), "")


def time_weight(log: Log, type: QuantType, weight: PackedWeight, counts: tuple[int, ...], note: str) -> None:
    found = []
    weights = copies(weight)
    for count in counts:
        x = pack_rows(torch.randn(count, weight.columns, device=DEVICE))
        out = torch.empty(count, weight.rows, device=DEVICE)
        seconds = timed(lambda: [packed_matmul(x, w, out) for w in weights]) / len(weights)  # noqa: B023
        rate = weight.nbytes / seconds / 1e9
        found.append(f"{count}: {rate:.0f}")
        log.record(
            time="product", type=type.name, n=weight.rows, k=weight.columns, rows=count,
            microseconds=seconds * 1e6, gbps=rate,
        )  # fmt: skip
    log.say(f"GB/s {type.name} {weight.rows}x{weight.columns}  {'  '.join(found)}{note}")


def model_shapes() -> list[tuple[list[tuple[QuantType, int]], int]]:
    """The products of a 27B hybrid in the Q4_K_M mix: matrices that read the same x, and its columns."""
    steps: list[tuple[list[tuple[QuantType, int]], int]] = []
    for layer in range(64):
        more = layer < 8 or layer >= 56 or (layer - 8) % 3 == 2
        if layer % 4 == 3:
            inner = layer // 4
            value = (
                [(Q.Q4_K, 13312), (Q.Q6_K, 1024)] if inner < 8 or (inner - 8) % 3 == 2 else [(Q.Q4_K, 14336)]
            )
            steps += [(value, 5120), ([(Q.Q4_K, 5120)], 6144)]
        else:
            steps += [([(Q.Q5_K, 10240), (Q.Q4_K, 6144), (Q.Q8_0, 96)], 5120), ([(Q.Q5_K, 5120)], 6144)]
        steps += [([(Q.Q4_K, 34816)], 5120), ([(Q.Q6_K if more else Q.Q4_K, 5120)], 17408)]
    return [*steps, ([(Q.Q6_K, 248320)], 5120)]


def time_model(log: Log) -> None:
    generator = torch.Generator(DEVICE).manual_seed(2)
    made: dict[tuple[QuantType, int, int], PackedWeight] = {}
    steps = []
    for matrices, columns in model_shapes():
        weights = []
        for type, rows in matrices:
            key = (type, rows, columns)
            if key not in made:
                made[key] = pack(blocks(type, rows, columns, generator), type)
                weights.append(made[key])
            else:
                weights.append(with_data(made[key], made[key].data.clone()))
        steps.append((weights, columns))
    total = sum(weight.nbytes for weights, _ in steps for weight in weights)
    launches = sum(len(weights) for weights, _ in steps)
    for count in ROWS:
        inputs = {columns: torch.randn(count, columns, device=DEVICE) for columns in (5120, 6144, 17408)}
        packed = {columns: pack_rows(x) for columns, x in inputs.items()}
        out = torch.empty(count, 248320, device=DEVICE)

        def products() -> None:
            for weights, columns in steps:
                for weight in weights:
                    packed_matmul(packed[columns], weight, out[:, : weight.rows])  # noqa: B023

        def with_packing() -> None:
            for weights, columns in steps:
                x = pack_rows(inputs[columns])  # noqa: B023
                for weight in weights:
                    packed_matmul(x, weight, out[:, : weight.rows])  # noqa: B023

        bare, whole = timed(products, repeats=3), timed(with_packing, repeats=3)
        log.say(
            f"model {count} rows: {launches} products {bare * 1e3:.2f} ms ({total / bare / 1e9:.0f} GB/s), "
            f"with {len(steps)} packings {whole * 1e3:.2f} ms; {total / 1e9:.2f} GB"
        )
        log.record(time="model", rows=count, ms=bare * 1e3, with_packing_ms=whole * 1e3, bytes=total)


def time_prefill(log: Log) -> None:
    generator = torch.Generator(DEVICE).manual_seed(3)
    for type, rows, columns in ((Q.Q4_K, 34816, 5120), (Q.Q6_K, 5120, 17408), (Q.Q5_K, 10240, 5120)):
        weight = pack(blocks(type, rows, columns, generator), type)
        weights = copies(weight, 2e8)
        space = torch.empty(5120, weight.padded_columns, dtype=torch.float16, device=DEVICE)
        seconds = timed(lambda: [expand_weight(w, 0, space) for w in weights]) / len(weights)  # noqa: B023
        written = space.numel() * 2 / seconds / 1e9
        found = []
        for count in (512, 2048):
            x = torch.randn(count, columns, device=DEVICE)
            work = 2.0 * count * rows * columns
            seconds = timed(lambda: [packed_matmul(x, w) for w in weights]) / len(weights)  # noqa: B023
            halves = x.half()
            dense = torch.randn(rows, columns, device=DEVICE).half()
            bare = timed(lambda: torch.mm(halves, dense.T, out_dtype=torch.float32))  # noqa: B023
            found.append(f"{count}: {work / seconds / 1e12:.0f} (dense mm alone {work / bare / 1e12:.0f})")
            log.record(
                time="prefill", type=type.name, n=rows, k=columns, rows=count, tflops=work / seconds / 1e12
            )
        log.say(f"TFLOP/s {type.name} {rows}x{columns}  {'  '.join(found)}  expand writes {written:.0f} GB/s")


def check_triton(log: Log) -> None:
    """The Triton kernels, which other cards use, on this one."""
    generator = torch.Generator(DEVICE).manual_seed(4)
    for type in (*LAYOUTS, Q.F16):
        weight = pack(blocks(type, 300, 512, generator), type)
        values = unpack(weight).double()
        first, all_rows = None, spread_rows(64, 512, generator)
        for count in (1, 13, 24, 64):
            x = all_rows[:count]
            out = torch.full((count, 300), float("nan"), device=DEVICE)
            kernel.matmul(kernel.pack_rows(x), weight, out)
            found = error(out, x.double() @ values.T)
            log.check(
                f"triton {type.name} {count} rows", found < 1e-3, "" if found < 1e-3 else f"{found:.1e}"
            )
            first = out[0].clone() if first is None else first
            log.check(f"triton {type.name} {count} rows, row 0 equal", torch.equal(first, out[0]))
        space = torch.full((384, 512), float("nan"), dtype=torch.float16, device=DEVICE)
        kernel.expand(weight, 0, space)
        found = error(space[:300].double() * weight.expand_scale.double(), values)
        log.check(f"triton expand {type.name}", found < 1e-3, "" if found < 1e-3 else f"{found:.1e}")
    weight = pack(blocks(Q.Q4_K, 17408, 5120, generator), Q.Q4_K)
    weights, found = copies(weight), []
    for count in (1, 16, 32, 64):
        x = kernel.pack_rows(torch.randn(count, 5120, device=DEVICE))
        out = torch.empty(count, 17408, device=DEVICE)
        seconds = timed(lambda: [kernel.matmul(x, w, out) for w in weights]) / len(weights)  # noqa: B023
        found.append(f"{count}: {weight.nbytes / seconds / 1e9:.0f}")
    log.say(f"GB/s Triton Q4_K 17408x5120  {'  '.join(found)}")


def tune(log: Log) -> None:
    """Settings of the CUDA kernels against each other: least columns of a block, stages, overlap."""
    generator = torch.Generator(DEVICE).manual_seed(5)
    kept = cuda._LEAST_COLUMNS, cuda._MAX_STAGES
    shapes = ((Q.Q8_0, 96, 5120), (Q.Q6_K, 1024, 5120), (Q.Q5_K, 5120, 6144), (Q.Q4_K, 17408, 5120))
    for type, rows, columns in shapes:
        weights = copies(pack(blocks(type, rows, columns, generator), type), 3e8)[:64]
        for count in (1, 24):
            x = pack_rows(torch.randn(count, columns, device=DEVICE))
            out = torch.empty(count, rows, device=DEVICE)

            def once(weights=weights, x=x, out=out) -> float:
                return timed(lambda: [packed_matmul(x, w, out) for w in weights]) / len(weights) * 1e6

            found = []
            for least in (256, 512, 1024, 2048):
                cuda._LEAST_COLUMNS = least
                found.append(f"least {least}: {once():.2f}")
            cuda._LEAST_COLUMNS = kept[0]
            for depth in (2, 4):
                cuda._MAX_STAGES = depth
                cuda.variant.cache_clear()
                found.append(f"stages {depth}: {once():.2f}")
            cuda._MAX_STAGES = kept[1]
            cuda.variant.cache_clear()
            matmul = cuda.variant(weights[0].layout, 8 if count == 1 else count, DEVICE).matmul
            matmul._overlap = False
            found.append(f"no overlap: {once():.2f}")
            cuda.variant.cache_clear()
            log.say(f"us {type.name} {rows}x{columns} {count} rows  {'  '.join(found)}")
            log.record(tune=f"{type.name} {rows}x{columns}", rows=count, microseconds=found)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--parts", default="check,bandwidth,time,model,prefill,triton,tune")
    arguments = parser.parse_args()
    log = Log(arguments.out)
    properties = torch.cuda.get_device_properties(DEVICE)
    processors = properties.multi_processor_count
    log.say(f"{properties.name}, {processors} SMs, torch {torch.__version__}, {backend(DEVICE)}")
    log.record(gpu=properties.name, torch=torch.__version__, backend=backend(DEVICE))
    parts = {
        "check": check, "bandwidth": bandwidth, "time": time_products, "model": time_model,
        "prefill": time_prefill, "triton": check_triton, "tune": tune,
    }  # fmt: skip
    for name in arguments.parts.split(","):
        start = time.time()
        try:
            parts[name](log)
        except Exception:
            log.failures += 1
            log.say(f"FAIL part {name}\n{traceback.format_exc()}")
        torch.cuda.empty_cache()
        log.say(f"part {name} took {time.time() - start:.1f} s")
    log.say(f"{'FAIL' if log.failures else 'PASS'}: {log.failures} failures")
    return 1 if log.failures else 0


if __name__ == "__main__":
    sys.exit(main())
