"""The tree of tokens that one step verifies: plain integers, no models.

Row 0 is the root, the last decided token. A child's row comes after its parent's. A chain is a tree without
branches; plain decoding is the tree that has only its root.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftTree:
    tokens: Tensor  # [T] int64
    parents: Tensor  # [T] int64, -1 for the root
    # [4, 64] int64 where the tree was made on a device, which alone knows it: tokens, parents, ancestors (bit
    # j set: row j is this row or above it) and depths; rows beyond T are anything.
    packed: Tensor | None = None

    @classmethod
    def root(cls, token: int) -> Self:
        return cls(torch.tensor([token]), torch.tensor([-1]))

    @classmethod
    def of(cls, tokens: list[int], parents: list[int]) -> Self:
        assert parents[0] == -1 and all(0 <= parent < row for row, parent in enumerate(parents) if row)
        return cls(torch.tensor(tokens), torch.tensor(parents))

    def __len__(self) -> int:
        return self.tokens.shape[0]
