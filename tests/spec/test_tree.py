"""The tree builder against a plain enumeration of every prefix."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.spec.tree import Proposal, Tree, build_tree
from tests.engine.oracles import trimmed

ANCHOR = 99


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    depth, width, chains = draw(st.integers(1, 4)), draw(st.integers(0, 4)), draw(st.integers(0, 3))
    if width == 0 and chains == 0:
        width = 1
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ids = torch.stack([torch.randperm(6, generator=generator)[:width] for _ in range(depth)])
    # Coarse scores, so that ties are common.
    scores = -torch.randint(0, 6, (depth, width), generator=generator).float() / 2
    scores = scores.sort(-1, descending=True).values
    chain_ids = torch.randint(0, 7, (chains, depth), generator=generator)
    for row in chain_ids:
        row[draw(st.integers(1, depth)) :] = -1
    chain_scores = -torch.randint(0, 4, (chains, depth), generator=generator).float() / 2
    proposal = Proposal.of(ids, scores)
    if draw(st.booleans()):
        edges = -torch.randint(0, 6, (depth, width + 1, width), generator=generator).float() / 2
        proposal = replace(proposal, edges=edges)
    return proposal.with_chains(chain_ids, chain_scores)


def own_scores(proposal: Proposal, path: tuple[int, ...]) -> dict[int, float]:
    """What may follow a path, and its log probability: the best of what the rows and the chains say."""
    depth = len(path)
    scores = proposal.scores[depth]
    if proposal.edges is not None:
        before = proposal.ids[depth - 1].tolist() if depth else []
        row = before.index(path[-1]) if path and path[-1] in before else len(proposal.ids[0]) if path else 0
        scores = proposal.edges[depth, row]
    found = dict(zip(proposal.ids[depth].tolist(), scores.tolist(), strict=True))
    for chain, scores in zip(proposal.chains.tolist(), proposal.chain_scores.tolist(), strict=True):
        if chain[depth] >= 0 and tuple(chain[:depth]) == path:
            found[chain[depth]] = max(found.get(chain[depth], -math.inf), scores[depth])
    return found


def every_prefix(proposal: Proposal) -> dict[tuple[int, ...], float]:
    found: dict[tuple[int, ...], float] = {}
    frontier = {(): 0.0}
    for _ in range(proposal.depth):
        frontier = {
            (*path, token): weight + score
            for path, weight in frontier.items()
            for token, score in own_scores(proposal, path).items()
        }
        found |= frontier
    return found


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    tokens, parents = tree.lists()
    paths: list[tuple[int, ...]] = [()]
    for row in range(1, len(tokens)):
        assert 0 <= parents[row] < row, "a parent comes before its child"
        paths.append((*paths[parents[row]], tokens[row]))
    return paths[1:]


@settings(max_examples=300, deadline=None)
@given(proposals(), st.integers(1, 30))
def test_the_tree_holds_the_likeliest_prefixes(proposal: Proposal, nodes: int) -> None:
    tree, all_weights = build_tree(torch.tensor([ANCHOR]), proposal, nodes=nodes)
    found = trimmed(tree, all_weights)
    paths, prefixes = paths_of(found), every_prefix(proposal)
    assert len(set(paths)) == len(paths) == min(nodes, len(prefixes))
    weights = all_weights[1 : found.size].tolist()
    assert weights == pytest.approx([prefixes[path] for path in paths], abs=1e-5)
    assert weights == pytest.approx(sorted(prefixes.values(), reverse=True)[: len(paths)], abs=1e-5)
    # Every other row is padding, and shapes do not depend on the scores.
    assert tree.tokens[0] == ANCHOR and bool((tree.packed[1, found.size :] == -1).all())


@settings(max_examples=100, deadline=None)
@given(proposals(), st.integers(2, 20))
def test_a_smaller_tree_is_the_beginning_of_a_larger_one(proposal: Proposal, nodes: int) -> None:
    anchor = torch.tensor([ANCHOR])
    small, small_weights = build_tree(anchor, proposal, nodes=nodes - 1)
    large, large_weights = build_tree(anchor, proposal, nodes=nodes)
    size = trimmed(small, small_weights).size
    assert large_weights[:size].tolist() == pytest.approx(small_weights[:size].tolist())
    paths_of(Tree(large.packed, size))


def test_the_spine_is_kept_while_it_survives() -> None:
    """Ten equal candidates a depth: without the spine a tree of six nodes would not go deep."""
    ids = torch.arange(10).expand(5, 10)
    scores = torch.full((5, 10), math.log(0.1)) + torch.arange(10) * -1e-3
    anchor, proposal = torch.tensor([ANCHOR]), Proposal.of(ids, scores)
    shallow = paths_of(trimmed(*build_tree(anchor, proposal, nodes=6)))
    deep = paths_of(trimmed(*build_tree(anchor, proposal, nodes=6, spine=math.log(0.02))))
    deeper = paths_of(trimmed(*build_tree(anchor, proposal, nodes=6, spine=math.log(0.5e-4))))
    assert max(map(len, shallow)) == 1
    # 0.1 survives 2%, 0.01 does not.
    assert max(map(len, deep)) == 1
    assert (0, 0, 0, 0) in deeper and (0, 0, 0, 0, 0) not in deeper


def test_edges_reorder_the_children_of_each_parent() -> None:
    # After an even token the second candidate is certain.
    even, odd = [-3.2, -0.3, -5.5], [-0.2, -3.3, -2.5]
    edges = torch.tensor([[odd] * 4] + [[even, odd, even, odd]] * 2)
    proposal = replace(Proposal.of(torch.tensor([[2, 3, 4]] * 3), edges[:, 0]), edges=edges)
    for nodes in (3, 8, 20):
        tree, weights = build_tree(torch.tensor([ANCHOR]), proposal, nodes=nodes)
        best = sorted(every_prefix(proposal).values(), reverse=True)[:nodes]
        assert weights[1 : trimmed(tree, weights).size].tolist() == pytest.approx(best, abs=1e-5)


def test_impossible_candidates_leave_the_root() -> None:
    proposal = Proposal.of(torch.tensor([[5]]), torch.tensor([[-torch.inf]]))
    assert trimmed(*build_tree(torch.tensor([ANCHOR]), proposal, nodes=4)).tokens.tolist() == [ANCHOR]
