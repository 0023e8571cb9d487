"""Weights of the labels, the loss in groups of blocks, and the statistics."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from treeflash.train import draft_loss
from treeflash.train.draft_loss import Tally, block_loss, block_weights


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def prefixes(lengths: list[int], positions: int) -> torch.Tensor:
    return torch.arange(positions) < torch.tensor(lengths)[:, None]


def test_dpace_weights_sum_the_tokens_that_depend_on_a_label():
    cost, lengths = rows(4, 5).abs(), [5, 3, 1, 0]
    weights = block_weights(cost, prefixes(lengths, 5), "dpace")
    for block, length in enumerate(lengths):
        chances = [0.5 * math.exp(-c) + 0.5 for c in cost[block].tolist()]
        for j in range(5):
            expected = sum(math.prod(chances[: m + 1]) for m in range(j, length)) if j < length else 0
            assert weights[block, j].item() == pytest.approx(expected, rel=1e-5)


def test_decay_weights_fall_with_depth():
    weights = block_weights(rows(2, 15).abs(), prefixes([15, 4], 15), "decay")
    assert weights[0].tolist() == pytest.approx([math.exp(-k / 7) for k in range(15)])
    assert torch.equal(weights[1, 4:], torch.zeros(11))


@pytest.mark.parametrize("kind", ["dpace", "decay"])
def test_groups_of_blocks_give_the_gradient_of_the_whole(monkeypatch, kind):
    head, labels = (
        rows(30, 8, seed=1),
        torch.randint(30, (2, 7, 5), generator=torch.Generator().manual_seed(2)),
    )
    valid = prefixes([5, 5, 2, 5, 1, 0, 5] * 2, 5).view(2, 7, 5)
    weight = rows(8, 8, seed=3).requires_grad_()
    inputs = rows(2, 7, 6, 8, seed=4)

    hidden = inputs @ weight
    cost = cross_entropy((hidden[:, :, 1:] @ head.T).flatten(0, 2), labels.flatten(), reduction="none")
    weights = block_weights(cost.view(14, 5), valid.view(14, 5), kind)
    (expected,) = torch.autograd.grad((cost * weights.flatten()).sum() / valid.sum() * 0.5, weight)

    mean = float((cost.detach() * valid.flatten()).sum() / valid.sum())
    for size in (1 << 28, 30 * 5 * 3):
        monkeypatch.setattr(draft_loss, "_LOGITS", size)
        weight.grad = None
        tally = block_loss(inputs @ weight, labels, valid, head, kind=kind, scale=0.5)
        assert torch.allclose(weight.grad, expected, rtol=1e-4, atol=1e-6)
        assert tally.mean_loss == pytest.approx(mean, rel=1e-5)


def test_acceptance_counts_complete_blocks_up_to_the_first_error():
    tally = Tally.zero(4, torch.device("cpu"))
    right = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 0, 0]]).bool()
    valid = prefixes([4, 4, 4, 2], 4)
    tally.add(torch.ones(4, 4), right, valid)
    assert tally.acceptance == pytest.approx(1 + (2 + 4 + 0) / 3)
    assert tally.top1 == pytest.approx([3 / 4, 1, 2 / 3, 1])
    tally.merge(tally, keep=0.5)
    assert tally.acceptance == pytest.approx(3)
    assert tally.mean_loss == 1


def test_blocks_without_labels_count_nothing():
    hidden = rows(1, 2, 4, 8).requires_grad_()
    none = torch.zeros(1, 2, 3, dtype=torch.bool)
    tally = block_loss(hidden, torch.zeros(1, 2, 3, dtype=torch.int64), none, rows(5, 8), kind="dpace")
    assert tally.mean_loss == 0 and tally.acceptance == 1
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
