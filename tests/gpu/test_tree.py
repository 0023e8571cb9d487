"""The best draft tree and the accepted path: the kernels against the CPU's reference."""

import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from bough.kernels.tree import (
    Acceptance,
    Candidates,
    Correction,
    TreeForm,
    accept_path,
    best_tree,
    triton_kernels,
)
from tests.gpu.inputs import DEVICE, INTERPRETED
from tests.gpu.numerics import assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.interpreted, pytest.mark.usefixtures("inference_mode")]

SIZES = ((5, 5), (3, 1), (4, 3)) if INTERPRETED else ((15, 24), (15, 16), (7, 5))  # depths, candidates
FIELDS = ("tokens", "parents", "ancestors", "depths")


@pytest.mark.parametrize("seed", range(8 if INTERPRETED else 60))
@pytest.mark.parametrize("scores", ["distinct", "with ties"])
def test_a_tree_is_built_and_accepted_as_on_the_cpu(scores: str, seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    depths, width = random.choice(SIZES)
    chains, nodes = random.randint(0, 2), random.choice((1, 7, 22, 63))
    sequences = 1 + seed % 4
    ids = torch.stack([torch.randperm(40)[:width] for _ in range(sequences * depths)])
    ids = ids.view(sequences, depths, width)
    shape = (sequences, depths, width + 1, width) if seed % 3 == 0 else ids.shape
    log_probabilities = (torch.randn(shape) * 2).log_softmax(-1)
    if scores == "with ties":
        log_probabilities = (log_probabilities * 2).round() / 2
    parts = (
        ids,
        log_probabilities,
        torch.randint(-1, 40, (sequences, chains, depths)),
        -torch.randint(0, 4, (sequences, chains, depths)).float() / 2,
    )
    anchors = 99 + torch.arange(sequences)
    edges, bins = torch.linspace(-4, -0.1, 9), (torch.arange(depths) // 3).clamp(max=5)
    tables = (edges, torch.randn(6, 10) / 4, bins)
    correction, on_device = (
        Correction(*(table.to(device) for table in tables)) if seed % 2 else None
        for device in (torch.device("cpu"), DEVICE)
    )
    rows = random.choice([bucket for bucket in (8, 16, 24, 64) if bucket > nodes])
    form = TreeForm(nodes, rows, random.choice((1.0, -4.0, -20.0)), correction)
    expected, expected_weights = best_tree(anchors, Candidates(*parts), form)
    moved = Candidates(*(part.to(DEVICE) for part in parts))
    form = replace(form, correction=on_device)
    found, weights = triton_kernels.best_tree(anchors.to(DEVICE), moved, form)
    for name, field, wanted in zip(FIELDS, found.cpu().unbind(1), expected.unbind(1), strict=True):
        assert_same_bits(field, wanted, name)
    assert_same_bits(weights.cpu(), expected_weights, "weights")
    check_acceptance(list(expected[:1]), ragged=False)
    check_acceptance([tree[:, : random.randint(0, tree.shape[1])] for tree in expected], ragged=True)


def check_acceptance(trees: list[Tensor], *, ragged: bool) -> None:
    """Accept paths of packed trees [4, rows]; the target samples a child after most rows that have one.

    Ragged rows end with padding, and a sequence may have none.
    """
    room = 64 - 2 * ragged
    sizes = [min(tree.shape[1], room // len(trees)) for tree in trees]
    spare = torch.zeros(4, 2 * ragged, dtype=torch.int64)
    rows = torch.cat([*(tree[:, :size] for tree, size in zip(trees, sizes, strict=True)), spare], 1)
    tokens, parents, ancestors, _ = rows
    first = [0, *accumulate(sizes)]
    sampled = tokens[torch.randint(len(tokens), (len(tokens),))]
    for begin, size in zip(first, sizes, strict=False):
        for row in range(size):
            children = (parents[begin : begin + size] == row).nonzero()[:, 0].tolist()
            if children and random.random() < 0.9:
                sampled[begin + row] = tokens[begin + random.choice(children)]
    stops = sampled[torch.randint(len(sampled), (4 * random.choice((0, 1)),))].view(4, -1)
    tables = {
        "slots": torch.randperm(4)[: len(sizes)],
        "stops": stops,
        "limits": torch.tensor([random.choice((1, 3, 64)) for _ in sizes]),
        "first": torch.tensor(first) if ragged else None,
    }
    counts = [torch.zeros(4, 200), torch.zeros(4, 200, device=DEVICE)]
    arguments = (tokens, parents, ancestors, sampled)
    expected = accept_path(*arguments, **tables, counts=counts[0])
    moved = {name: None if table is None else table.to(DEVICE) for name, table in tables.items()}
    done = triton_kernels.accept_path(*(part.to(DEVICE) for part in arguments), **moved, counts=counts[1])
    found = Acceptance(done.flat.cpu())
    for name in ("counts", "last_rows", "rows", "tokens", "source"):
        assert_same_bits(getattr(found, name), getattr(expected, name), name)
    some = expected.counts > 0  # what a sequence without rows would sample next means nothing
    for name in ("next_tokens", "path_bits"):
        assert_same_bits(getattr(found, name)[some], getattr(expected, name)[some], name)
    assert_same_bits(counts[1].cpu(), counts[0], "counts of tokens")
