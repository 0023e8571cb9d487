"""Pools of a KV cache filled with random rows."""

import torch
from torch import Tensor

from bough.kernels.kv_cache.format import FORMATS, HeadPool
from bough.kernels.kv_cache.reference import encode
from bough.kernels.kv_cache.rotation import rotate


def filled(
    format: str,
    shape: tuple[int, ...],
    dim: int,
    used: Tensor | None = None,
    *,
    device: torch.device | str = "cpu",
) -> HeadPool:
    """Return random rows as the cache stores them; pages outside `used` (a mask) read as NaN, or as 255."""
    pool = HeadPool.empty(FORMATS[format], shape, dim, torch.device(device))
    rows = torch.randn(*shape, dim, device=device)
    parts = encode(rotate(rows), pool.format) if pool.format.quantised else (rows,)
    for plane, part in zip(pool.planes, parts, strict=True):
        plane.copy_(part)
        if used is not None:
            plane[~used] = torch.nan if plane.is_floating_point() else 255
    return pool
