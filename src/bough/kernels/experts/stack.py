"""ExpertStack: the matrices of all experts of a layer in one matrix of tiles; Routing: who uses which."""

from dataclasses import dataclass

from torch import Tensor

from bough.kernels.quant_matmul.layout import ROW_BLOCK, Layout, PackedWeight, unpack


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Matrices [count, rows, columns]; each begins at a multiple of 128 rows of the tiles."""

    data: Tensor  # uint8 [K/unit, count * padded rows / 16, tile bytes]
    row_scale: Tensor  # float32 [count * padded rows]
    layout: Layout
    count: int
    rows: int
    columns: int

    @classmethod
    def of(cls, tiles: PackedWeight, count: int, rows: int) -> "ExpertStack":
        """Return the stack of `tiles`; what expands them for a dense matmul is dropped."""
        assert tiles.rows == count * padded(rows), (tiles.rows, count, rows)
        return cls(tiles.data, tiles.row_scale, tiles.layout, count, rows, tiles.columns)

    def unpacked(self) -> Tensor:
        """Return float32 [count, rows, columns]."""
        none = self.row_scale.new_empty(0)
        whole = self.count * padded(self.rows)
        tiles = PackedWeight(self.data, self.row_scale, none, none, self.layout, whole, self.columns)
        return unpack(tiles).unflatten(0, (self.count, -1))[:, : self.rows]

    @property
    def expert_tiles(self) -> int:
        """The 16-row tiles of an expert."""
        return padded(self.rows) // 16


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each row, on the device. A pair is a row and a rank, its number row * used + rank."""

    weights: Tensor  # float32 [M, used]: by rank
    chosen: Tensor  # int32 [M, used]
    order: Tensor  # int32 [M * used]: pairs in order of their experts
    chunks: Tensor  # int32 [at most, 4]: expert, first place in `order`, pairs, 0
    count: Tensor  # int32 [1]: of chunks
    tokens: int  # pairs of a chunk, at most

    @property
    def pairs(self) -> int:
        return self.order.numel()


def padded(rows: int) -> int:
    return -(-rows // ROW_BLOCK) * ROW_BLOCK


def most_chunks(pairs: int, experts: int, tokens: int) -> int:
    """Return how many chunks there can be: a partly filled one of each expert, and the full ones."""
    return min(pairs, experts) + pairs // tokens
