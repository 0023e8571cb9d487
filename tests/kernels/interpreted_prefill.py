"""The Triton kernels of prompt text against their references, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bough.kernels import causal_conv, delta_rule
from bough.kernels.attention import PagedContext, prefill
from bough.kernels.attention import cpu as attention
from bough.kernels.causal_conv import ConvRows, ConvWeights, DeltaBuffers
from bough.kernels.causal_conv import chunk as conv_chunk
from bough.kernels.causal_conv import reference as conv
from bough.kernels.causal_conv import triton_kernels as conv_kernels
from bough.kernels.delta_rule import fold_path
from bough.kernels.delta_rule import triton_kernels as delta_kernels
from tests.kernels.delta_layer import copied
from tests.kernels.interpreter import close, poisoned, sum_in_order  # noqa: F401
from tests.kernels.pools import filled

sum_in_order()
torch.set_num_threads(1)
HALF = 4e-4  # error of rounding queries, keys and their dot products to float16
KEY_HEADS, VALUE_HEADS, DIM, WIDTH, SAVED = 1, 3, 16, 4, 9
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DIM


def saved_rows(dtype: torch.dtype) -> DeltaBuffers:
    """What slots hold of the text and of their last trees."""
    window, stash = (torch.randn(3, size, CHANNELS).to(dtype) for size in (WIDTH - 1, SAVED))
    gates = torch.stack([-torch.rand(3, SAVED, VALUE_HEADS), torch.rand(3, SAVED, VALUE_HEADS)], 2)
    return DeltaBuffers(torch.randn(3, VALUE_HEADS, DIM, DIM), window, stash, gates)


def random_weights() -> ConvWeights:
    decay, bias = -torch.rand(VALUE_HEADS), 30 * torch.randn(VALUE_HEADS)
    return ConvWeights(torch.randn(CHANNELS, WIDTH), decay, bias, KEY_HEADS)


def path_rows(counts: tuple[int, int]) -> ConvRows:
    path, count = (
        torch.stack([torch.randperm(SAVED)[:6].sort().values for _ in range(2)]),
        torch.tensor(counts),
    )
    index = conv.conv_index(torch.empty(2, 0, dtype=torch.int64), WIDTH, count, 6)
    return ConvRows(torch.tensor([2, 0]), path, count, index)


@pytest.mark.parametrize(
    ("rows", "counts", "dtype"),
    [(1, (0, 1), torch.float16), (2, (6, 0), torch.float32), (16, (2, 5), torch.float32),
     (37, (1, 0), torch.float16)],
)  # fmt: skip
def test_chunk_heads(rows: int, counts: tuple[int, int], dtype: torch.dtype) -> None:
    buffers, step, weights = saved_rows(dtype), path_rows(counts), random_weights()
    inputs, alpha, beta = torch.randn(2, rows, CHANNELS + 6).split([CHANNELS, 3, 3], -1)
    copy = copied(buffers)
    found = conv_chunk.chunk_heads(inputs, alpha, beta, weights, buffers, step)
    wanted = conv.chunk_heads(inputs, alpha, beta, weights, copy, step)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, HALF if one.dtype == torch.float16 else 2e-6)
    close(buffers.window, copy.window)


@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (3, 6)])
def test_fold_path(counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    buffers, step, weights = saved_rows(torch.float32), path_rows(counts), random_weights()
    before, folded = copied(buffers), copied(buffers)
    fold_path(weights, buffers, step)
    monkeypatch.setattr(causal_conv, "tree_conv", conv_kernels.tree_conv)
    monkeypatch.setattr(delta_rule, "tree_delta", delta_kernels.tree_delta)
    fold_path(weights, folded, step)
    close(folded.state, buffers.state)
    for name in ("window", "tree_inputs", "tree_gates"):
        for part in (buffers, folded):
            assert torch.equal(getattr(part, name), getattr(before, name)), name


PAGE, PAGES = 16, 20


def used_pages(table: Tensor, lengths: tuple[int, int], rows: int) -> Tensor:
    """Return [pages] bool: which a sequence of the table holds tokens in, those of its rows included."""
    places = [pages[: -(-(n + rows) // PAGE)] for pages, n in zip(table, lengths, strict=True)]
    return torch.isin(torch.arange(table.numel()), torch.cat(places))


@pytest.mark.parametrize(
    ("rows", "lengths", "dim", "formats", "gated", "tolerance"),
    [
        (1, (0, 70), 16, ("f32", "f32"), True, 2e-6),
        (16, (5, 0), 16, ("f32", "f32"), False, 2e-6),
        (75, (64, 130), 64, ("f16", "f16"), True, 1e-3),
        (70, (33, 16), 32, ("q8_0", "q8_0"), True, 1e-3),
        (33, (100, 0), 32, ("f16", "q4_0"), True, 1e-3),
        (65, (1, 63), 32, ("q5_0", "f32"), False, 1e-3),
    ],
)
def test_chunk_attention(
    rows: int,
    lengths: tuple[int, int],
    dim: int,
    formats: tuple[str, str],
    gated: bool,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in slices, which is how a quantised context is read."""
    kv_heads, group = 2, 3
    monkeypatch.setattr(prefill, "SLICE_BYTES", 2 * 2 * kv_heads * dim * 48)
    table = torch.randperm(2 * PAGES).view(2, PAGES)
    shape, used = (2 * PAGES, kv_heads, PAGE), used_pages(table, lengths, rows)
    keys, values = (filled(format, shape, dim, used) for format in formats)
    q = torch.randn(2, rows, kv_heads * group, dim)
    gate = torch.randn(2, rows, kv_heads * group, 2 * dim)[..., dim:] if gated else None
    context = PagedContext(keys, values, table, torch.tensor(lengths))
    found = prefill.chunk_attention(q, context, span=max(lengths) + rows, gate=gate)
    for one in range(2):
        lone = slice(one, one + 1)
        alone = PagedContext(keys, values, table[lone], torch.tensor(lengths[lone]))
        opened = None if gate is None else gate[lone]
        close(found[lone], attention.paged_attention(q[lone], alone, gate=opened), tolerance)


@pytest.mark.parametrize("window", [1, 5, 40, 64, 500])
@pytest.mark.parametrize(("rows", "lengths"), [(75, (64, 130)), (1, (0, 70)), (130, (90,)), (70, (0,))])
def test_chunk_attention_in_a_window(
    window: int, rows: int, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In slices, too; pages that no row sees are not read: they hold NaN."""
    kv_heads, dim, count = 2, 16, len(lengths)
    monkeypatch.setattr(prefill, "SLICE_BYTES", 2 * 4 * kv_heads * dim * 48)
    table = torch.randperm(count * PAGES).view(count, PAGES)
    shape, used = (count * PAGES, kv_heads, PAGE), used_pages(table, lengths, rows)
    pools = [filled("f32", shape, dim, used) for _ in range(2)]
    if count == 1 and (unseen := (lengths[0] - window + 1) // 64 * 64) > 0:
        for pool in pools:
            pool.codes[table[0, : unseen // PAGE]] = torch.nan
    cleaned = [replace(pool, codes=pool.codes.nan_to_num()) for pool in pools]
    q = torch.randn(count, rows, 3 * kv_heads, dim)
    options = {"window": window, "sinks": 0}
    context = PagedContext(*pools, table, torch.tensor(lengths), **options)
    found = prefill.chunk_attention(q, context, span=max(lengths) + rows)
    for one in range(count):
        lone = slice(one, one + 1)
        alone = PagedContext(*cleaned, table[lone], torch.tensor(lengths[lone]), **options)
        close(found[lone], attention.paged_attention(q[lone], alone), 2e-6)


@pytest.mark.parametrize(("rows", "lengths"), [(75, (64, 130)), (33, (100, 0)), (1, (0, 70))])
def test_chunk_attention_through_descriptors(
    rows: int, lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of the same blocks read by pointers: queries are rounded as in the kernel."""
    kv_heads, dim, blocks = 2, 32, {"BLOCK_M": 32, "BLOCK_N": 16, "num_stages": 1, "num_warps": 4}
    monkeypatch.setattr(prefill, "SLICE_BYTES", 2 * 2 * kv_heads * dim * 48)
    table = torch.randperm(2 * PAGES).view(2, PAGES)
    shape, used = (2 * PAGES, kv_heads, PAGE), used_pages(table, lengths, rows)
    keys, values = (filled("f16", shape, dim, used) for _ in range(2))
    q, gate = (torch.randn(2, rows, 3 * kv_heads, dim) for _ in range(2))
    context = PagedContext(keys, values, table, torch.tensor(lengths))
    monkeypatch.setattr(prefill, "tiles", lambda *_: blocks)
    monkeypatch.setattr(prefill, "descriptor_tiles", lambda: blocks)
    found = []
    for tiled in (False, True):
        monkeypatch.setattr(prefill, "reads_tiles", lambda *_, tiled=tiled: tiled)
        found.append(prefill.chunk_attention(q, context, span=max(lengths) + rows, gate=gate))
    assert torch.equal(*found)
