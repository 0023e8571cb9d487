"""Quantised products on a CUDA device: checks every layout against float64, then times them.

python benchmarks/gpu/matmul.py --out lines.jsonl [--parts check,bandwidth,time,model,prefill,triton,tune]
"""

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable

import torch
from matmul_checks import DEVICE, TUNED, Log, Q, blocks, bound, check, error, spread_rows
from torch import Tensor

from treeflash.gguf.types import QuantType
from treeflash.kernels.quant_matmul import (
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

ROWS = (1, 8, 16, 24, 32, 48, 64)
SHAPES = ((17408, 5120), (5120, 17408), (14336, 5120), (10240, 5120), (5120, 6144))


def timed(launch: Callable[[], object], *, groups: int = 5, repeats: int = 2) -> float:
    """Median seconds of what `launch` does, in a CUDA graph."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # products follow one another in one stream
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


Steps = list[tuple[list[PackedWeight], int]]


def model_steps() -> Steps:
    """Random weights for `model_shapes`, and the columns of each x."""
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
    return steps


def products_together(steps: Steps, count: int) -> Callable[[], None]:
    """All products of a step, those with the same x overlapping."""
    packed = {k: pack_rows(torch.randn(count, k, device=DEVICE)) for k in (5120, 6144, 17408)}
    out = torch.empty(count, 248320, device=DEVICE)

    def together() -> None:
        for weights, columns in steps:
            sizes = [weight.rows for weight in weights]
            cuda.products(packed[columns], weights, out[:, : sum(sizes)].split(sizes, 1))

    return together


def time_model(log: Log) -> None:
    steps = model_steps()
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
                packed_products(inputs[columns], weights)  # noqa: B023

        launched = (products, products_together(steps, count), with_packing)
        bare, joined, whole = (timed(each, repeats=3) for each in launched)
        log.say(
            f"model {count} rows: {launches} products {bare * 1e3:.2f} ms, together {joined * 1e3:.2f} ms "
            f"({total / joined / 1e9:.0f} GB/s), with {len(steps)} packings {whole * 1e3:.2f} ms; "
            f"{total / 1e9:.2f} GB"
        )
        log.record(
            time="model", rows=count, ms=bare * 1e3, together_ms=joined * 1e3, with_packing_ms=whole * 1e3,
            bytes=total,
        )  # fmt: skip


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
    for type in (Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q8_0, Q.Q3_K, Q.IQ4_XS, Q.Q5_1, Q.F16):
        weight = pack(blocks(type, 300, 512, generator), type)
        values = unpack(weight).double()
        first, all_rows = None, spread_rows(64, 512, generator)
        for count in (1, 24, 64) if type in TUNED else (13, 64):
            x = all_rows[:count]
            out = torch.full((count, 300), float("nan"), device=DEVICE)
            kernel.matmul(kernel.pack_rows(x), weight, out)
            found = error(out, x.double() @ values.T)
            good = found < bound(type)
            log.check(f"triton {type.name} {count} rows", good, "" if good else f"{found:.1e}")
            first = out[0].clone() if first is None else first
            log.check(f"triton {type.name} {count} rows, row 0 equal", torch.equal(first, out[0]))
        space = torch.full((384, 512), float("nan"), dtype=torch.float16, device=DEVICE)
        kernel.expand(weight, 0, space)
        found = error(space[:300].double() * weight.expand_scale.double(), values)
        log.check(f"triton expand {type.name}", found < 1e-3, "" if found < 1e-3 else f"{found:.1e}")
    for type, rows, columns in ((Q.Q4_K, 17408, 5120), (Q.Q4_K, 5120, 6144), (Q.Q6_K, 5120, 17408)):
        weight = pack(blocks(type, rows, columns, generator), type)
        weights, found = copies(weight), []
        for count in (1, 24, 64):
            x = kernel.pack_rows(torch.randn(count, columns, device=DEVICE))
            out = torch.empty(count, rows, device=DEVICE)
            seconds = timed(lambda: [kernel.matmul(x, w, out) for w in weights]) / len(weights)  # noqa: B023
            found.append(f"{count}: {weight.nbytes / seconds / 1e9:.0f}")
        log.say(f"GB/s Triton {type.name} {rows}x{columns}  {'  '.join(found)}")
        log.record(time="triton", type=type.name, n=rows, k=columns, gbps=found)


SETTINGS: dict[str, dict[str, object]] = {
    "as it is": {},
    "narrow": {"_WIDE_WARPS_FROM": 100},
    "wide from 16": {"_WIDE_WARPS_FROM": 16},
    "wide": {"_WIDE_WARPS_FROM": 8},
    "2 stages": {"_MAX_STAGES": {256: 2, 128: 3}},
    "3 stages": {"_MAX_STAGES": {256: 3, 128: 4}},
    "5 stages": {"_MAX_STAGES": {256: 5, 128: 8}},
    "filled at the start": {"_HALFWAY_FROM": 100},
    "3 stages, filled at the start": {"_MAX_STAGES": {256: 3, 128: 4}, "_HALFWAY_FROM": 100},
}
TUNE_SECONDS = 55  # behind which no further setting begins


def tune(log: Log) -> None:
    """Settings of the CUDA kernels against each other on all products of a model; all must give equal sums.

    Last comes a table: the best setting for each number of rows, with the constants of cuda.py that make it.
    """
    generator, begin = torch.Generator(DEVICE).manual_seed(5), time.time()
    counts, steps = (8, 16, 24, 32, 48, 64), model_steps()
    inputs = {columns: spread_rows(64, columns, generator) for columns in (5120, 6144, 17408)}
    checked = [steps[i] for i in (0, 1, 2, 3, 12, 14)]
    first: dict[tuple[int, int], Tensor] = {}
    default = {name: getattr(cuda, name) for name in ("_WIDE_WARPS_FROM", "_HALFWAY_FROM", "_MAX_STAGES")}
    found: dict[str, dict[int, float]] = {}
    try:
        for setting, values in SETTINGS.items():
            if time.time() - begin > TUNE_SECONDS:
                log.say(f"no time left for {setting}")
                continue
            for name, value in {**default, **values}.items():
                setattr(cuda, name, value)
            cuda.variant.cache_clear()
            prepare([layout_of(t) for t in TUNED], DEVICE)
            found[setting] = {}
            for count in counts:
                for index, (weights, columns) in enumerate(checked):
                    out = torch.cat([packed_matmul(inputs[columns][:count], w) for w in weights], 1)
                    expected = first.setdefault((index, count), out)
                    log.check(f"{setting}: product {index}, {count} rows equal", torch.equal(out, expected))
                found[setting][count] = timed(products_together(steps, count), groups=3, repeats=3) * 1e3
            log.say(
                f"ms model {setting:30s} {'  '.join(f'{n}: {ms:.3f}' for n, ms in found[setting].items())}"
            )
            log.record(tune=setting, ms=found[setting])
    finally:
        for name, value in default.items():
            setattr(cuda, name, value)
        cuda.variant.cache_clear()
    for count in counts:
        best = min(found, key=lambda setting: found[setting][count])
        ms, today = found[best][count], found["as it is"][count]
        log.say(f"best for {count:2d} rows: {best:30s} {ms:.3f} ms, as it is {today:.3f}  {SETTINGS[best]}")


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
