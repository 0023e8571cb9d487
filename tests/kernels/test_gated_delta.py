"""The delta rule in its chunk and tree forms against the plain recurrence, in float64."""

import random

import pytest
import torch
from torch import Tensor

from treeflash.kernels.gated_delta import chunk_delta, fold, tree_delta
from treeflash.kernels.norm_rope import l2_norm
from treeflash.models.step import visibility

TOLERANCE = 1e-10  # float64: what is left is rounding


def make(
    batch: int, rows: int, *, key_heads: int = 2, value_heads: int = 6, dim: int = 8, seed: int = 0
) -> dict:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "q": l2_norm(normal(batch, rows, key_heads, dim), 1e-6) * dim**-0.5,
        "k": l2_norm(normal(batch, rows, key_heads, dim), 1e-6),
        "v": normal(batch, rows, value_heads, dim),
        # Strong decay in places: ratios of exponentials would overflow where differences do not.
        "g": -8 * torch.rand(batch, rows, value_heads, generator=generator, dtype=torch.float64) ** 3,
        "beta": torch.rand(batch, rows, value_heads, generator=generator, dtype=torch.float64),
        "state": normal(batch, value_heads, dim, dim),
    }


def recurrence(x: dict, path: list[int], item: int) -> tuple[Tensor, Tensor]:
    """Output of the path's last row and the state behind it, token by token."""
    state, heads = x["state"][item].clone(), torch.arange(x["v"].shape[2]) % x["k"].shape[2]
    out = state[:, 0]
    for row in path:
        k, q = x["k"][item, row][heads], x["q"][item, row][heads]
        state = state * x["g"][item, row].exp()[:, None, None]
        write = x["beta"][item, row][:, None] * (x["v"][item, row] - torch.einsum("hk,hkv->hv", k, state))
        state = state + k[:, :, None] * write[:, None]
        out = torch.einsum("hk,hkv->hv", q, state)
    return out, state


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
def test_chunk_is_the_recurrence(tokens: int) -> None:
    x = make(2, tokens, seed=tokens)
    out, state = chunk_delta(**x)
    for item in range(2):
        for row in {0, tokens // 2, tokens - 1}:
            expected, _ = recurrence(x, list(range(row + 1)), item)
            assert (out[item, row] - expected).abs().max() < TOLERANCE
        assert (state[item] - recurrence(x, list(range(tokens)), item)[1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("rows", [1, 2, 7, 23, 64])
def test_tree_rows_and_commit_are_the_recurrence_along_their_paths(rows: int) -> None:
    x, choose = make(2, rows, seed=rows), random.Random(rows)
    parents = torch.tensor([[-1] + [choose.randrange(row) for row in range(1, rows)] for _ in range(2)])
    visible = visibility(parents)
    before = x["state"].clone()
    out, writes, decay = tree_delta(**x, visible=visible)
    assert torch.equal(x["state"], before)
    for item in range(2):
        for row in range(rows):
            path = visible[item, row].nonzero()[:, 0].tolist()
            assert (out[item, row] - recurrence(x, path, item)[0]).abs().max() < TOLERANCE
    last = torch.tensor([choose.randrange(rows), -1])
    accepted = visible[torch.arange(2), last.clamp(min=0)] & (last >= 0)[:, None]
    fold(x["state"], x["k"], writes, decay, last, accepted)
    path = accepted[0].nonzero()[:, 0].tolist()
    assert (x["state"][0] - recurrence({**x, "state": before}, path, 0)[1]).abs().max() < TOLERANCE
    assert torch.equal(x["state"][1], before[1])
