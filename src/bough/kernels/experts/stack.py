"""ExpertStack: one kind of matrix of all experts of a layer, in tiles; Routing: who uses which."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bough.gguf.types import QuantType
from bough.kernels.quant_matmul.layout import (
    COLUMN_BLOCK,
    ROW_BLOCK,
    Layout,
    PackedWeight,
    layout_of,
    pack,
    unpack,
)

_AT_ONCE = 16  # experts that are packed in one call: what it takes meanwhile is small beside a layer's


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Matrices [count, rows, columns], each in one piece: a copy of it is an expert's.

    Without `host` those of all experts are in `data`, by number. With it they are all in host memory, and
    `data` holds some of them: see ExpertCache.
    """

    data: Tensor  # uint8 [places, K/unit, padded rows / 16, tile bytes]
    row_scale: Tensor  # float32 [count * padded rows], always on the device
    layout: Layout
    count: int
    rows: int
    columns: int
    host: Tensor | None = None  # uint8 [count, ...]: pinned, so that a GPU can read it

    @classmethod
    def packed(cls, blocks: Tensor, type: QuantType, rows: int, into: Tensor) -> "ExpertStack":
        """Return the stack of blocks uint8 [count * padded rows, row bytes], in `into` [count, ...]."""
        count, columns = len(into), blocks.shape[1] // type.block_bytes * type.block_elements
        if into.is_meta:
            scale = torch.empty(len(blocks), device=into.device)
            return cls(into, scale, layout_of(type), count, rows, columns)
        scales = []
        for first in range(0, count, _AT_ONCE):
            places = into[first : first + _AT_ONCE]
            part = blocks[first * padded(rows) : (first + len(places)) * padded(rows)]
            tiles = pack(part, type)
            places.copy_(tiles.data.unflatten(1, (len(places), -1)).transpose(0, 1))
            scales.append(tiles.row_scale)
        return cls(into, torch.cat(scales), layout_of(type), count, rows, columns)

    @classmethod
    def of(cls, tiles: PackedWeight, count: int, rows: int) -> "ExpertStack":
        """Return the stack of `tiles`, each of whose experts begins at a multiple of 128 rows."""
        assert tiles.rows == count * padded(rows), (tiles.rows, count, rows)
        data = tiles.data.unflatten(1, (count, -1)).transpose(0, 1).contiguous()
        return cls(data, tiles.row_scale, tiles.layout, count, rows, tiles.columns)

    def cached(self, slots: int, data: Tensor | None = None) -> "ExpertStack":
        """Return the stack with all experts where they are now, as host memory, and `data` for some."""
        if data is None:
            data = torch.empty(slots, *self.data.shape[1:], dtype=torch.uint8, device=self.row_scale.device)
        return replace(self, data=data, host=self.data)

    @property
    def cold(self) -> Tensor:
        """Return where the experts are that have no place in `data`."""
        return self.data if self.host is None else self.host

    @property
    def expert_bytes(self) -> int:
        return self.data[0].numel()

    def unpacked(self) -> Tensor:
        """Return float32 [count, rows, columns]."""
        none = self.row_scale.new_empty(0)
        data = self.cold.to(self.row_scale.device).transpose(0, 1).flatten(1, 2)
        tiles = PackedWeight(
            data, self.row_scale, none, none, self.layout, self.count * padded(self.rows), self.columns
        )
        return unpack(tiles).unflatten(0, (self.count, -1))[:, : self.rows]


@dataclass(frozen=True, slots=True)
class Copies:
    """Which experts' matrices are copied next, on the device."""

    pairs: Tensor  # int32 [at most, 2]: expert, place
    count: Tensor  # int32 [1], at least


@dataclass(frozen=True, slots=True)
class Round:
    """Chunks of a prompt whose experts are on the device, once the missing ones are in the stage."""

    chunks: Tensor
    count: Tensor
    copies: Copies
    stage: Tensor  # uint8


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each row, on the device. A pair is a row and a rank, its number row * used + rank."""

    weights: Tensor  # float32 [M, used]: by rank
    chosen: Tensor  # int32 [M, used]
    order: Tensor  # int32 [M * used]: pairs in order of their experts
    chunks: Tensor  # int32 [at most, 4]: expert, first place in `order`, pairs, place p of its weights, or ~p
    count: Tensor  # int32 [1]: of chunks
    tokens: int  # pairs of a chunk, at most
    rounds: tuple[Round, ...] = ()  # of a prompt whose experts are in host memory

    @property
    def pairs(self) -> int:
        return self.order.numel()


def padded(rows: int) -> int:
    return -(-rows // ROW_BLOCK) * ROW_BLOCK


def stack_shape(type: QuantType, rows: int, columns: int) -> tuple[int, int, int]:
    """Return the shape of an expert's matrix in tiles, uint8."""
    layout, width = layout_of(type), -(-columns // COLUMN_BLOCK) * COLUMN_BLOCK
    return width // layout.unit, padded(rows) // 16, layout.tile_bytes


def most_chunks(pairs: int, experts: int, tokens: int) -> int:
    """Return how many chunks there can be: a partly filled one of each expert, and the full ones."""
    return min(pairs, experts) + pairs // tokens
