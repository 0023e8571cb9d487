"""Times the vision tower of a 27B, with random weights, by the size of the image.

    python -m workshop gpu.tower --work FOLDER --out FILE [--sizes 448 1024 2048] [--dtype bfloat16]

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
from bough.models.vision_spec import ARCHITECTURE, MERGE, PATCH, PATCHES, PROJECTOR
from workshop.case import case
from workshop.report import Report, eager_ms

DEPTH, WIDTH, HEADS, INNER, SIDE, OUT = 27, 1152, 16, 4304, 48, 5120  # of Qwen3.6-27B
MERGED = MERGE**2 * WIDTH


def _shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensors of the file."""
    shapes: dict[str, tuple[int, ...]] = {name: (WIDTH, 3, PATCH, PATCH) for name in PATCHES}
    shapes |= {"v.patch_embd.bias": (WIDTH,), "v.position_embd.weight": (SIDE**2, WIDTH)}
    affine = {"v.post_ln": (WIDTH,), "mm.0": (MERGED, MERGED), "mm.2": (OUT, MERGED)}
    for index in range(DEPTH):
        affine |= {
            f"v.blk.{index}.ln1": (WIDTH,),
            f"v.blk.{index}.ln2": (WIDTH,),
            f"v.blk.{index}.attn_qkv": (3 * WIDTH, WIDTH),
            f"v.blk.{index}.attn_out": (WIDTH, WIDTH),
            f"v.blk.{index}.ffn_up": (INNER, WIDTH),
            f"v.blk.{index}.ffn_down": (WIDTH, INNER),
        }
    for name, shape in affine.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def write_tower(path: Path) -> Path:
    """Write the file of a random tower, in F16."""
    generator = np.random.default_rng(0)
    shapes = _shapes()
    with GGUFWriter(path, ARCHITECTURE) as writer:
        keys = {"patch_size": PATCH, "spatial_merge_size": MERGE, "embedding_length": WIDTH}
        keys |= {"feed_forward_length": INNER, "block_count": DEPTH, "attention.head_count": HEADS}
        for key, value in (keys | {"projection_dim": OUT}).items():
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
    sizes: Annotated[Sequence[int], "pixels on a side"] = (448, 1024, 2048),
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    runs: int = 10,
) -> None:
    work.mkdir(parents=True, exist_ok=True)
    path = work / "mmproj-random-27b-F16.gguf"
    if not path.exists():
        write_tower(path)
    device = torch.device(report.device)
    report.write(**report.head())
    with GGUFFile.open(path) as file, torch.inference_mode():
        tower = VisionTower(file, device, getattr(torch, dtype))
        for side in sizes:
            pixels = torch.randint(0, 256, (side, side, 3), dtype=torch.uint8)
            work_of = partial(encoded, tower, pixels)
            work_of()
            milliseconds = eager_ms(work_of, repeats=runs) if device.type == "cuda" else host_ms(work_of)
            report.line(case="tower", side=side, tokens=(side // 32) ** 2, ms=round(milliseconds, 2))


def host_ms(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - begin)
