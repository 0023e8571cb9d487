"""Paged attention against attention written out over the gathered keys."""

import pytest
import torch

from bough.kernels.attention import paged_attention, reference
from bough.kernels.attention.reference import ordered_attention
from bough.kernels.kv_cache.format import FORMATS, HeadPool
from bough.kernels.kv_cache.reference import encode
from bough.kernels.kv_cache.rotation import rotate
from bough.models.step import Step, visibility
from tests.kernels.paths import roots

PAGE = 4


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """q [H, D], k and v [L, KV, D], seen [L] bool: one row, head by head."""
    group = q.shape[0] // k.shape[1]
    rows = []
    for head, query in enumerate(q):
        keys, values = k[seen, head // group], v[seen, head // group]
        rows.append((keys @ query / query.shape[0] ** 0.5).softmax(0) @ values)
    return torch.stack(rows)


def floats(pool: torch.Tensor) -> HeadPool:
    """[pages, KV, page, D] as it is."""
    return HeadPool(FORMATS["f32"], pool.shape[-1], pool, None)


def stored(rows: torch.Tensor, format: str) -> HeadPool:
    """[pages, KV, page, D] as a cache of this format stores it."""
    parts = encode(rotate(rows), FORMATS[format]) if FORMATS[format].quantised else (rows, None)
    return HeadPool(FORMATS[format], rows.shape[-1], *parts)


def test_a_broken_sequence_does_not_reach_its_neighbours() -> None:
    keys, values = torch.randn(2, 8, 2, PAGE, 8)
    keys[0], values[0] = torch.nan, torch.nan  # page 0: where unused entries of a page table point
    table, lengths = torch.tensor([[0, 1, 2], [3, 0, 0]]), torch.tensor([9, 1])
    out = paged_attention(torch.randn(2, 2, 4, 8), floats(keys), floats(values), table, lengths, None)
    assert bool(out[0].isnan().all()) and bool(out[1].isfinite().all())


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("consecutive", [False, True])
def test_rows_see_the_committed_text_and_their_ancestors(rows: int, tree: bool, consecutive: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    keys, values = torch.randn(2, 40, 2, PAGE, 8, generator=generator)
    table = (
        torch.arange(20).view(2, 10)
        if consecutive
        else torch.randperm(40, generator=generator)[:20].view(2, 10)
    )
    lengths = torch.tensor([0, 13])
    q = torch.randn(2, rows, 6, 8, generator=generator)
    parents = torch.tensor([[-1] + [max(0, row - 2) for row in range(1, rows)]] * 2)
    visible = visibility(parents) if tree else None
    ancestors = Step.tree(lengths, parents, parents, lengths).ancestors if tree else None
    gate = torch.randn(q.shape, generator=generator)
    cache = (floats(keys), floats(values), table, lengths, ancestors)
    out, gated = paged_attention(q, *cache), paged_attention(q, *cache, gate=gate)
    assert torch.allclose(gated, out * gate.sigmoid())
    for item, length in enumerate(lengths.tolist()):
        k, v = (pool[table[item]].transpose(1, 2).flatten(0, 1) for pool in (keys, values))
        for row in range(rows):
            seen = torch.zeros(len(k), dtype=torch.bool)
            seen[:length] = True
            if visible is None:
                seen[length : length + row + 1] = True
            else:
                seen[length : length + rows] = visible[item, row]
            assert torch.allclose(out[item, row], plain(q[item, row], k, v, seen), atol=1e-5)


@pytest.mark.parametrize("window", [1, 7, 40, 500])
@pytest.mark.parametrize("length", [0, 20, 63, 64, 150])
def test_a_window_hides_what_is_far_but_not_the_beginning(window: int, length: int) -> None:
    generator = torch.Generator().manual_seed(window)
    rows = 9
    keys, values = torch.randn(2, 50, 2, PAGE, 8, generator=generator)
    table = torch.randperm(50, generator=generator)[None]
    lengths = torch.tensor([length])
    q = torch.randn(1, rows, 4, 8, generator=generator)
    parents = torch.tensor([[-1, 0, 0, 1, 3, 4, 2, 5, 7]])
    step = Step.tree(torch.tensor([0]), parents, parents, lengths)
    cache = (floats(keys), floats(values), table, lengths, step.ancestors)
    out = paged_attention(q, *cache, window=window)
    assert torch.allclose(ordered_attention(q, *cache, window=window), out, atol=1e-5)
    k, v = (pool[table[0]].transpose(1, 2).flatten(0, 1) for pool in (keys, values))
    at = torch.cat([torch.arange(length), step.positions[0]])
    for row in range(rows):
        position = int(step.positions[0, row])
        seen = torch.zeros(len(k), dtype=torch.bool)
        for index, other in enumerate(at.tolist()):
            ancestor = index < length or bool(visibility(parents)[0, row, index - length])
            seen[index] = ancestor and (other < 64 or other >= position - window + 1)
        assert torch.allclose(out[0, row], plain(q[0, row], k, v, seen), atol=1e-5)


@pytest.mark.parametrize("format", ["f32", "q8_0", "tq3_0"])
@pytest.mark.parametrize(("length", "window"), [(0, None), (50, None), (127, None), (250, 90)])
def test_a_row_has_the_bits_that_it_has_after_its_path_was_committed(
    format: str, length: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "SPLITS", 4)
    monkeypatch.setattr(reference, "TIERS", ((1, 2), (3, 3)))
    rows, dim, page = 20, 32, 16
    generator = torch.Generator().manual_seed(length)
    pages = -(-(length + rows) // page)
    heads = torch.randn(2, pages, 2, page, dim, generator=generator)
    pools = [stored(part, format) for part in heads]
    table = torch.randperm(pages, generator=generator)
    parents = torch.tensor([[-1] + [max(0, row - 1 - row % 3) for row in range(1, rows)]])
    ancestors = Step.tree(table[:1], parents, parents, table[:1]).ancestors
    assert ancestors is not None
    q = torch.randn(1, rows, 4, dim, generator=generator)
    found = ordered_attention(q, *pools, table[None], torch.tensor([length]), ancestors, window=window)
    for row, moved, position in roots(pools, table, length, ancestors[0]):
        cache = (*moved, table[None], position, torch.ones(1, 1, dtype=torch.int64))
        alone = ordered_attention(q[:, row : row + 1], *cache, window=window)
        assert torch.equal(alone[0, 0], found[0, row]), row
