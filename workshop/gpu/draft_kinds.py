"""Times the draft call of every kind of draft beside one target: DFlash and all that extend it, and MTP.

    python -m workshop gpu.draft_kinds --target GGUF --draft GGUF --out FILE

The DFlash draft is the file's; the others have its backbone, and random weights for what they add. The target
should have random weights, too (`bough grow --random`): in a grown one all added tokens tie, and to rank
them takes longest. Times are of one whole step of 24 rows, with the step's graphs captured.
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bough.bench.step import StepProbe
from bough.config import SpecConfig
from bough.engine.engine import Engine
from bough.gguf.quantise import quantise
from bough.gguf.reader import GGUFFile, TensorInfo
from bough.gguf.types import QuantType
from bough.models.decoder import Decoder
from bough.models.dflash import DFlashDraft
from bough.models.draft_spec import DraftSpec, MarkovSpec, RefineSpec, SecondSpec
from bough.models.measure import measured
from bough.models.mtp import MTPBlock
from bough.models.newest import NewestHidden
from bough.models.spec import ModelSpec
from bough.models.weaver import WeaverHead
from bough.models.weaver_spec import WeaverSpec
from bough.models.weights import TensorSource, WeightLoader
from bough.spec.costs import StepCosts
from bough.spec.dflash import DFlashModel
from bough.spec.draft_model import DraftModel
from bough.spec.mtp import MTPModel
from bough.spec.speculator import Speculator
from bough.spec.weaver import WeaverModel
from bough.state.draft_ring import draft_buffers, mtp_buffers
from bough.train.mtp_model import block_shapes
from workshop.case import DRAFT, TARGET, case
from workshop.kernel_times import by_kernel
from workshop.report import Report

ROWS, CONTEXT = 24, 256
RANK = 256
MAX_CTX = 4096
TRACED, LONGEST = 4, 12  # steps, kernels


class WithRandom:
    """A `TensorSource` with more tensors than its file: random ones of the given shapes."""

    def __init__(self, file: TensorSource, shapes: Mapping[str, tuple[int, ...]]):
        self._file = file
        self._own = {name: TensorInfo(name, shape, _type(shape)) for name, shape in shapes.items()}
        self.path, self.metadata = file.path, file.metadata
        self.tensors = {**file.tensors, **self._own}

    def require_tensor(self, name: str, shape: tuple[int, ...] | None = None) -> TensorInfo:
        return self._own[name] if name in self._own else self._file.require_tensor(name, shape)

    def raw(self, name: str) -> np.ndarray:
        if name not in self._own:
            return self._file.raw(name)
        info = self._own[name]
        if "norm" in name:
            # Norms of small random values would leave all logits alike.
            return torch.ones(info.shape).view(torch.uint8).numpy()
        rows = max(1, info.elements // info.shape[-1])
        # A few different rows suffice.
        some = quantise(0.02 * torch.randn(min(rows, 64), info.shape[-1]), info.type)
        every = some.repeat(-(-rows // len(some)), 1)[:rows]
        return every.reshape(*info.shape[:-1], -1).numpy()


def _type(shape: tuple[int, ...]) -> QuantType:
    return QuantType.Q8_0 if len(shape) == 2 and shape[1] % 32 == 0 else QuantType.F32


def second_shapes(spec: DraftSpec, vocabulary: int) -> dict[str, tuple[int, ...]]:
    second, width = spec.second, spec.width
    assert second is not None
    shapes: dict[str, tuple[int, ...]] = {
        "selector_predecessor.weight": (vocabulary, second.rank),
        "selector_successor.weight": (vocabulary, second.rank),
        "selector_hidden.weight": (second.rank, width),
    }
    for layer in range(len(spec.layers)):
        for part in ("attn_conv", "ffn_conv"):
            shapes[f"blk.{layer}.{part}_base.weight"] = (2, second.kernel, width)
            rows = 2 * second.kernel * width // second.group
            shapes[f"blk.{layer}.{part}_proj.weight"] = (rows, width)
    return shapes


def markov_shapes(spec: DraftSpec, vocabulary: int) -> dict[str, tuple[int, ...]]:
    tables = {f"markov_w{number}.weight": (vocabulary, RANK) for number in (1, 2)}
    return {**tables, "conf_proj.weight": (spec.width + RANK,), "conf_proj.bias": (1,)}


def mlp_shapes(spec: DraftSpec) -> dict[str, tuple[int, ...]]:
    inner, width = spec.refine.inner if spec.refine else 0, spec.width
    down = {"refine_d.weight": (width, inner), "refine_norm.weight": (width,)}
    return {**down, "refine_ug.weight": (2 * inner, 2 * width), "refine_ug.bias": (2 * inner,)}


def injection_shapes(spec: DraftSpec, vocabulary: int) -> dict[str, tuple[int, ...]]:
    assert spec.refine is not None and spec.refine.rank is not None
    inner, rank, width = spec.refine.inner, spec.refine.rank, spec.width
    shapes = {f"refine_{name}.weight": (inner, rank) for name in ("message", "receiver", "predecessor")}
    for layer in range(len(spec.layers)):
        shapes[f"blk.{layer}.refine_readout.weight"] = (rank, width)
        shapes[f"blk.{layer}.refine_write.weight"] = (width, inner)
    return {**shapes, "refine_gate.bias": (inner,), "refine_codes.weight": (vocabulary, rank)}


def mtp_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {f"blk.{len(spec.layers)}.{name}.weight": shape for name, shape in block_shapes(spec).items()}


def loaded(source: TensorSource, device: torch.device, dtype: torch.dtype, make):
    """Return make(loader) with weights in the layouts of the device."""
    space = None
    if device.type == "cuda":
        space = measured(source, lambda loader: make(loader, torch.device("cpu"))).tile_bytes
    return make(WeightLoader(source, device=device, dtype=dtype, space=space), device)


def proposer(kind: str, target: Decoder, target_path: Path, draft_path: Path) -> DraftModel:
    spec, device, ring = target.spec, target.device, torch.float16
    ring = ring if device.type == "cuda" else torch.float32
    if kind == "mtp":
        with GGUFFile.open(target_path) as file:
            source = WithRandom(file, mtp_shapes(spec))
            block = loaded(source, device, target.dtype, lambda loader, at: MTPBlock(spec, loader, at))
        return MTPModel(block, target, mtp_buffers(spec, max_ctx=MAX_CTX, device=device, dtype=ring))
    with GGUFFile.open(draft_path) as file:
        found = DraftSpec.from_gguf(file).with_heads(file.tensors)
        extra: dict[str, tuple[int, ...]] = {}
        if kind == "dflash2":
            found = replace(found, second=SecondSpec(2, 16, RANK, 16))
            extra = second_shapes(found, spec.vocab_size)
        elif kind == "dspark":
            found = replace(found, markov=MarkovSpec(RANK, True), from_anchor=True)
            extra = markov_shapes(found, spec.vocab_size)
        elif kind == "mlp":
            # Half the published size: what `bough train` would take for a 27B.
            found = replace(found, refine=RefineSpec(found.feed_forward // 2))
            extra = mlp_shapes(found)
        elif kind == "dspine":
            causal = (True,) * len(found.layers)
            found = replace(found, refine=RefineSpec(512, min(1024, found.width // 2)), causal=causal)
            extra = injection_shapes(found, spec.vocab_size)
        source = WithRandom(file, extra)
        if found.refine is not None or kind == "weaver":
            with GGUFFile.open(target_path) as head:
                target.keep_head_rows(WeightLoader(head, device=device, host_embedding=True))
        draft = loaded(
            source, device, target.dtype, lambda loader, at: DFlashDraft(found, loader, at, spec.vocab_size)
        )
    model = DFlashModel(draft, target, draft_buffers(found, max_ctx=MAX_CTX, device=device, dtype=ring))
    return with_weaver(model, target, target_path) if kind == "weaver" else model


def with_weaver(draft: DFlashModel, target: Decoder, path: Path) -> WeaverModel:
    """Return the draft with a head of the published size, as its second generation."""
    width, device = target.spec.width, target.device
    spec = WeaverSpec("random", width, 1024, 3, 16, 3072, draft.depth, 512, learned=False, rope_theta=1e4)
    with GGUFFile.open(path) as file:
        source = WithRandom(file, spec.shapes)
        head = loaded(source, device, target.dtype, lambda loader, at: WeaverHead(spec, loader, at))
        norm = WeightLoader(file, device=device).vector("output_norm.weight", width)
    return WeaverModel(head, draft, target, NewestHidden.empty(1, width, device), final_norm=norm)


def measure(report: Report, kind: str, target: Decoder, files: tuple[Path, Path], repeats: int) -> None:
    model = proposer(kind, target, *files)
    sizes = (8, ROWS) if target.device.type == "cuda" else (ROWS,)
    speculator = Speculator(
        model, SpecConfig(budget=ROWS - 1, adaptive=False), StepCosts(), device=target.device, sizes=sizes
    )
    engine = Engine(target, max_ctx=MAX_CTX, drafter=speculator, max_rows=ROWS)
    graphs = engine.warmup.capture() if target.device.type == "cuda" else False
    if target.device.type == "cuda":
        # Without graphs the times are the host's, and say nothing; the log has the reason.
        report.check(f"{kind}: captured", graphs and engine.runner.captured)
    probe = StepProbe(engine, CONTEXT, rounds=repeats + 4 + 2 * TRACED)
    try:
        found = probe.times(ROWS, repeats)
        # What a draft call adds to each kernel's time.
        with_draft, without = (by_kernel(probe.trace(ROWS, TRACED, draft=draft)) for draft in (True, False))
    finally:
        probe.close()
    draft = {key: round(value, 3) for key, value in found.items()}
    added = {name: (us - without.get(name, 0.0)) / 1000 / TRACED for name, us in with_draft.items()}
    longest = sorted(added.items(), key=lambda pair: -pair[1])[:LONGEST]
    report.log(f"{kind}: kernels", ms={name[:60]: round(ms, 3) for name, ms in longest})
    report.check(f"{kind} proposes", math.isfinite(found["draft_ms"]), graphs=graphs, rows=ROWS, **draft)


@case()
def main(report: Report, *, target: Path = TARGET, draft: Path = DRAFT, repeats: int = 25) -> None:
    logging.basicConfig(level=logging.DEBUG, format="%(name)s: %(message)s")
    for name in ("triton", "torch", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    device = torch.device(report.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with GGUFFile.open(target) as file:
        decoder = Decoder.load(file, device=device, dtype=dtype)
    for kind in ("dflash", "dflash2", "dspark", "mlp", "dspine", "weaver", "mtp"):
        measure(report, kind, decoder, (target, draft), repeats)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print("FAIL" if report.failed else "PASS", json.dumps({"rows": ROWS}), flush=True)
