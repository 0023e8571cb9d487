"""The rows of one forward pass and the buffers it reads and writes, as plain tensors.

The rows of a *tree* continue the committed tokens along their parents and change nothing until a commit; a
*chunk* is prompt text, each row following the one before it, committed at once. A step holds the same number
of rows for each of its sequence slots, or trees of different sizes as ragged rows.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from bough.kernels.causal_conv import DeltaBuffers
from bough.kernels.kv_cache.format import HeadPool
from bough.kernels.quant_matmul import BUCKETS
from bough.kernels.sampling import RowOwners
from bough.kernels.tree import MAX_ROWS

# Rows of padded steps. A root has its own size: matmuls cost what 8 rows cost, all else less.
SIZES = (1, *BUCKETS)
# Tokens of a prompt that a padded step can read, however small its trees: the same prompts are read by steps
# with and without speculation.
READ_ROWS = 16


def padded_rows(rows: int) -> int:
    """Return the size of the padded step that holds `rows` rows."""
    return next(size for size in SIZES if rows <= size)


def largest_padded(max_rows: int) -> int:
    """Return the largest padded step of one sequence with trees of at most `max_rows` rows."""
    return padded_rows(max(max_rows, READ_ROWS))


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The rows of a chunk that are parts of images, and how the chunk's rows are turned by rope."""

    rows: Tensor  # [n] int64
    embeddings: Tensor  # [n, width], in place of those of tokens
    positions: Tensor  # [3, T] int64 of all rows of the chunk: time, height, width


@dataclass(frozen=True, slots=True)
class Step:
    slots: Tensor  # [S] int64
    tokens: Tensor  # [B, T] int64: B = S, or for ragged rows 1
    positions: Tensor  # [B, T] int64: the row's index in its sequence
    parents: Tensor | None  # [B, T] int64 row of the parent, -1 = the committed text; None for a chunk
    ancestors: Tensor | None  # [B, T] int64, bit j set: row j is this row or above it; None for a chunk
    # [S + 1] int64: rows first[s] to first[s + 1] - 1 are the tree of the slot s, numbered from 0 in parents
    # and ancestors; rows from first[S] on are padding, and a slot without rows is nobody's. None: not ragged.
    first: Tensor | None = None
    owners: RowOwners | None = None  # of all rows, where they were computed with the rows
    most: int = MAX_ROWS  # rows of one slot, at most
    span: int = 0  # tokens of a chunk's longest sequence, its rows included; 0: the device is asked
    images: ImageRows | None = None  # of a chunk of one sequence

    @property
    def is_chunk(self) -> bool:
        return self.parents is None

    @property
    def rows(self) -> int:
        """Rows of each slot; of a ragged step all rows."""
        return self.tokens.shape[1]

    @classmethod
    def chunk(cls, slots: Tensor, tokens: Tensor, lengths: Tensor, *, span: int = 0) -> Self:
        """Return a chunk of prompt text after `lengths` [B] committed tokens."""
        positions = lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        return cls(slots, tokens, positions, None, None, span=span)

    @classmethod
    def tree(cls, slots: Tensor, tokens: Tensor, parents: Tensor, lengths: Tensor) -> Self:
        """Return a tree after `lengths` [B] committed tokens; parents come before children, -1 for a root."""
        rows = tokens.shape[1]
        assert 1 <= rows <= MAX_ROWS, f"{rows} rows, at most {MAX_ROWS}"
        seen = visibility(parents)
        bits = torch.ones_like(tokens[:1]) << torch.arange(rows, device=tokens.device)
        ancestors = (seen * bits[:, None, :]).sum(-1)
        positions = lengths[:, None] + seen.sum(-1) - 1
        return cls(slots, tokens, positions, parents, ancestors)

    def rope_positions(self, offsets: Tensor) -> Tensor:
        """Return the rows' rope positions [B, T], or [3, B, T] of a chunk with images; offsets [slots]."""
        if self.images is not None:
            return self.images.positions[:, None]
        if self.first is None:
            return self.positions + offsets[self.slots][:, None]
        return self.positions + offsets[self.row_owners().slots]

    def row_owners(self) -> RowOwners:
        """Return which slot each row belongs to."""
        if self.owners is not None:
            return self.owners
        sizes = torch.full_like(self.slots, self.rows) if self.first is None else self.first.diff()
        begins = sizes.cumsum(0) - sizes
        return RowOwners(self.slots.repeat_interleave(sizes), begins.repeat_interleave(sizes))


def visibility(parents: Tensor) -> Tensor:
    """Return [B, T, T] bool of parents [B, T]: true where column j is row i or an ancestor of it."""
    rows = parents.shape[1]
    seen = torch.eye(rows, device=parents.device).expand(parents.shape[0], rows, rows)
    if rows > 1:
        columns = torch.arange(rows, device=parents.device)
        seen = seen + (parents[:, :, None] == columns)
        # Squaring doubles the reach: 64 rows need six squarings.
        for _ in range((rows - 1).bit_length()):
            seen = (seen @ seen).clamp(max=1)
    return seen > 0


@dataclass(frozen=True, slots=True)
class AttentionBuffers:
    keys: HeadPool  # [pages, KV, page, row], after norm and rope
    values: HeadPool


@dataclass(frozen=True, slots=True)
class Pending:
    """Accepted rows of the last tree over which the delta layers have yet to advance, per slot."""

    path: Tensor  # [slots, rows] int64: the accepted rows in order, then padding
    count: Tensor  # [slots] int64: how many of them


@dataclass(frozen=True, slots=True)
class Buffers:
    layers: tuple[AttentionBuffers | DeltaBuffers, ...]
    page_table: Tensor  # [slots, pages a slot] int64
    lengths: Tensor  # [slots] int64 committed tokens
    offsets: Tensor  # [slots] int64: the rope position of the next rows is their index plus this
    pending: Pending
    window: int | None = None  # how far back a tree's rows attend; None: the whole context
    spare_page: int = 0  # where the K and V of padding rows go
