"""The Triton kernel of attention over the KV cache against its reference."""

import itertools

import pytest
import torch

from bough.kernels.attention import SINKS, PagedContext
from bough.kernels.attention import cpu as attention
from bough.kernels.attention import triton_kernels as attention_kernel
from bough.kernels.kv_cache.format import FORMATS, HeadPool
from tests.kernels.interpreter import close, poisoned, sum_in_order, tree_of
from tests.kernels.paths import roots
from tests.kernels.pools import filled

__all__ = ["poisoned"]

sum_in_order()

# Relative, of matmuls in float16.
TOLERANCE = 8e-4


def few_splits(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """At most so many, and fewer for rows up to block 3 and up to block 1."""
    monkeypatch.setattr(attention_kernel, "SPLITS", most)
    monkeypatch.setattr(attention_kernel, "TIERS", ((1, most // 2), (3, most - 1)))


def check_attention(
    formats: tuple[str, str],
    *,
    dim: int,
    group: int,
    rows: int,
    lengths: tuple[int, ...],
    heads: int = 1,
    page: int = 64,
    window: int | None = None,
    sinks: int = SINKS,
    tolerance: float = TOLERANCE,
) -> None:
    count = max(-(-(length + rows) // page) for length in lengths)
    pages = len(lengths) * count + 2
    table, used = torch.randperm(pages)[:-2].view(len(lengths), count), torch.zeros(pages, dtype=torch.bool)
    for item, length in enumerate(lengths):
        used[table[item, : -(-(length + rows) // page)]] = True
    pools = [filled(name, (pages, heads, page), dim, used) for name in formats]
    step = tree_of(rows, len(lengths))
    committed = torch.tensor(lengths)
    context = PagedContext(*pools, table, committed, step.ancestors, window=window, sinks=sinks)
    q = torch.randn(len(lengths), rows, heads * group, dim)
    gate = torch.randn(len(lengths), rows, heads * group, 2 * dim)[..., dim:]
    found = attention_kernel.paged_attention(q, context, gate=gate)
    close(found, attention.paged_attention(q, context, gate=gate), tolerance)


@pytest.mark.parametrize("pair", list(itertools.product(FORMATS, FORMATS)), ids="/".join)
def test_attention_over_every_pair(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    few_splits(monkeypatch, 2)
    check_attention(pair, dim=32, group=2, rows=3, lengths=(70,))


@pytest.mark.parametrize(
    ("pair", "dim", "group", "rows", "lengths", "page"),
    [
        (("f16", "f16"), 16, 3, 1, (0, 70), 8),
        (("f32", "f16"), 24, 3, 11, (5, 130), 8),
        (("f16", "q8_0"), 64, 6, 11, (64, 1), 64),
        (("q8_0", "q4_0"), 128, 2, 7, (63, 130), 64),
        (("tq3_0", "q5_0"), 128, 1, 2, (0, 65), 16),
        (("q4_0", "tq3_0"), 256, 6, 12, (33,), 64),
        (("q5_0", "q8_0"), 256, 1, 1, (129,), 64),
    ],
)
def test_attention_of_odd_sizes(
    pair: tuple[str, str],
    dim: int,
    group: int,
    rows: int,
    lengths: tuple[int, ...],
    page: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few_splits(monkeypatch, 4)
    check_attention(pair, dim=dim, group=group, rows=rows, lengths=lengths, heads=2, page=page)


def test_attention_in_float32_is_exact_in_many_splits() -> None:
    check_attention(("f32", "f32"), dim=16, group=1, rows=5, lengths=(700,), page=8, tolerance=2e-6)


@pytest.mark.parametrize(
    ("window", "lengths"),
    [(1, (200, 64)), (2, (65, 0)), (70, (333, 70)), (128, (192, 127)), (900, (300, 64))],
)
@pytest.mark.parametrize(("page", "sinks"), [(8, SINKS), (64, SINKS), (64, 0)])
def test_a_window(
    window: int, lengths: tuple[int, int], page: int, sinks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_splits(monkeypatch, 4)
    sizes = {"dim": 16, "group": 1, "rows": 6, "lengths": lengths, "page": page, "window": window}
    check_attention(("f32", "f32"), tolerance=2e-6, sinks=sinks, **sizes)


@pytest.mark.parametrize("sinks", [0, SINKS])
def test_a_window_reads_no_page_outside_of_it(sinks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those pages hold NaN, and a value times a share of 0 would still be NaN."""
    few_splits(monkeypatch, 4)
    dim, page, length, window = 16, 64, 600, 100
    table = torch.randperm(10)[None]
    keys, values = torch.randn(2, 10, 1, page, dim)
    # Row 0 sees positions 501 and on, and the sinks on the first page; pages 1 to 6 end at 447.
    unseen = table[0, sinks // page : 7]
    keys[unseen] = values[unseen] = torch.nan
    pools = [HeadPool(FORMATS["f32"], dim, pool, None) for pool in (keys, values)]
    step, committed = tree_of(4, 1), torch.tensor([length])
    q = torch.randn(1, 4, 1, dim)
    context = PagedContext(*pools, table, committed, step.ancestors, window=window, sinks=sinks)
    found = attention_kernel.paged_attention(q, context)
    cleaned = [HeadPool(FORMATS["f32"], dim, pool.nan_to_num(), None) for pool in (keys, values)]
    context = PagedContext(*cleaned, table, committed, step.ancestors, window=window, sinks=sinks)
    close(found, attention.paged_attention(q, context))


@pytest.mark.parametrize(
    ("pair", "page", "length", "window", "sinks"),
    [
        (("f16", "f16"), 64, 250, None, SINKS),
        (("q8_0", "q4_0"), 64, 60, None, SINKS),
        (("tq3_0", "q8_0"), 64, 127, 100, SINKS),
        (("f32", "f32"), 8, 190, None, SINKS),
        (("f16", "f16"), 64, 250, 100, 0),
        (("f16", "f16"), 64, 190, 64, 0),
    ],
)
def test_a_row_has_the_bits_that_it_has_after_its_path_was_committed(
    pair: tuple[str, str],
    page: int,
    length: int,
    window: int | None,
    sinks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows in the root's block and the next, with one number of splits and with two."""
    few_splits(monkeypatch, 4)
    dim, group, rows = 32, 2, 13
    pages = -(-(length + rows) // page)
    pools = [filled(name, (pages, 1, page), dim, torch.ones(pages, dtype=torch.bool)) for name in pair]
    table, q, step = torch.randperm(pages), torch.randn(1, rows, group, dim), tree_of(rows, 1)
    assert step.ancestors is not None
    options = {"window": window, "sinks": sinks}
    context = PagedContext(*pools, table[None], torch.tensor([length]), step.ancestors, **options)
    found = attention_kernel.paged_attention(q, context)
    close(found, attention.paged_attention(q, context), TOLERANCE)
    for row, moved, position in roots(pools, table, length, step.ancestors[0]):
        root = torch.ones(1, 1, dtype=torch.int64)
        context = PagedContext(*moved, table[None], position, root, **options)
        alone = attention_kernel.paged_attention(q[:, row : row + 1], context)
        assert torch.equal(alone[0, 0], found[0, row]), row


def test_sequences_may_have_different_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    few_splits(monkeypatch, 2)
    dim, counts, lengths = 16, (3, 70 // 5, 1), (60, 130, 64)
    pools = [filled("f16", (9, 2, 64), dim, torch.ones(9, dtype=torch.bool)) for _ in range(2)]
    table, committed = torch.randperm(9).view(3, 3), torch.tensor(lengths)
    first = torch.tensor([0, *counts]).cumsum(0)
    trees = [tree_of(count, 1).ancestors for count in counts]
    q, gate = torch.randn(2, sum(counts), 10, dim)
    bits = torch.cat([tree[0] for tree in trees])
    # Padding rows after the last sequence, whatever they hold.
    padded, gates = (torch.cat([part, torch.full((2, 10, dim), torch.nan)]) for part in (q, gate))
    seen = torch.cat([bits, torch.ones(2, dtype=torch.int64)])
    context = PagedContext(*pools, table, committed, seen[None], first)
    (found,) = attention_kernel.paged_attention(padded[None], context, gate=gates[None])
    assert bool((found[-2:].nan_to_num() == 0).all())
    context = PagedContext(*pools, table, committed, bits[None], first)
    close_to = attention.paged_attention(q[None], context, gate=gate[None])
    assert float((found[:-2] - close_to[0]).norm() / close_to.norm()) < 1e-3
    for item, tree in enumerate(trees):
        rows = slice(int(first[item]), int(first[item + 1]))
        context = PagedContext(*pools, table[item : item + 1], committed[item : item + 1], tree)
        alone = attention_kernel.paged_attention(q[None, rows], context, gate=gate[None, rows])
        assert torch.equal(found[rows], alone[0])
