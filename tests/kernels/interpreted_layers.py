"""The layers' Triton kernels against their references, in Triton's interpreter."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bough.kernels.attention import cpu as attention
from bough.kernels.attention import triton_kernels as attention_kernel
from bough.kernels.causal_conv import ConvRows, ConvWeights, DeltaBuffers
from bough.kernels.causal_conv import reference as conv
from bough.kernels.causal_conv import triton_kernels as conv_kernel
from bough.kernels.delta_rule import DeltaHeads, DeltaRows
from bough.kernels.delta_rule import cpu as delta
from bough.kernels.delta_rule import triton_kernels as delta_kernel
from bough.kernels.norm_rope import reference as norm
from bough.models.step import Step
from tests.kernels.interpreter import sum_in_order

sum_in_order()

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fresh memory holds NaN, so that an element nobody writes is seen."""
    plain = torch.empty

    def empty(*shape, **options) -> Tensor:
        out = plain(*shape, **options)
        return out.fill_(torch.nan) if out.is_floating_point() else out.fill_(1 << 20)

    monkeypatch.setattr(torch, "empty", empty)
    torch.manual_seed(7)
    yield


def close(found: Tensor, wanted: Tensor, tolerance: float = 2e-6) -> None:
    assert found.shape == wanted.shape
    assert bool(found.isfinite().all())
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < tolerance, float(error)


def tree_of(rows: int, batch: int) -> Step:
    choose = random.Random(rows)
    parents = [
        [-1] + [choose.randrange(max(0, row - 5), row) for row in range(1, rows)] for _ in range(batch)
    ]
    zeros = torch.zeros(batch, dtype=torch.int64)
    return Step.tree(
        torch.arange(batch), torch.zeros(batch, rows, dtype=torch.int64), torch.tensor(parents), zeros
    )


@pytest.mark.parametrize(
    ("rows", "counts", "dtype"),
    [(1, (0, 1), torch.float16), (5, (3, 0), torch.float32), (18, (1, 17), torch.float16)],
)
def test_conv(rows: int, counts: tuple[int, int], dtype: torch.dtype) -> None:
    key_heads, value_heads, dim, width, saved, length = 1, 3, 16, 4, 18, 17
    channels = (2 * key_heads + value_heads) * dim
    step = tree_of(rows, 2)
    assert step.parents is not None
    slots, count = torch.tensor([2, 0]), torch.tensor(counts)
    path = torch.stack([torch.randperm(saved)[:length].sort().values for _ in range(2)])
    index = conv.conv_index(step.parents, width, count, length)
    assert torch.equal(conv_kernel.conv_index(step.parents, width, count, length), index)
    inputs, alpha, beta = torch.randn(2, rows, channels + 6).split([channels, 3, 3], -1)
    decay, bias = -torch.rand(value_heads), 30 * torch.randn(value_heads)
    weights = ConvWeights(torch.randn(channels, width), decay, bias, key_heads)
    state = [torch.randn(3, size, channels).to(dtype) for size in (width - 1, saved)]
    state.append(torch.randn(3, saved, 2, value_heads))
    results = []
    for implementation in (conv_kernel, conv):
        saves = [part.clone() for part in state]
        buffers = DeltaBuffers(torch.empty(0), *saves)
        rows_of_step = ConvRows(slots, path, count, index)
        out = implementation.tree_conv(inputs, alpha, beta, weights, buffers, rows_of_step)
        results.append((out, *saves))
    (found, *left), (wanted, *expected) = results
    used = torch.arange(length + rows) - count[:, None]
    used = (used < 0) | (used >= length - count[:, None])
    close(found[0], wanted[0])
    for one, other in zip(found[1:], wanted[1:], strict=True):
        close(one[used], other[used])
    for one, other in zip(left, expected, strict=True):
        close(one, other)


@pytest.mark.parametrize("sizes", [(3, 0, 7), (18, 1)])
def test_conv_of_ragged_rows(sizes: tuple[int, ...]) -> None:
    """A sequence's rows are those it has alone; padding and a sequence without rows change nothing."""
    key_heads, value_heads, dim, width, saved, length = 1, 2, 16, 4, 18, 5
    channels, batch, total = (2 * key_heads + value_heads) * dim, len(sizes), sum(sizes) + 2
    first, count = torch.tensor([0, *sizes]).cumsum(0), torch.tensor([2, 0, 5])[:batch]
    trees = [tree_of(rows, 1).parents for rows in sizes if rows]
    parents = torch.cat([*(tree[0] for tree in trees if tree is not None), torch.tensor([-1, -1])])
    index = conv.conv_index(parents, width, count, length, first)
    live = torch.ones(batch * length + total, dtype=torch.bool)
    live[-2:] = False
    assert torch.equal(conv_kernel.conv_index(parents, width, count, length, first)[live], index[live])
    inputs, alpha, beta = torch.randn(total, channels + 4).split([channels, 2, 2], -1)
    decay, bias = -torch.rand(value_heads), torch.randn(value_heads)
    weights = ConvWeights(torch.randn(channels, width), decay, bias, key_heads)
    state = [torch.randn(3, size, channels) for size in (width - 1, saved)]
    state.append(torch.randn(3, saved, 2, value_heads))
    slots, path = torch.tensor([1, 1, 0])[:batch], torch.randint(0, saved, (batch, length))
    if 0 not in sizes:
        slots = torch.tensor([2, 0])
    rows_of_step, results = ConvRows(slots, path, count, index, first), []
    for implementation in (conv_kernel, conv):
        saves = [part.clone() for part in state]
        buffers = DeltaBuffers(torch.empty(0), *saves)
        out = implementation.tree_conv(inputs, alpha, beta, weights, buffers, rows_of_step)
        results.append((out, saves))
    (found, left), (wanted, expected) = results
    used = live.clone()
    for item, (begin, taken) in enumerate(zip(first.tolist(), count.tolist(), strict=False)):
        used[item * length + begin + taken : (item + 1) * length + begin] = False
    close(found[0][:-2], wanted[0][:-2])
    for one, other in zip(found[1:], wanted[1:], strict=True):
        close(one[used], other[used])
    for one, other in zip(left, expected, strict=True):
        close(one, other)


@pytest.mark.parametrize(("rows", "counts"), [(1, (1, 0)), (7, (0, 4)), (19, (2, 3))])
def test_delta(rows: int, counts: tuple[int, int]) -> None:
    key_heads, value_heads, dim, length = 1, 2, 32, 5
    step = tree_of(rows, 2)
    assert step.ancestors is not None
    q = norm.l2_norm(torch.randn(2, rows, key_heads, dim), 1e-6)
    k = norm.l2_norm(torch.randn(2, length + rows, key_heads, dim), 1e-6)
    v = torch.randn(2, length + rows, value_heads, dim)
    g, beta = -8 * torch.rand(2, length + rows, value_heads) ** 3, torch.rand(2, length + rows, value_heads)
    count = torch.tensor(counts)
    unused = torch.arange(length + rows) - count[:, None]
    unused = (unused >= 0) & (unused < length - count[:, None])
    k[unused] = torch.nan  # nobody has written there
    states = [torch.randn(3, value_heads, dim, dim)] * 2
    states[1] = states[0].clone()
    order = delta.tree_order(step.ancestors)
    assert torch.equal(delta_kernel.tree_order(step.ancestors), order)
    rows_of_step, heads = DeltaRows(torch.tensor([2, 0]), count, order), DeltaHeads(q, k, v, g, beta)
    found, wanted = (
        implementation.tree_delta(heads, state, rows_of_step)
        for implementation, state in zip((delta_kernel, delta), states, strict=True)
    )
    close(found, wanted)
    close(states[0], states[1])


@pytest.mark.parametrize("sizes", [(1, 12, 64, 0), (24, 7)])
def test_delta_of_ragged_rows(sizes: tuple[int, ...]) -> None:
    """The order of visits; and every row has the bits of a root after its path was committed."""
    key_heads, value_heads, dim, length, batch = 1, 2, 16, 2, len(sizes)
    steps = [tree_of(rows, 1) for rows in sizes if rows]
    first = torch.tensor([0, *sizes]).cumsum(0)
    rows = int(first[-1])
    ancestors = torch.cat([step.ancestors[0] for step in steps if step.ancestors is not None])
    order = delta.tree_order(ancestors, first)
    assert torch.equal(delta_kernel.tree_order(ancestors, first), order)
    if rows > 32:  # the interpreter is slow
        return
    q = norm.l2_norm(torch.randn(rows, key_heads, dim), 1e-6)
    k = norm.l2_norm(torch.randn(batch * length + rows, key_heads, dim), 1e-6)
    v = torch.randn(len(k), value_heads, dim)
    g, beta = -torch.rand(len(k), value_heads), torch.rand(len(k), value_heads)
    state = torch.randn(batch, value_heads, dim, dim)
    rows_of_step = DeltaRows(torch.arange(batch), torch.tensor([1, 2]), order, first)
    found, wanted = (
        implementation.tree_delta(DeltaHeads(q, k, v, g, beta), state.clone(), rows_of_step)
        for implementation in (delta_kernel, delta)
    )
    close(found, wanted)
    inputs, root_only = (
        [x[: length + sizes[0]] for x in (k, v, g, beta)],
        delta.tree_order(torch.tensor([[1]])),
    )
    for row in range(sizes[0]):
        above = [length + n for n in range(sizes[0]) if int(ancestors[row]) >> n & 1]
        alone = DeltaHeads(q[None, row : row + 1], *(x[[0, *above]][None] for x in inputs))
        rows_of_step = DeltaRows(torch.tensor([0]), torch.tensor([len(above)]), root_only)
        root = delta_kernel.tree_delta(alone, state.clone(), rows_of_step)
        assert torch.equal(root[0, 0], found[row])


@pytest.mark.parametrize(
    ("length", "start", "window"), [(0, 0, None), (20, 3, None), (90, 40, 24), (33, 0, 24)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_block_attention(length: int, start: int, window: int | None, causal: bool) -> None:
    rows, kv_heads, group, dim, ring = 5, 2, 2, 16, 24
    q, k, v = torch.randn(2, rows, kv_heads * group, dim), *torch.randn(2, 2, rows, kv_heads, dim)
    keys, values = torch.randn(2, 3, ring, kv_heads, dim)
    slots, lengths, starts = torch.tensor([1, 2]), torch.tensor([9, length, 7]), torch.tensor([0, start, 0])
    positions = lengths[slots][:, None] + torch.arange(rows)
    tables = (positions, keys, values, slots, lengths, starts)
    found, wanted = (
        implementation.block_attention(q, k, v, *tables, window=window, causal=causal)
        for implementation in (attention_kernel, attention)
    )
    close(found, wanted)
