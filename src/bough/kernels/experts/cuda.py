"""The CUDA C++ kernel of experts.cu: its variants and its launch."""

from collections.abc import Iterable
from ctypes import c_int, c_longlong
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from bough.kernels.experts.stack import ExpertStack, Routing
from bough.kernels.quant_matmul.cuda import layout_defines
from bough.kernels.quant_matmul.layout import Layout
from bough.kernels.quant_matmul.rows import BUCKETS, PackedRows
from bough.kernels.runtime import sources
from bough.kernels.runtime.device import Card, card_of
from bough.kernels.runtime.driver import Kernel, cuda_module

# The rows of a step are few to an expert, those of a prompt many.
FEW, SEVERAL, MANY, MANY_IN_LITTLE = 8, 16, 64, 32
_MAX_STAGES = 6
_RESERVED = 1024  # bytes of shared memory that the driver reserves for each block
_ROUNDED = 128


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The compile-time parameters of the kernel for chunks of `tokens` pairs on a card."""

    tokens: int
    tiles: int  # 16-row tiles of a block, a warp each
    resident: int  # blocks of an SM

    @property
    def threads(self) -> int:
        return 32 * self.tiles

    def stage_bytes(self, layout: Layout) -> int:
        return self.tiles * layout.tile_bytes + 2 * layout.unit * self.tokens

    def stages(self, card: Card, layout: Layout) -> int:
        """Return the stages of the ring, of which two are needed."""
        share = min(card.shared_per_processor // self.resident - _RESERVED, card.shared_per_block)
        # An item of experts.cu is held for each stage; the compiler rounds their bytes up.
        return min(_MAX_STAGES, (share - _ROUNDED) // (self.stage_bytes(layout) + 12 + 8 * self.tokens))

    def defines(self, card: Card, layout: Layout) -> dict[str, int]:
        sizes = {"TOKENS": self.tokens, "BLOCK_TILES": self.tiles, "RESIDENT": self.resident}
        sizes |= {"STAGES": self.stages(card, layout), "OVERLAP": int(card.pdl)}
        return layout_defines(layout) | sizes


def shape_of(card: Card, layout: Layout, tokens: int) -> ExpertShape:
    """Return the shape with the most blocks of an SM, up to 512 threads, whose rings are deep enough.

    A step is bound by memory and needs more copies in flight than a prompt.
    """
    tiles, needed = (4, 3) if tokens <= SEVERAL else (8, 2)
    shapes = [ExpertShape(tokens, tiles, resident) for resident in range(16 // tiles, 0, -1)]
    return next((shape for shape in shapes if shape.stages(card, layout) >= needed), shapes[-1])


def chunk_tokens(card: Card, layouts: Iterable[Layout], rows: int) -> int:
    """Return how many pairs a chunk has at most, for `rows` rows."""
    if rows <= BUCKETS[-1]:
        return FEW if rows <= FEW else SEVERAL
    fits = all(shape_of(card, layout, MANY).stages(card, layout) >= 2 for layout in layouts)
    return MANY if fits else MANY_IN_LITTLE


def source() -> str:
    parts = (("runtime", "pdl.cu"), ("quant_matmul", "weights.cu"), ("experts", "experts.cu"))
    return "\n".join(sources.source(package, name) for package, name in parts)


@cache
def _kernel(layout: Layout, tokens: int, device: torch.device) -> tuple[Kernel, ExpertShape]:
    card = card_of(device)
    shape = shape_of(card, layout, tokens)
    macros = shape.defines(card, layout)
    assert macros["STAGES"] >= 2, f"{tokens} rows of {layout} do not fit in {card.shared_per_block} bytes"
    module, ring = cuda_module(source(), macros, device), macros["STAGES"] * shape.stage_bytes(layout)
    return module.kernel("experts", threads=shape.threads, shared=ring, overlap=card.pdl), shape


def matmul(x: PackedRows, stack: ExpertStack, routing: Routing, cold: Tensor, out: Tensor) -> None:
    device = out.device
    kernel, shape = _kernel(stack.layout, routing.tokens, device)
    depth, expert_tiles = stack.data.shape[1:3]
    blocks = -(-stack.rows // (16 * shape.tiles))
    sizes = (blocks, depth, stack.rows, expert_tiles, routing.pairs // x.rows)
    tensors = (stack.data, cold, stack.row_scale, x.data, x.scale, out)
    assert not x.grouped
    strides = (c_longlong(2 * stride) for stride in x.strides)
    kernel(
        (shape.resident * card_of(device).processors, 1),
        [*tensors, routing.chunks, routing.count, routing.order, *map(c_int, sizes), *strides],
    )
