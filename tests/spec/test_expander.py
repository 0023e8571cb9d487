"""Best-first growth against all paths, scored one by one."""

import itertools
from functools import cache

import pytest
import torch
from torch import Tensor

from bough.spec.expander import CHAINS, Expander, Growth, Nodes
from bough.spec.tree import Proposal, build_tree

DEPTH, CHILDREN = 3, 4


@cache
def scores_after(path: tuple[int, ...], seed: int) -> list[float]:
    """Log probabilities of tokens 0 to 3 after a path, by a generator of its own."""
    generator = torch.Generator().manual_seed(hash((path, seed)) % 2**31)
    return (1.5 * torch.randn(CHILDREN, generator=generator)).log_softmax(0).tolist()


class ByPath:
    """Scores what follows each whole path, in any order of expansions, and records them."""

    def __init__(self, anchors: list[int], seed: int = 0):
        self._anchors, self._seed = anchors, seed
        self.paths: list[list[tuple[int, ...]]] = [[] for _ in anchors]

    def __call__(self, nodes: Nodes) -> tuple[Tensor, Tensor]:
        ids, scores = [], []
        for item, (tokens, depths, above) in enumerate(
            zip(nodes.tokens, nodes.depths, nodes.above, strict=True)
        ):
            known = self.paths[item]
            rows = []
            for token, depth, lineage in zip(tokens.tolist(), depths.tolist(), above.tolist(), strict=True):
                path = (*known[lineage[depth - 1]], token) if depth else (token,)
                assert [known[number] for number in lineage[:depth]] == [
                    path[:end] for end in range(1, depth + 1)
                ]
                rows.append(path)
            known += rows
            best = [torch.tensor(scores_after(path, self._seed)).sort(descending=True) for path in rows]
            ids.append(torch.stack([each.indices for each in best]))
            scores.append(torch.stack([each.values for each in best]))
        return torch.stack(ids), torch.stack(scores)


def best_paths(anchor: int, seed: int = 0) -> list[tuple[int, ...]]:
    """All paths below the anchor, the likeliest first; of equal ones the shallower."""
    weights = {}
    for depth in range(1, DEPTH + 1):
        for path in itertools.product(range(CHILDREN), repeat=depth):
            whole = (anchor, *path)
            weights[path] = sum(scores_after(whole[:end], seed)[whole[end]] for end in range(1, depth + 1))
    return sorted(weights, key=lambda path: (-weights[path], len(path)))


def tree_paths(anchor: int, proposal: Proposal, nodes: int) -> set[tuple[int, ...]]:
    tree, weights = build_tree(torch.tensor([anchor]), proposal, nodes=nodes)
    tokens, parents = tree.lists()
    paths = [()]
    for row in range(1, int((weights > -torch.inf).sum())):
        paths.append((*paths[parents[row]], tokens[row]))
    return set(paths[1:])


def leaves(paths: set[tuple[int, ...]]) -> int:
    """Those below the first depth, each of which is a chain."""
    parents = {path[:-1] for path in paths}
    return sum(len(path) > 1 and path not in parents for path in paths)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_a_tree_of_every_size_has_the_likeliest_paths(seed, width):
    anchors = [9, 8]
    growth = Growth(rounds=24 // width, width=width, depth=DEPTH)
    proposals = Expander(torch.tensor(anchors), ByPath(anchors, seed), growth).proposal()
    for index, anchor in enumerate(anchors):
        everything, cut = best_paths(anchor, seed), False
        for nodes in range(1, 64):
            best = set(everything[:nodes])
            if leaves(best) > CHAINS:
                cut = True  # the paths that fit, and nothing else
                assert tree_paths(anchor, proposals.one(index), nodes) <= best
            else:
                assert tree_paths(anchor, proposals.one(index), nodes) == best
        assert cut


def test_n_rounds_of_one_node_expand_the_n_likeliest_and_the_path_of_best_children():
    scorer = ByPath([9])
    Expander(torch.tensor([9]), scorer, Growth(rounds=6, width=2, depth=DEPTH))
    expanded, best = set(scorer.paths[0]), best_paths(9)
    inner = [path for path in best if len(path) < DEPTH]
    assert {(9, *path) for path in inner[:6]} <= expanded
    path = (9,)
    for _ in range(DEPTH - 1):
        scores = scores_after(path, 0)
        path = (*path, scores.index(max(scores)))
        assert path in expanded


def test_what_follows_the_path_of_best_children_is_learnt_from():
    proposal = (
        Expander(torch.tensor([9]), ByPath([9]), Growth(rounds=8, width=2, depth=DEPTH)).proposal().one(0)
    )
    assert proposal.given is not None
    path = (9,)
    for depth in range(DEPTH):
        assert tuple(proposal.given[depth].tolist()) == path[1:] + (-1,) * (DEPTH - depth)
        scores = torch.tensor(scores_after(path, 0)).sort(descending=True)
        assert torch.equal(proposal.ids[depth], scores.indices)
        assert torch.allclose(proposal.scores[depth], scores.values)
        path = (*path, int(scores.indices[0]))


@pytest.mark.parametrize("rounds", [0, 1])
def test_depths_that_were_not_reached_have_no_candidates(rounds):
    proposal = Expander(torch.tensor([9]), ByPath([9]), Growth(rounds, 2, DEPTH)).proposal().one(0)
    assert proposal.given is not None and proposal.ids.shape == (DEPTH, CHILDREN)
    assert (proposal.given[rounds + 1 :] == -2).all() and (proposal.scores[rounds + 1 :] == -torch.inf).all()
    assert max(map(len, tree_paths(9, proposal, 63))) == rounds + 1


def flawed(nodes: Nodes, value: float) -> tuple[Tensor, Tensor]:
    shape = (*nodes.tokens.shape, CHILDREN)
    return torch.arange(CHILDREN).expand(shape), torch.full(shape, value)


@pytest.mark.parametrize("value", [float("nan"), -torch.inf])
def test_a_head_that_scores_nothing_gives_the_root(value):
    proposal = Expander(torch.tensor([9]), lambda nodes: flawed(nodes, value), Growth(8, 4, DEPTH)).proposal()
    assert tree_paths(9, proposal.one(0), 20) == set()


def test_equal_scores_give_shallow_paths_first():
    proposal = Expander(torch.tensor([9]), lambda nodes: flawed(nodes, 0.0), Growth(20, 4, DEPTH)).proposal()
    assert tree_paths(9, proposal.one(0), CHILDREN) == {(token,) for token in range(CHILDREN)}
    paths = tree_paths(9, proposal.one(0), 30)
    assert len(paths) == 30 and all(path[:-1] in paths for path in paths if len(path) > 1)


def test_sequences_do_not_see_each_other():
    anchors, growth = [3, 5, 3], Growth(7, 3, DEPTH)
    together = Expander(torch.tensor(anchors), ByPath(anchors), growth).proposal()
    for index, anchor in enumerate(anchors):
        alone = Expander(torch.tensor([anchor]), ByPath([anchor]), growth).proposal()
        for name in ("ids", "scores", "chains", "chain_scores", "given"):
            assert torch.equal(getattr(together, name)[index], getattr(alone, name)[0])
