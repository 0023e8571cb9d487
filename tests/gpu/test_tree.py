"""The best draft tree and the accepted path, on the device against the CPU's reference."""

import random

import pytest
import torch
from torch import Tensor

from bough.kernels.tree import Correction, accept_path, best_tree
from tests.gpu.inputs import DEVICE
from tests.gpu.numerics import assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference_mode")]

FIELDS = ("tokens", "parents", "ancestors", "depths")


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("scores", ["distinct", "with ties"])
def test_a_tree_is_built_and_accepted_as_on_the_cpu(scores: str, seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    depths, width = random.choice(((15, 24), (15, 16), (7, 5)))
    chains, nodes = random.randint(0, 2), random.choice((1, 7, 22, 63))
    sequences = 1 + seed % 4
    ids = torch.stack([torch.randperm(40)[:width] for _ in range(sequences * depths)])
    ids = ids.view(sequences, depths, width)
    shape = (sequences, depths, width + 1, width) if seed % 3 == 0 else ids.shape
    log_probabilities = (torch.randn(shape) * 2).log_softmax(-1)
    if scores == "with ties":
        log_probabilities = (log_probabilities * 2).round() / 2
    parts = (
        99 + torch.arange(sequences),
        ids,
        log_probabilities,
        torch.randint(-1, 40, (sequences, chains, depths)),
        -torch.randint(0, 4, (sequences, chains, depths)).float() / 2,
    )
    edges, bins = torch.linspace(-4, -0.1, 9), (torch.arange(depths) // 3).clamp(max=5)
    correction = Correction(edges, torch.randn(6, 10) / 4, bins) if seed % 2 else None
    options = {
        "nodes": nodes,
        "rows": random.choice([bucket for bucket in (8, 16, 24, 64) if bucket > nodes]),
        "spine": random.choice((1.0, -4.0, -20.0)),
    }
    expected, expected_weights = best_tree(*parts, correction=correction, **options)
    if correction:
        correction = Correction(edges.to(DEVICE), correction.table.to(DEVICE), bins.to(DEVICE))
    found, weights = best_tree(*(part.to(DEVICE) for part in parts), correction=correction, **options)
    for name, field, wanted in zip(FIELDS, found.cpu().unbind(1), expected.unbind(1), strict=True):
        assert_same_bits(field, wanted, name)
    assert_same_bits(weights.cpu(), expected_weights, "weights")
    check_acceptance(expected[0])


def check_acceptance(tree: Tensor) -> None:
    """Accept a path of a packed tree [4, rows]; the target samples a child after most rows that have one."""
    tokens, parents, ancestors, _ = tree
    sampled = tokens[torch.randint(len(tokens), (len(tokens),))]
    for row in range(len(sampled)):
        children = (parents == row).nonzero()[:, 0].tolist()
        if children and random.random() < 0.9:
            sampled[row] = tokens[random.choice(children)]
    stops = sampled[torch.randint(len(sampled), (random.choice((0, 1)),))][None]
    limits = torch.tensor([random.choice((1, 3, 64))])
    results = []
    for device in (torch.device("cpu"), DEVICE):
        counts = torch.zeros(1, 200, device=device)
        arguments = [part.to(device) for part in (tokens, parents, ancestors, sampled)]
        tables = {"stops": stops, "limits": limits, "slots": torch.tensor([0])}
        tables = {name: table.to(device) for name, table in tables.items()}
        accepted = accept_path(*arguments, **tables, counts=counts)
        results.append((accepted.flat.cpu(), counts.cpu()))
    for name, expected, found in zip(("path", "counts"), *results, strict=True):
        assert_same_bits(found, expected, name)
