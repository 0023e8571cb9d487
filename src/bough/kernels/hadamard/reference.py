"""The Walsh-Hadamard transform of blocks in plain torch.

Additions of pairs alone: a row has the same bits in any company, in every implementation.
"""

from math import sqrt

from torch import Tensor, stack


def transform(x: Tensor, block: int) -> Tensor:
    """Return x [..., K] times the normalised Walsh-Hadamard matrix in Sylvester's order, block by block."""
    shape, step = x.shape, 1
    while step < block:
        low, high = x.reshape(-1, 2, step).unbind(1)
        x = stack((low + high, low - high), 1)
        step *= 2
    return x.reshape(shape) * (1 / sqrt(block))


def rotate(x: Tensor, signs: Tensor, order: Tensor | None, block: int) -> Tensor:
    """Return H (s * x) of each block of x [..., K], its columns in `order` first."""
    return transform((x if order is None else x[..., order]) * signs, block)


def restore(z: Tensor, signs: Tensor, block: int) -> Tensor:
    """Return s * (H z) of each block of z [..., K]."""
    return transform(z, block) * signs
