"""The short convolution over chunks and trees against torch's own."""

import random

import pytest
import torch

from treeflash.kernels.causal_conv import chunk_conv, conv_index, tree_conv
from treeflash.models.step import visibility


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


@pytest.mark.parametrize("rows", [1, 2, 5, 30])
def test_tree_rows_see_their_own_path(rows: int) -> None:
    choose = random.Random(rows)
    parents = torch.tensor([[-1] + [choose.randrange(row) for row in range(1, rows)] for _ in range(2)])
    inputs, window, weight = torch.randn(2, rows, 5), torch.randn(2, 3, 5), torch.randn(5, 4)
    index = conv_index(parents, 4)
    out, visible = tree_conv(inputs, window, weight, index), visibility(parents)
    for item in range(2):
        for row in range(rows):
            series = torch.cat([window[item], inputs[item, visible[item, row]]])
            assert torch.allclose(out[item, row], along(series, weight)[-1], atol=1e-6)
            # What a commit of this row takes as the new window.
            both = torch.cat([window[item], inputs[item]])
            assert torch.equal(both[index[item, row, 1:]], series[-3:])
