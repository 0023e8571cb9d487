"""Prefill in int8 on a GPU: its kernels checked and timed, and what it does to the text; for prefill.py."""

import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bough.gguf.quantise import quantise
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.kernels.quant_matmul import (
    PackedWeight,
    int8,
    int8_kernels,
    pack,
    pack_rows,
    packed,
    unpack,
    with_int8,
)
from bough.kernels.quant_matmul.int8 import empty_int8
from bough.models.decoder import Decoder
from bough.models.spec import ModelSpec
from bough.models.step import Step
from bough.models.weights import WeightLoader
from bough.state.sequences import SequenceStates
from bough.text.tokenizer import Tokenizer
from tests.gpu.texts import embedded_pair
from workshop.report import Report, eager_ms

# Rows and columns of a 27B's matrices: gate and up, down, a delta layer's inputs and output, q k v.
SHAPES = ((34816, 5120), (5120, 17408), (16384, 5120), (5120, 6144), (14336, 5120))
# Rows, columns and bands of a program, stages, warps.
TILES = (
    (128, 128, 16, 3, 8), (128, 128, 16, 4, 8), (128, 128, 8, 3, 8), (128, 128, 32, 3, 8),
    (128, 128, 16, 2, 8), (64, 128, 16, 3, 4), (64, 128, 32, 4, 4), (64, 256, 16, 3, 8),
    (128, 64, 16, 3, 4), (256, 64, 16, 3, 8), (256, 128, 8, 3, 16), (128, 256, 16, 3, 16),
    (128, 256, 16, 2, 8),
)  # fmt: skip
CHECKED = (QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0)
TEXTS = {"code": ("argparse.py", "ast.py", "textwrap.py"), "prose": ("pydoc_data/topics.py",)}
TOKENS, ROWS = 1024, 256  # of a text; rows of logits at a time
small_model: Path | None = None  # a real model, for the cost in its text


def ms(work: Callable[[], object], repeats: int = 5) -> float:
    work()
    return eager_ms(work, repeats=repeats)


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def random_weight(type: QuantType, rows: int, columns: int) -> PackedWeight:
    """Return random weights; a few rows are quantised and repeated, which takes no time."""
    some = quantise(torch.randn(32, columns), type).cuda()
    return pack(some.repeat(-(-rows // 32), 1)[:rows], type)


def check_int8(report: Report) -> None:
    """Compare the kernels with their reference, on odd shapes, and with exact matmuls."""
    for type in CHECKED:
        weight = with_int8(random_weight(type, 1000, 5120), 1000)
        x = torch.randn(333, 5120, device="cuda") * torch.logspace(-3, 3, 333, device="cuda")[:, None]
        rows = pack_rows(x)
        found = packed.packed_matmuls(rows, [weight])
        quantised = int8.quantise(rows.data.float() * rows.scale[:, None])
        values = torch.nn.functional.pad(unpack(weight), (0, rows.padded_columns - 5120))
        expected = int8.matmul(quantised, int8.quantise(values), torch.empty(333, 1000, device="cuda"))
        exact = x.double() @ unpack(weight).double().T
        error = relative(found[:, :896], expected[:, :896])
        facts = {
            "of_reference": f"{error:.1e}",
            "of_exact": f"{relative(found[:, :896], exact[:, :896]):.1e}",
        }
        again = packed.packed_matmuls(rows, [weight])
        passed = error < 2e-3 and relative(found[:, 896:], exact[:, 896:]) < 1e-3
        report.check(f"int8 {type.name}", passed and torch.equal(found, again), **facts)


def time_int8(report: Report) -> None:
    """Time a 27B's matrices in int8 beside the exact way, then other tiles for the largest one."""
    for rows in (8192, 2048):
        sums = {"exact": 0.0, "int8": 0.0}
        for (count, columns), layers in zip(SHAPES, (64, 64, 48, 48, 16), strict=True):
            x = pack_rows(torch.randn(rows, columns, device="cuda"))
            plain = random_weight(QuantType.Q4_K, count, columns)
            out = torch.empty(rows, count, device="cuda")
            times = {
                name: ms(partial(packed.packed_matmuls, x, [weight], out))
                for name, weight in (("exact", plain), ("int8", with_int8(plain, count)))
            }
            flops = 2 * rows * count * columns
            facts = {f"{name}_tflops": round(flops / each / 1e9) for name, each in times.items()}
            report.log("a matrix, all of it", rows=rows, shape=[count, columns], **facts, **rounded(times))
            sums = {name: sums[name] + layers * each for name, each in times.items()}
        report.log("matmuls of all layers", rows=rows, **rounded(sums))
    parts(report)
    tune(report)


def rounded(times: dict[str, float]) -> dict[str, float]:
    return {f"{name}_ms": round(each, 3) for name, each in times.items()}


def parts(report: Report) -> None:
    """Time rounding of rows, of weights, and the int8 matmul itself."""
    count, columns = 25600, 5120
    x, weight = (
        pack_rows(torch.randn(8192, columns, device="cuda")),
        random_weight(QuantType.Q4_K, count, columns),
    )
    rows, codes = empty_int8(8192, columns, x.data.device), empty_int8(count, columns, x.data.device)
    half = torch.empty(12800, columns, dtype=torch.float16, device="cuda")
    out = torch.empty(8192, count, device="cuda")
    works = {
        "rows to int8": (partial(int8_kernels.quantise_rows, x), 3 * 8192 * columns),
        "weights to int8": (partial(int8_kernels.requantise, weight, 0, codes), 1.5625 * count * columns),
        "weights to float16": (partial(packed.expand_weight, weight, 0, half), 2.5625 * 12800 * columns),
        "int8 matmul": (partial(int8_kernels.matmul, rows, codes, out), 0),
        "row scales, torch": (partial(out.mul_, x.scale[:, None]), 8 * out.numel()),
        "row scales, our kernel": (partial(triton_scale, out, x.scale), 8 * out.numel()),
    }
    for name, (work, moved) in works.items():
        try:
            time = ms(work)
            facts = (
                {"gb_s": round(moved / time / 1e6)}
                if moved
                else {"tops": round(2 * 8192 * count * columns / time / 1e9)}
            )
            report.log(name, ms=round(time, 3), **facts)
        except Exception as failure:
            report.log(name, failed=str(failure)[:120])


def triton_scale(out: Tensor, scale: Tensor) -> None:
    from bough.kernels.quant_matmul.triton_kernels import scale_rows

    scale_rows(out, scale)


def tune(report: Report) -> None:
    """Time tiles; the result must be that of the first ones, bit for bit: each sum has the same order."""
    count, columns, plain = 12800, 5120, int8_kernels.tiles
    x, weight = (int8.quantise(torch.randn(rows, columns, device="cuda")) for rows in (8192, count))
    first = None
    for tile in TILES:
        if report.left < 8:
            break
        names = ("BLOCK_M", "BLOCK_N", "BAND", "num_stages", "num_warps")
        chosen: dict[str, Any] = dict(zip(names, tile, strict=True))
        int8_kernels.tiles = lambda _, chosen=chosen: chosen
        out = torch.full((8192, count), float("nan"), device="cuda")
        try:
            time = ms(partial(int8_kernels.matmul, x, weight, out), 3)
            first = out if first is None else first
            facts = {
                "tops": round(2 * 8192 * count * columns / time / 1e9),
                "same_bits": torch.equal(out, first),
            }
            report.log("int8 tiles", ms=round(time, 3), **facts, **chosen)
        except Exception as failure:
            report.log("int8 tiles", failed=str(failure)[:80], **chosen)
        finally:
            int8_kernels.tiles = plain


def kernels(report: Report) -> None:
    for work in (check_int8, time_int8):
        guarded(report, work.__name__, partial(work, report))


def guarded(report: Report, name: str, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as failure:
        report.check(name, False, failed=str(failure)[:300])


def decoder(file: GGUFFile, device: torch.device, *, int8: bool) -> Decoder:
    """Return a model; on a CPU, for a trial, with its weights in tiles and the reference of its matmuls."""
    if device.type == "cuda":
        return Decoder.load(file, device=device, int8_prefill=int8)
    loader = WeightLoader(file, device=device, tiles=True, int8_prefill=int8)
    return Decoder(ModelSpec.from_gguf(file), loader, device)


@torch.inference_mode()
def log_probabilities(model: Decoder, tokens: Tensor) -> Tensor:
    """Return [T, V] after each of tokens [T], read as one chunk."""
    states = SequenceStates(model.spec, max_ctx=len(tokens) + 64, device=model.device)
    slots = torch.tensor([states.open()], device=model.device)
    states.reserve(int(slots[0]), len(tokens))
    step = Step.chunk(slots, tokens[None], states.buffers.lengths[slots])
    hidden = model.forward(step, states.buffers).hidden[0]
    return torch.cat([model.logits(part).log_softmax(-1) for part in hidden.split(ROWS)])


def text_of(names: tuple[str, ...]) -> str:
    """Return files of the Python library; where a machine has none of them, our own documentation."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = [path for path in (folder / name for name in names) if path.exists()]
    docs = Path(__file__).parents[2] / "docs"
    return "\n".join(path.read_text() for path in found or sorted(docs.glob("*.md")))


def cost(report: Report, path: Path, device: torch.device, tokens: int) -> None:
    """Compare next-token distributions of exact and int8 prefill over real text: one file's cost."""
    with GGUFFile.open(path) as file:
        exact, rounded = (decoder(file, device, int8=int8) for int8 in (False, True))
        tokenizer = Tokenizer.from_metadata(file.metadata, source=str(path))
    for name, files in TEXTS.items():
        text = text_of(files)
        ids = torch.tensor(tokenizer.encode(text[10_000 : 10_000 + 8 * tokens])[:tokens], device=device)
        wanted, found = (log_probabilities(model, ids) for model in (exact, rounded))
        divergence = (wanted.exp() * (wanted - found)).sum(-1)
        nll = [-float(each[:-1].gather(1, ids[1:, None]).mean()) for each in (wanted, found)]
        report.log(
            "cost of int8",
            model=path.stem,
            text=name,
            tokens=len(ids),
            mean_kl=float(f"{float(divergence.mean()):.2e}"),
            largest_kl=float(f"{float(divergence.max()):.2e}"),
            top1=round(float((wanted.argmax(-1) == found.argmax(-1)).float().mean()), 4),
            perplexity=[round(float(torch.tensor(each).exp()), 4) for each in nll],
        )


def text(report: Report) -> None:
    """Report the cost with the embedded target, and with `small_model` if it is given."""
    device = torch.device(report.device)
    tokens = TOKENS if device.type == "cuda" else TOKENS // 2
    for path in (embedded_pair()[0], *([small_model] if small_model else ())):
        guarded(report, f"cost of int8, {path.stem}", partial(cost, report, path, device, tokens))
