"""Tiles of the CUDA attention kernel other than the chosen ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from bough.kernels.attention import cuda
from bough.kernels.attention import triton_kernels as attention_triton

# Tiles of the CUDA kernel, and splits of the context, other than those that are chosen.
OTHER_TILES = (
    {"queries": 48},
    {"queries": 96},
    {"queries": 144, "stages": 2},
    {"stages": 2},
    {"stages": 3},
    {"stages": 4, "resident": 1},
    {"grouped": False},
    {"SPLITS": 32},
)


@contextmanager
def other_tiles(changes: dict[str, int]) -> Iterator[None]:
    """Replace fields of the chosen tile, or the number of splits."""
    tile_of, splits, fields = cuda.tile_of, attention_triton.SPLITS, dict(changes)
    attention_triton.SPLITS = cuda.SPLITS = fields.pop("SPLITS", splits)
    cuda.tile_of = lambda *shape, **options: replace(tile_of(*shape, **options), **fields)
    cuda._kernel.cache_clear()
    try:
        yield
    finally:
        cuda.tile_of, attention_triton.SPLITS, cuda.SPLITS = tile_of, splits, splits
        cuda._kernel.cache_clear()
