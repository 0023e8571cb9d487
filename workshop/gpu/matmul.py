"""Times quantised matmuls on a CUDA device: single ones, those of a 27B step, prefill, Triton, tilings.

    python -m workshop gpu.matmul --out matmul.jsonl [--parts time,model]

tests/gpu/test_quant_matmul.py checks them.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from bough.bench.tuning import (
    LAYERS_27B,
    Shapes,
    Stack,
    Step,
    random_rows,
    random_steps,
    timed,
)
from bough.bench.tuning import tune as tune_card
from bough.gguf.types import QuantType
from bough.kernels.quant_matmul import (
    BUCKETS,
    PackedWeight,
    backend,
    cuda,
    expand_weight,
    layout_of,
    pack,
    pack_rows,
    packed_matmul,
    packed_matmuls,
    prepare,
    triton_kernels,
)
from bough.kernels.quant_matmul.layout import DENSE, LAYOUTS
from bough.kernels.runtime.device import card_of
from tests.gpu.inputs import DEVICE, TUNED_TYPES
from workshop.case import case
from workshop.report import Report

Q = QuantType
ROWS = (1, 8, 16, 24, 32, 48, 64)
SHAPES = ((17408, 5120), (5120, 17408), (14336, 5120), (10240, 5120), (5120, 6144))


def copies(weight: PackedWeight, bytes: float = 6.4e8) -> list[PackedWeight]:
    count = int(bytes / weight.nbytes) + 1
    return [weight, *(replace(weight, data=weight.data.clone()) for _ in range(count - 1))]


def variants(report: Report) -> None:
    """Compile every layout and bucket; report registers, spilled bytes, blocks an SM holds and stages."""
    start = time.time()
    prepare([*LAYOUTS.values(), DENSE], DEVICE)
    print(f"{len(BUCKETS) * (len(LAYOUTS) + 1)} variants compiled in {time.time() - start:.1f} s", flush=True)
    card, tilings = card_of(DEVICE), cuda.tilings_of(DEVICE)
    for type in (*TUNED_TYPES, Q.F16):
        found = []
        for bucket, tiling in tilings.items():
            grouped = cuda.grouped(card, bucket)
            matmul = cuda.variant(layout_of(type), bucket, tiling, DEVICE, grouped=grouped).matmul
            depth = cuda.stages(card, layout_of(type), bucket, tiling)
            found.append(f"{bucket}: r{matmul.registers} s{matmul.spilled} x{matmul.occupancy} d{depth}")
            report.write(
                variant=type.name, bucket=bucket, registers=matmul.registers, spilled=matmul.spilled,
                occupancy=matmul.occupancy, stages=depth,
            )  # fmt: skip
        print(f"variants {type.name} {'; '.join(found)}", flush=True)


def bandwidth(report: Report) -> None:
    source, target = (torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE).random_() for _ in range(2))
    seconds = timed(lambda: target.copy_(source))
    print(f"copy of 2 GiB: {2 * source.numel() / seconds / 1e9:.0f} GB/s read and written", flush=True)
    report.write(time="copy", gbps=2 * source.numel() / seconds / 1e9)


def time_matmuls(report: Report) -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    for type in TUNED_TYPES:
        for rows, columns in (*SHAPES, (248320, 5120)):
            if rows > 200000 and type != Q.Q6_K:
                continue
            data = random_rows(type, rows, columns, generator)
            torch.cuda.synchronize()
            start = time.time()
            weight = pack(data, type)
            torch.cuda.synchronize()
            packing = data.numel() / (time.time() - start) / 1e9
            time_weight(report, type, weight, ROWS, f" repack {packing:.0f} GB/s")
    for type in (Q.Q3_K, Q.IQ4_XS, Q.IQ4_NL, Q.Q4_0, Q.Q5_0, Q.F16):
        weight = pack(random_rows(type, 17408, 5120, generator), type)
        time_weight(report, type, weight, (1, 24, 64), "")


def time_weight(
    report: Report, type: QuantType, weight: PackedWeight, counts: tuple[int, ...], note: str
) -> None:
    found = []
    weights = copies(weight)
    for count in counts:
        x = pack_rows(torch.randn(count, weight.columns, device=DEVICE))
        out = torch.empty(count, weight.rows, device=DEVICE)
        seconds = timed(lambda: [packed_matmul(x, w, out) for w in weights]) / len(weights)  # noqa: B023
        rate = weight.nbytes / seconds / 1e9
        found.append(f"{count}: {rate:.0f}")
        report.write(
            time="matmul", type=type.name, n=weight.rows, k=weight.columns, rows=count,
            microseconds=seconds * 1e6, gbps=rate,
        )  # fmt: skip
    print(f"GB/s {type.name} {weight.rows}x{weight.columns}  {'  '.join(found)}{note}", flush=True)


def model_shapes() -> list[Shapes]:
    """Return the matmuls of a 27B hybrid in the Q4_K_M mix: matrices that read one x, and its columns."""
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
    """Return random weights for `model_shapes`, and the columns of each x."""
    return random_steps(model_shapes(), DEVICE)


def overlapping_matmuls(steps: list[Step], count: int) -> Callable[[], None]:
    """Return a function that launches all matmuls of a step, those with the same x overlapping."""
    packed = {k: pack_rows(torch.randn(count, k, device=DEVICE)) for k in (5120, 6144, 17408)}
    out = torch.empty(count, 248320, device=DEVICE)

    def run() -> None:
        for weights, columns in steps:
            sizes = [weight.rows for weight in weights]
            cuda.matmuls(packed[columns], weights, out[:, : sum(sizes)].split(sizes, 1))

    return run


def time_model(report: Report) -> None:
    steps = model_steps()
    total = sum(weight.nbytes for weights, _ in steps for weight in weights)
    launches = sum(len(weights) for weights, _ in steps)
    for count in ROWS:
        inputs = {columns: torch.randn(count, columns, device=DEVICE) for columns in (5120, 6144, 17408)}
        packed = {columns: pack_rows(x) for columns, x in inputs.items()}
        out = torch.empty(count, 248320, device=DEVICE)

        def matmuls() -> None:
            for weights, columns in steps:
                for weight in weights:
                    packed_matmul(packed[columns], weight, out[:, : weight.rows])  # noqa: B023

        def with_packing() -> None:
            for weights, columns in steps:
                packed_matmuls(inputs[columns], weights)  # noqa: B023

        launched = (matmuls, overlapping_matmuls(steps, count), with_packing)
        bare, joined, whole = (timed(each, repeats=3) for each in launched)
        print(
            f"model {count} rows: {launches} matmuls {bare * 1e3:.2f} ms, overlapping {joined * 1e3:.2f} ms "
            f"({total / joined / 1e9:.0f} GB/s), with {len(steps)} packings {whole * 1e3:.2f} ms; "
            f"{total / 1e9:.2f} GB",
            flush=True,
        )
        report.write(
            time="model", rows=count, ms=bare * 1e3, together_ms=joined * 1e3, with_packing_ms=whole * 1e3,
            bytes=total,
        )  # fmt: skip


def time_prefill(report: Report) -> None:
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
            report.write(
                time="prefill", type=type.name, n=rows, k=columns, rows=count, tflops=work / seconds / 1e12
            )
        print(
            f"TFLOP/s {type.name} {rows}x{columns}  {'  '.join(found)}  expand writes {written:.0f} GB/s",
            flush=True,
        )


def time_triton(report: Report) -> None:
    """Time the Triton kernels, which other cards use, on this one."""
    generator = torch.Generator(DEVICE).manual_seed(4)
    for type, rows, columns in ((Q.Q4_K, 17408, 5120), (Q.Q4_K, 5120, 6144), (Q.Q6_K, 5120, 17408)):
        weight = pack(random_rows(type, rows, columns, generator), type)
        weights, found = copies(weight), []
        for count in (1, 24, 64):
            x = triton_kernels.pack_rows(torch.randn(count, columns, device=DEVICE))
            out = torch.empty(count, rows, device=DEVICE)
            seconds = timed(lambda: [triton_kernels.matmul(x, w, out) for w in weights]) / len(weights)  # noqa: B023
            found.append(f"{count}: {weight.nbytes / seconds / 1e9:.0f}")
        print(f"GB/s Triton {type.name} {rows}x{columns}  {'  '.join(found)}", flush=True)
        report.write(time="triton", type=type.name, n=rows, k=columns, gbps=found)


def tune(report: Report) -> None:
    """Find the best tiling for each number of rows, as `bough tune` does."""
    stack = Stack(LAYERS_27B, DEVICE)
    for found in tune_card(card_of(DEVICE), stack.layouts, stack.measure):
        built_in, best, setting = (
            found.built_in_s * 1e3,
            found.best_s * 1e3,
            found.best.compare(found.built_in),
        )
        print(
            f"best for {found.rows:2d} rows: {setting:30s} {best:.4f} ms, as built in {built_in:.4f}",
            flush=True,
        )
        report.write(tune=found.rows, setting=setting, ms=best, built_in_ms=built_in)


PARTS: dict[str, Callable[[Report], None]] = {
    "variants": variants, "bandwidth": bandwidth, "time": time_matmuls, "model": time_model,
    "prefill": time_prefill, "triton": time_triton, "tune": tune,
}  # fmt: skip


@case()
def main(report: Report, *, parts: str = ",".join(PARTS)) -> None:
    properties = torch.cuda.get_device_properties(DEVICE)
    processors = properties.multi_processor_count
    print(f"{properties.name}, {processors} SMs, torch {torch.__version__}, {backend(DEVICE)}", flush=True)
    report.write(gpu=properties.name, torch=torch.__version__, backend=backend(DEVICE))
    for name in parts.split(","):
        start = time.time()
        report.part(PARTS[name])
        print(f"part {name} took {time.time() - start:.1f} s", flush=True)
