"""Quantised products on a CUDA device: checks every layout against float64, then times them.

python benchmarks/gpu/matmul.py --out lines.jsonl [--parts check,bandwidth,time,model,prefill,triton,tune]
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace

import torch
from matmul_checks import DEVICE, TUNED, Log, Q, bound, check, error, spread_rows

from treeflash.bench.tuning import (
    LAYERS_27B,
    Shapes,
    Stack,
    Step,
    random_rows,
    random_steps,
    timed,
)
from treeflash.bench.tuning import tune as tune_card
from treeflash.gguf.types import QuantType
from treeflash.kernels.quant_matmul import (
    PackedWeight,
    backend,
    cuda,
    expand_weight,
    pack,
    pack_rows,
    packed_matmul,
    packed_matmuls,
    triton_kernels,
    unpack,
)
from treeflash.kernels.runtime.device import card_of

ROWS = (1, 8, 16, 24, 32, 48, 64)
SHAPES = ((17408, 5120), (5120, 17408), (14336, 5120), (10240, 5120), (5120, 6144))


def copies(weight: PackedWeight, bytes: float = 6.4e8) -> list[PackedWeight]:
    count = int(bytes / weight.nbytes) + 1
    return [weight, *(replace(weight, data=weight.data.clone()) for _ in range(count - 1))]


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
            data = random_rows(type, rows, columns, generator)
            torch.cuda.synchronize()
            start = time.time()
            weight = pack(data, type)
            torch.cuda.synchronize()
            packing = data.numel() / (time.time() - start) / 1e9
            time_weight(log, type, weight, ROWS, f" repack {packing:.0f} GB/s")
    for type in (Q.Q3_K, Q.IQ4_XS, Q.IQ4_NL, Q.Q4_0, Q.Q5_0, Q.F16):
        weight = pack(random_rows(type, 17408, 5120, generator), type)
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


def model_shapes() -> list[Shapes]:
    """The products of a 27B hybrid in the Q4_K_M mix: matrices that read the same x, and its columns."""
    steps: list[Shapes] = []
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


def model_steps() -> list[Step]:
    """Random weights for `model_shapes`, and the columns of each x."""
    return random_steps(model_shapes(), DEVICE)


def products_together(steps: list[Step], count: int) -> Callable[[], None]:
    """All products of a step, those with the same x overlapping."""
    packed = {k: pack_rows(torch.randn(count, k, device=DEVICE)) for k in (5120, 6144, 17408)}
    out = torch.empty(count, 248320, device=DEVICE)

    def together() -> None:
        for weights, columns in steps:
            sizes = [weight.rows for weight in weights]
            cuda.matmuls(packed[columns], weights, out[:, : sum(sizes)].split(sizes, 1))

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
                packed_matmuls(inputs[columns], weights)  # noqa: B023

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
        weight = pack(random_rows(type, rows, columns, generator), type)
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
        weight = pack(random_rows(type, 300, 512, generator), type)
        values = unpack(weight).double()
        first, all_rows = None, spread_rows(64, 512, generator)
        for count in (1, 24, 64) if type in TUNED else (13, 64):
            x = all_rows[:count]
            out = torch.full((count, 300), float("nan"), device=DEVICE)
            triton_kernels.matmul(triton_kernels.pack_rows(x), weight, out)
            found = error(out, x.double() @ values.T)
            good = found < bound(type)
            log.check(f"triton {type.name} {count} rows", good, "" if good else f"{found:.1e}")
            first = out[0].clone() if first is None else first
            log.check(f"triton {type.name} {count} rows, row 0 equal", torch.equal(first, out[0]))
        space = torch.full((384, 512), float("nan"), dtype=torch.float16, device=DEVICE)
        triton_kernels.expand(weight, 0, space)
        found = error(space[:300].double() * weight.expand_scale.double(), values)
        log.check(f"triton expand {type.name}", found < 1e-3, "" if found < 1e-3 else f"{found:.1e}")
    for type, rows, columns in ((Q.Q4_K, 17408, 5120), (Q.Q4_K, 5120, 6144), (Q.Q6_K, 5120, 17408)):
        weight = pack(random_rows(type, rows, columns, generator), type)
        weights, found = copies(weight), []
        for count in (1, 24, 64):
            x = triton_kernels.pack_rows(torch.randn(count, columns, device=DEVICE))
            out = torch.empty(count, rows, device=DEVICE)
            seconds = timed(lambda: [triton_kernels.matmul(x, w, out) for w in weights]) / len(weights)  # noqa: B023
            found.append(f"{count}: {weight.nbytes / seconds / 1e9:.0f}")
        log.say(f"GB/s Triton {type.name} {rows}x{columns}  {'  '.join(found)}")
        log.record(time="triton", type=type.name, n=rows, k=columns, gbps=found)


def tune(log: Log) -> None:
    """The best tiling for each number of rows, as `treeflash tune` finds it; all must give equal sums."""
    stack = Stack(LAYERS_27B, DEVICE)
    for found in tune_card(card_of(DEVICE), stack.layouts, stack.measure):
        log.check(f"{found.rows} rows: all tilings give equal sums", not found.differing)
        for tiling in found.differing:
            log.say(f"{found.rows} rows: other sums with {tiling.compare(found.built_in)}")
        built_in, best, setting = (
            found.built_in_s * 1e3,
            found.best_s * 1e3,
            found.best.compare(found.built_in),
        )
        log.say(f"best for {found.rows:2d} rows: {setting:30s} {best:.4f} ms, as built in {built_in:.4f}")
        log.record(tune=found.rows, setting=setting, ms=best, built_in_ms=built_in)


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
