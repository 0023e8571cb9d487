"""Depthwise causal convolution with SiLU over a chunk or over a tree, in plain torch.

weight [C, K]: tap K-1 multiplies the row itself, tap 0 the row K-1 above it. window [B, K-1, C] holds the
newest inputs before the step, oldest first.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu


def chunk_conv(inputs: Tensor, window: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """inputs [B, T, C], each row after the one before: outputs [B, T, C] and the new window."""
    rows, width = inputs.shape[1], weight.shape[1]
    series = torch.cat([window, inputs], 1)
    taps = torch.stack([series[:, tap : tap + rows] for tap in range(width)], -1)
    return silu((taps * weight).sum(-1)), series[:, rows:]


def tree_conv(inputs: Tensor, window: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """inputs [B, T, C]; index [B, T, K] from `conv_index`: outputs [B, T, C]."""
    series = torch.cat([window, inputs], 1)
    if inputs.shape[1] == 1:
        return silu((series * weight.T).sum(1, keepdim=True))
    batch, rows, width = index.shape
    taps = series.gather(1, index.reshape(batch, rows * width, 1).expand(-1, -1, series.shape[2]))
    return silu((taps.view(batch, rows, width, -1) * weight.T).sum(2))


def conv_index(parents: Tensor, width: int) -> Tensor:
    """parents [B, T] to [B, T, width]: where [window, rows] holds each row's inputs, oldest first."""
    row = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    index = [row + width - 1]
    for _ in range(width - 1):
        above = index[0] - (width - 1)
        in_tree = above >= 0
        parent = parents.gather(1, above.clamp(min=0))
        # Below zero the walk continues backwards through the window.
        index.insert(0, torch.where(in_tree, parent + width - 1, index[0] - 1))
    # A root's parent is -1, one before the first row: the newest entry of the window, as it should be.
    return torch.stack(index, -1)
