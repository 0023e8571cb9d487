"""The delta rule in its chunk and tree forms against the plain recurrence, in float64."""

import random

import pytest
import torch
from torch import Tensor

from treeflash.kernels.delta_rule import advance, chunk_delta, tree_delta
from treeflash.kernels.norm_rope import l2_norm
from treeflash.models.step import Step, visibility

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
    """Output of the path's last row and the state after it, token by token."""
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


@pytest.mark.parametrize(("rows", "path"), [(1, 0), (1, 1), (2, 3), (7, 1), (23, 0), (64, 9)])
def test_a_path_and_the_tree_below_it_are_the_recurrence(rows: int, path: int) -> None:
    """Of three slots two have a tree; the second one's path is a row shorter."""
    x, choose = make(2, path + rows, seed=rows), random.Random(rows)
    parents = torch.tensor([[-1] + [choose.randrange(row) for row in range(1, rows)] for _ in range(2)])
    step = Step.tree(torch.tensor([2, 0]), parents, parents, torch.zeros(2, dtype=torch.int64))
    assert step.ancestors is not None
    count = torch.tensor([path, max(0, path - 1)])
    state = torch.cat([x["state"].flip(0), x["state"]])[[0, 3, 1]]  # slot 2 and slot 0 are x's
    state[2], state[0] = x["state"][0], x["state"][1]
    before = state.clone()
    inputs = [x[name] for name in ("k", "v", "g", "beta")]
    out = tree_delta(
        x["q"][:, path:], *inputs, state, slots=step.slots, count=count, ancestors=step.ancestors
    )
    visible = visibility(parents)
    for item, (slot, taken) in enumerate(zip((2, 0), count.tolist(), strict=True)):
        committed = list(range(taken))
        for row in range(rows):
            above = committed + [path + i for i in visible[item, row].nonzero()[:, 0].tolist()]
            assert (out[item, row] - recurrence(x, above, item)[0]).abs().max() < TOLERANCE
        assert (state[slot] - recurrence(x, committed, item)[1]).abs().max() < TOLERANCE
    assert torch.equal(state[1], before[1])


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_a_commit_is_the_recurrence_and_empty_rows_change_nothing(rows: int) -> None:
    x = make(2, rows, seed=rows)
    before = x["state"].clone()
    kept = max(0, rows - 3)  # of the second sequence: the rows after its path are empty
    x["g"][1, kept:], x["beta"][1, kept:] = 0, 0
    advance(x["state"], x["k"], x["v"], x["g"], x["beta"])
    for item, count in enumerate((rows, kept)):
        expected = recurrence({**x, "state": before}, list(range(count)), item)[1]
        assert (x["state"][item] - expected).abs().max() < TOLERANCE
