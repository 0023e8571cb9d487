"""What the convolution and the delta rule of a layer take: weights, buffers, the rows of a step."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class DeltaHeads(NamedTuple):
    """The delta rule's inputs; of a tree, k, v, g and beta have the rows of a path before it."""

    q: Tensor  # [B, T, Hk, D], of unit length, scaled
    k: Tensor  # [B, P + T, Hk, D]
    v: Tensor  # [B, P + T, Hv, D]
    g: Tensor  # [B, P + T, Hv]: log decay
    beta: Tensor  # [B, P + T, Hv]: write strength


@dataclass(frozen=True, slots=True)
class ConvWeights:
    taps: Tensor  # [C, K]: tap K - 1 multiplies the row itself, tap 0 the row K - 1 above it
    decay: Tensor  # [Hv]: -A
    bias: Tensor  # [Hv], of alpha
    key_heads: int

    @property
    def head_dim(self) -> int:
        return self.taps.shape[0] // (2 * self.key_heads + len(self.decay))


@dataclass(frozen=True, slots=True)
class DeltaBuffers:
    """The committed state of a Gated DeltaNet layer, and what the rows of the last tree stored."""

    state: Tensor  # [slots, value heads, d, d] float32, row = key index
    window: Tensor  # [slots, conv width - 1, channels]: the newest inputs of the convolution, oldest first
    tree_inputs: Tensor  # [slots, rows, channels]: convolution inputs of the rows
    tree_gates: Tensor  # [slots, rows, 2, value heads] float32: log decay and beta of the rows


@dataclass(frozen=True, slots=True)
class ConvRows:
    """The rows of a step after the uncommitted paths of the last trees."""

    slots: Tensor  # [S]
    path: Tensor  # [S, P] rows of the last tree,
    count: Tensor  # [S] of which so many count
    index: Tensor  # from `conv_index`
    first: Tensor | None = None  # [S + 1] first row of each sequence, for ragged rows


def empty_heads(inputs: Tensor, weights: ConvWeights, rows: ConvRows, count: int) -> DeltaHeads:
    """Return uninitialised inputs of the delta rule for `count` tree rows: of each sequence, or of all."""
    batch, length = rows.path.shape
    joined = count + (length if rows.first is None else batch * length)

    def new(*shape: int) -> Tensor:
        lead = (batch,) if rows.first is None else ()
        return torch.empty(*lead, *shape, dtype=torch.float32, device=inputs.device)

    keys, values, dim = weights.key_heads, len(weights.decay), weights.head_dim
    of_path = new(joined, keys, dim), new(joined, values, dim), new(joined, values), new(joined, values)
    return DeltaHeads(new(count, keys, dim), *of_path)
