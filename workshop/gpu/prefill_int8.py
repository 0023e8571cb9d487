"""Prefill in int8 on a GPU: its matmuls timed, and what it does to the text; for prefill.py."""

import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bough.gguf.quantise import quantise
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.kernels.quant_matmul import (
    PackedWeight,
    pack,
    pack_rows,
    packed,
    with_int8,
)
from bough.models.decoder import Decoder
from bough.models.spec import ModelSpec
from bough.models.step import Step
from bough.models.weights import WeightLoader
from bough.state.sequences import SequenceStates
from bough.text.tokenizer import Tokenizer
from tests.gpu.texts import embedded_pair
from workshop.gpu.stages import guarded
from workshop.report import Report, eager_ms

# Rows and columns of a 27B's matrices: gate and up, down, a delta layer's inputs and output, q k v.
SHAPES = ((34816, 5120), (5120, 17408), (16384, 5120), (5120, 6144), (14336, 5120))
TEXTS = {"code": ("argparse.py", "ast.py", "textwrap.py"), "prose": ("pydoc_data/topics.py",)}
TOKENS, ROWS = 1024, 256  # of a text; rows of logits at a time
small_model: Path | None = None  # a real model, for the cost in its text


def ms(work: Callable[[], object], repeats: int = 5) -> float:
    work()
    return eager_ms(work, repeats=repeats)


def random_weight(type: QuantType, rows: int, columns: int) -> PackedWeight:
    """Return random weights; a few rows are quantised and repeated, which takes no time."""
    some = quantise(torch.randn(32, columns), type).cuda()
    return pack(some.repeat(-(-rows // 32), 1)[:rows], type)


def time_int8(report: Report) -> None:
    """Time a 27B's matrices in int8 beside the exact way."""
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


def rounded(times: dict[str, float]) -> dict[str, float]:
    return {f"{name}_ms": round(each, 3) for name, each in times.items()}


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
