"""Times a vision tower with random weights, by the size of the image.

    python -m workshop gpu.tower --work FOLDER --out FILE [--model 0.8b] [--sizes 448 1024] [--dtype float32]

A run is what a prompt's chunk does: pixels to the device, all blocks, the merger; the median of `--runs`.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch

from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.gguf.writer import GGUFWriter
from bough.models.vision import VisionTower
from bough.models.vision_spec import ARCHITECTURE, MERGE, PATCH, PATCHES, PROJECTOR, VisionSpec
from workshop.case import case
from workshop.report import Report, eager_ms

# Of Qwen3.6-27B and Qwen3.5-0.8B.
TOWERS = {
    "27b": VisionSpec(depth=27, width=1152, heads=16, inner=4304, side=48, out=5120),
    "0.8b": VisionSpec(depth=12, width=768, heads=12, inner=3072, side=48, out=1024),
}


def _shapes(spec: VisionSpec) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the file."""
    width, merged = spec.width, MERGE**2 * spec.width
    shapes: dict[str, tuple[int, ...]] = {name: (width, 3, PATCH, PATCH) for name in PATCHES}
    shapes |= {"v.patch_embd.bias": (width,), "v.position_embd.weight": (spec.side**2, width)}
    affine = {"v.post_ln": (width,), "mm.0": (merged, merged), "mm.2": (spec.out, merged)}
    for index in range(spec.depth):
        affine |= {
            f"v.blk.{index}.ln1": (width,),
            f"v.blk.{index}.ln2": (width,),
            f"v.blk.{index}.attn_qkv": (3 * width, width),
            f"v.blk.{index}.attn_out": (width, width),
            f"v.blk.{index}.ffn_up": (spec.inner, width),
            f"v.blk.{index}.ffn_down": (width, spec.inner),
        }
    for name, shape in affine.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def write_tower(path: Path, spec: VisionSpec) -> Path:
    """Write the file of a random tower, in F16."""
    generator = np.random.default_rng(0)
    shapes = _shapes(spec)
    with GGUFWriter(path, ARCHITECTURE) as writer:
        keys = {"patch_size": PATCH, "spatial_merge_size": MERGE, "embedding_length": spec.width}
        keys |= {"feed_forward_length": spec.inner, "block_count": spec.depth}
        keys |= {"attention.head_count": spec.heads, "projection_dim": spec.out}
        for key, value in keys.items():
            writer.add(f"clip.vision.{key}", value)
        writer.add("clip.projector_type", PROJECTOR)
        writer.add("clip.has_vision_encoder", True)
        for name, shape in shapes.items():
            writer.add_tensor(name, shape, QuantType.F16)
        writer.write_header()
        for name, shape in shapes.items():
            noise = generator.standard_normal(shape, np.float32) * np.prod(shape[1:], dtype=float) ** -0.5
            writer.write_tensor(name, (noise if len(shape) > 1 else 1 + 0.1 * noise).astype(np.float16))
    return path


def encoded(tower: VisionTower, pixels: torch.Tensor) -> torch.Tensor:
    layers = tower.encode(pixels)
    while True:
        try:
            next(layers)
        except StopIteration as end:
            return end.value


@case(seconds=120)
def main(
    report: Report,
    *,
    work: Annotated[Path, "folder for the file, 0.9 GB"],
    model: Literal["27b", "0.8b"] = "27b",
    sizes: Annotated[Sequence[int], "pixels on a side"] = (448, 1024, 2048),
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    runs: int = 10,
) -> None:
    work.mkdir(parents=True, exist_ok=True)
    path = work / f"mmproj-random-{model}-F16.gguf"
    if not path.exists():
        write_tower(path, TOWERS[model])
    device = torch.device(report.device)
    report.write(**report.head())
    with GGUFFile.open(path) as file, torch.inference_mode():
        tower = VisionTower(file, device, getattr(torch, dtype))
        for side in sizes:
            pixels = torch.randint(0, 256, (side, side, 3), dtype=torch.uint8)
            work_of = partial(encoded, tower, pixels)
            work_of()
            milliseconds = eager_ms(work_of, repeats=runs) if device.type == "cuda" else host_ms(work_of)
            report.line(
                case="tower", model=model, side=side, tokens=(side // 32) ** 2, ms=round(milliseconds, 2)
            )


def host_ms(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - begin)
