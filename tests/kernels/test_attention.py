"""Paged attention against attention written out over the gathered keys."""

import pytest
import torch

from bough.kernels.attention import PagedContext, paged_attention
from bough.kernels.kv_cache.format import FORMATS, HeadPool
from bough.models.step import Step, visibility

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


def test_a_broken_sequence_does_not_reach_its_neighbours() -> None:
    keys, values = torch.randn(2, 8, 2, PAGE, 8)
    keys[0], values[0] = torch.nan, torch.nan  # page 0: where unused entries of a page table point
    table, lengths = torch.tensor([[0, 1, 2], [3, 0, 0]]), torch.tensor([9, 1])
    context = PagedContext(floats(keys), floats(values), table, lengths)
    out = paged_attention(torch.randn(2, 2, 4, 8), context)
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
    context = PagedContext(floats(keys), floats(values), table, lengths, ancestors)
    out, gated = paged_attention(q, context), paged_attention(q, context, gate=gate)
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
    context = PagedContext(floats(keys), floats(values), table, lengths, step.ancestors, window=window)
    out = paged_attention(q, context)
    k, v = (pool[table[0]].transpose(1, 2).flatten(0, 1) for pool in (keys, values))
    at = torch.cat([torch.arange(length), step.positions[0]])
    for row in range(rows):
        position = int(step.positions[0, row])
        seen = torch.zeros(len(k), dtype=torch.bool)
        for index, other in enumerate(at.tolist()):
            ancestor = index < length or bool(visibility(parents)[0, row, index - length])
            seen[index] = ancestor and (other < 64 or other >= position - window + 1)
        assert torch.allclose(out[0, row], plain(q[0, row], k, v, seen), atol=1e-5)
