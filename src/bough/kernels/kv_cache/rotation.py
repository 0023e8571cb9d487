"""The constant rotation that spreads a head's values before they are quantised.

R = diag(s2) H diag(s1) over groups of a row, H the orthonormal Walsh-Hadamard matrix in natural order, s1 and
s2 constant signs. Dot products do not change when both rows are rotated; the inverse is the transpose.
"""

import torch
from torch import Tensor

from bough.kernels.hadamard.reference import transform
from bough.kernels.runtime.dry_run import cache_tensor

LARGEST = 128  # values of a group, at most
# Bit i set: sign i is negative. A smaller group takes the first signs.
FIRST_SIGNS = 0x49F250A9A4C63BBB42F85949E46A0359
LAST_SIGNS = 0xBEA56562B7A5357A3F628FDC16ACEE90


def group_size(dim: int) -> int:
    """Return the largest power of two that divides a row of `dim` values, at most 128."""
    return min(dim & -dim, LARGEST)


@cache_tensor
def signs(mask: int, size: int, device: torch.device) -> Tensor:
    """Return [size] float32 of -1 and 1."""
    return torch.tensor([1.0 - 2.0 * (mask >> i & 1) for i in range(size)], device=device)


def rotate(x: Tensor) -> Tensor:
    """Return R x for x [..., D]; float32."""
    return _rotated(x, FIRST_SIGNS, LAST_SIGNS)


def rotate_back(x: Tensor) -> Tensor:
    """Return the inverse, R^T x, for x [..., D]; float32."""
    return _rotated(x, LAST_SIGNS, FIRST_SIGNS)


def _rotated(x: Tensor, before: int, after: int) -> Tensor:
    size = group_size(x.shape[-1])
    first, last = (signs(mask, size, x.device) for mask in (before, after))
    return (transform(x.float().unflatten(-1, (-1, size)) * first, size) * last).flatten(-2)
