"""The short convolution over chunks and trees against torch's own."""

import random

import pytest
import torch

from bough.kernels.causal_conv import (
    ConvRows,
    ConvWeights,
    DeltaBuffers,
    chunk_conv,
    conv_index,
    split_heads,
    tree_conv,
)
from bough.models.step import visibility


def along(series: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Depthwise convolution of [T, C], zeros nowhere: only the outputs whose whole window is present."""
    out = torch.nn.functional.conv1d(series.T[None], weight[:, None], groups=weight.shape[0])
    return torch.nn.functional.silu(out[0].T)


@pytest.mark.parametrize("rows", [1, 2, 3, 9])
@pytest.mark.parametrize("width", [2, 4])
def test_chunk(rows: int, width: int) -> None:
    inputs, window, weight = torch.randn(2, rows, 5), torch.randn(2, width - 1, 5), torch.randn(5, width)
    out, new = chunk_conv(inputs, window, weight)
    for item in range(2):
        series = torch.cat([window[item], inputs[item]])
        assert torch.allclose(out[item], along(series, weight), atol=1e-6)
        assert torch.equal(new[item], series[-(width - 1) :])


@pytest.mark.parametrize(("rows", "counts"), [(1, (0, 1)), (2, (1, 2)), (5, (0, 0)), (30, (6, 1))])
def test_tree_rows_see_their_own_path(rows: int, counts: tuple[int, int]) -> None:
    """Two trees in slots of their own, below paths of the trees before them."""
    key_heads, value_heads, dim, saved, length = 1, 2, 4, 30, max(counts)
    channels, choose = (2 * key_heads + value_heads) * dim, random.Random(rows)
    parents = torch.tensor([[-1] + [choose.randrange(row) for row in range(1, rows)] for _ in range(2)])
    path = torch.tensor([sorted(choose.sample(range(saved), length)) for _ in range(2)], dtype=torch.int64)
    slots, count, visible = torch.tensor([2, 0]), torch.tensor(counts), visibility(parents)
    window, stash = torch.randn(3, 3, channels), torch.randn(3, saved, channels)
    gates = torch.randn(3, saved, 2, value_heads)
    old_window, old_stash, old_gates = window.clone(), stash.clone(), gates.clone()
    inputs, weight = torch.randn(2, rows, channels), torch.randn(channels, 4)
    alpha, beta = torch.randn(2, 2, rows, value_heads)
    decay, bias = -torch.rand(value_heads), torch.randn(value_heads)
    step = ConvRows(slots, path, count, conv_index(parents, 4, count, length))
    buffers = DeltaBuffers(torch.empty(0), window, stash, gates)
    weights = ConvWeights(weight, decay, bias, key_heads)
    q, k, v, g, strength = tree_conv(inputs, alpha, beta, weights, buffers, step)
    for item, (slot, taken) in enumerate(zip(slots.tolist(), counts, strict=True)):
        before = torch.cat([old_window[slot], old_stash[slot, path[item, :taken]]])
        assert torch.equal(window[slot], before[-3:])
        assert torch.equal(stash[slot, :rows], inputs[item])
        assert torch.equal(g[item, :taken], old_gates[slot, path[item, :taken], 0])
        assert torch.equal(strength[item, :taken], old_gates[slot, path[item, :taken], 1])
        assert torch.equal(torch.stack([g, strength], 2)[item, length:], gates[slot, :rows])
        if taken:
            expected = split_heads(along(before, weight)[None], key_heads, dim)
            for found, wanted in zip((k, v), expected[1:], strict=True):
                assert torch.allclose(found[item, :taken], wanted[0], atol=1e-5)
        for row in range(rows):
            series = torch.cat([before, inputs[item, visible[item, row]]])
            wanted = split_heads(along(series, weight)[None, -1:], key_heads, dim)
            for found, other in zip(
                (q[item, row], k[item, length + row], v[item, length + row]), wanted, strict=True
            ):
                assert torch.allclose(found, other[0, 0], atol=1e-5)
    assert torch.allclose(g[:, length:], decay * torch.nn.functional.softplus(alpha + bias))
    assert torch.allclose(strength[:, length:], beta.sigmoid())
    assert bool((strength[:, :length][torch.arange(length) >= count[:, None]] == 0).all())
