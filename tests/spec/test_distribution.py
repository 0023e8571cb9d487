"""Three tokens in a row against their exact joint distribution, on a toy target of six tokens.

Every round samples with noise of its own, builds a tree (from scores that know the same noise, as the product
does, or that do not) and accepts its path. What comes out must follow the target whatever the draft
believes. The negative control is the rule that others fell for: accepting a top-k child with min(1, p/q).
"""

import math

import pytest
import torch
from torch import Tensor

from bough.kernels.sampling import filtered, gumbel, sample
from bough.kernels.tree.reference import accept_path
from bough.spec.tree import Proposal, build_tree
from tests.engine.oracles import trimmed

V, DEPTH = 6, 3
ROUNDS = 1_000_000
WALKS = 600
FILTERS = {
    "none": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "cooler": {"temperature": 0.6, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "top-k": {"temperature": 1.0, "top_k": 3, "top_p": 1.0, "min_p": 0.0},
    "top-p": {"temperature": 1.2, "top_k": 0, "top_p": 0.7, "min_p": 0.0},
    "min-p": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.2},
}


def tables(seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """The target's logits behind every path, [6^d, 6] for d = 0, 1, 2; the draft's wrong rows [3, 6]."""
    generator = torch.Generator().manual_seed(seed)
    target = [2 * torch.randn(V**depth, V, generator=generator) for depth in range(DEPTH)]
    draft = torch.stack([rows.softmax(-1).mean(0).log() for rows in target])
    return target, draft + 0.7 * torch.randn(DEPTH, V, generator=generator)


def filtered_probability(logits: Tensor, options: dict) -> Tensor:
    scores, ids = filtered(logits, **options)
    return torch.zeros_like(logits).scatter(1, ids, scores.softmax(-1)).double()


def exact_joint(target: list[Tensor], options: dict) -> Tensor:
    """[216]: probability of every run of three tokens."""
    joint = torch.ones(1, dtype=torch.float64)
    for rows in target:
        joint = (joint[:, None] * filtered_probability(rows, options)).flatten()
    return joint


def excess(counts: Tensor, expected: Tensor) -> float:
    """Chi-square over cells of expectation 5 and more, in units of its limit at alpha 1e-4."""
    total = counts.sum()
    assert bool((counts[expected == 0] == 0).all()), "a token that the filters cut was sampled"
    cells = expected * total >= 5
    wanted = expected[cells] * total
    statistic = float(((counts[cells] - wanted) ** 2 / wanted).sum())
    freedom = int(cells.sum()) - 1
    # Wilson and Hilferty's approximation of the quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    return statistic / limit


@pytest.mark.parametrize("name", FILTERS)
def test_samples_in_a_row_follow_the_target(name: str) -> None:
    options, (target, _) = FILTERS[name], tables()
    path = torch.zeros(ROUNDS, dtype=torch.int64)
    positions = torch.arange(ROUNDS) * DEPTH
    for depth, rows in enumerate(target):
        path = path * V + sample(rows[path], positions + depth, seed=77, **options)
    counts = torch.bincount(path, minlength=V**DEPTH).double()
    expected = exact_joint(target, options)
    assert excess(counts, expected) < 1
    variation = float((counts / ROUNDS - expected).abs().sum()) / 2
    assert variation < 3 * math.sqrt(V**DEPTH / ROUNDS)


@pytest.mark.parametrize("shared_noise", [False, True])
@pytest.mark.parametrize("nodes", [1, 8, 20])
def test_trees_give_the_samples_of_plain_decoding(nodes: int, shared_noise: bool) -> None:
    """Chained rounds: each emits what it accepts, until three tokens are there."""
    options, (target, draft) = FILTERS["cooler"], tables(1)
    counts, longer = torch.zeros(V**DEPTH), 0
    for turn in range(WALKS):
        emitted: list[int] = []
        while len(emitted) < DEPTH:
            emitted += one_round(target, draft, emitted, turn, nodes, options, shared_noise)
            longer += len(emitted) > 1
        a, b, c = emitted[:DEPTH]
        counts[(a * V + b) * V + c] += 1
        plain: list[int] = []
        for depth in range(DEPTH):
            plain.append(next_token(target, plain, turn, depth, options))
        assert emitted[:DEPTH] == plain
    assert excess(counts.double(), exact_joint(target, options)) < 1
    assert longer > WALKS / 10


def next_token(target: list[Tensor], path: list[int], turn: int, depth: int, options: dict) -> int:
    row = sum(token * V**place for place, token in enumerate(reversed(path)))
    position = torch.tensor([turn * DEPTH + depth])
    return int(sample(target[depth][row : row + 1], position, seed=5, **options)[0])


def one_round(
    target: list[Tensor], draft: Tensor, text: list[int], turn: int, nodes: int, options: dict, shared: bool
) -> list[int]:
    """Return tokens after `text`: a tree from the draft's rows, a sample after every row, acceptance."""
    start = len(text)
    scores = draft[start + 1 :] / options["temperature"]
    if len(scores) == 0:
        return [next_token(target, text, turn, start, options)]
    if shared:
        positions = turn * DEPTH + torch.arange(start + 1, DEPTH)
        scores = 2 * (scores + gumbel(5, torch.arange(V), positions[:, None]))
    top = scores.log_softmax(-1).sort(-1, descending=True)
    # The anchor is decided before a step begins.
    anchor = next_token(target, text, turn, start, options)
    proposal = Proposal.of(top.indices, top.values)
    tokens, parents = trimmed(*build_tree(torch.tensor([anchor]), proposal, nodes=nodes)).lists()
    paths: list[list[int]] = []
    sampled: list[int] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else text), token])
        depth = len(paths[-1])
        # After the last depth nothing is compared any more.
        sampled.append(next_token(target, paths[-1], turn, depth, options) if depth < DEPTH else -1)
    path = accept_path(tokens, parents, sampled)
    following = sampled[path[-1]]
    return [tokens[row] for row in path] + ([following] if following >= 0 else [])


def test_the_ratio_rule_on_chosen_children_is_caught() -> None:
    """The same statistic rejects min(1, p/q) on deterministic children by a wide margin."""
    options, (target, draft) = FILTERS["none"], tables()
    generator = torch.Generator().manual_seed(3)
    path = torch.zeros(ROUNDS, dtype=torch.int64)
    for depth, rows in enumerate(target):
        p, q = rows[path].softmax(-1), draft[depth].softmax(-1).expand(ROUNDS, V)
        child = q[0].argmax().expand(ROUNDS)
        ratio = (p / q).gather(1, child[:, None])[:, 0]
        accepted = torch.rand(ROUNDS, generator=generator) < ratio
        residual = (p - q).clamp(min=0) + 1e-12
        other = torch.multinomial(residual, 1, generator=generator)[:, 0]
        path = path * V + torch.where(accepted, child, other)
    counts = torch.bincount(path, minlength=V**DEPTH).double()
    assert excess(counts, exact_joint(target, options)) > 50
