"""Trees after committed text, and the same text with the path of one row committed."""

from collections.abc import Iterator

import torch
from torch import Tensor

from bough.kernels.kv_cache.format import HeadPool


def rows_of(bits: int) -> list[int]:
    """Return the rows whose bits are set."""
    return [row for row in range(64) if bits >> row & 1]


def committed(pool: HeadPool, table: Tensor, length: int, path: list[int]) -> HeadPool:
    """Return a copy of a pool [pages, KV, page, row]: rows `path` follow `length` committed tokens."""
    source = length + torch.tensor(path, device=table.device)
    target = length + torch.arange(len(path), device=table.device)

    def moved(plane: Tensor) -> Tensor:
        plane, page = plane.clone(), pool.page
        plane[table[target // page], :, target % page] = plane[table[source // page], :, source % page]
        return plane

    return pool.map(moved)


def roots(
    pools: list[HeadPool], table: Tensor, length: int, ancestors: Tensor
) -> Iterator[tuple[int, list[HeadPool], Tensor]]:
    """Yield each row of a tree [T], pools and the length [1] that make it the root after its path."""
    for row, bits in enumerate(ancestors.tolist()):
        path = rows_of(bits)
        moved = [committed(pool, table, length, path) for pool in pools]
        yield row, moved, torch.tensor([length + len(path) - 1], device=table.device)
