"""What proposers say might follow, and the best tree that it makes. Plain tensors of fixed shapes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treeflash.kernels import tree
from treeflash.spec.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidates for the positions behind the anchor; scores are log probabilities, at most 0.

    `ids` and `scores` hold k candidates for each of K depths, whatever stands above them. `chains` are whole
    continuations, each token meant only where all before it on the chain came true; -1 ends one early.
    `edge(depth, parents)` adds what a candidate gains or loses behind each of the parent tokens [W]: [W, k].
    """

    ids: Tensor  # [K, k] int64
    scores: Tensor  # [K, k] float32
    chains: Tensor  # [m, K] int64
    chain_scores: Tensor  # [m, K] float32
    edge: Callable[[int, Tensor], Tensor] | None = None

    @classmethod
    def rows(cls, ids: Tensor, scores: Tensor) -> "Proposal":
        depth = ids.shape[0]
        return cls(ids, scores, ids.new_empty(0, depth), scores.new_empty(0, depth))

    @property
    def depth(self) -> int:
        return self.ids.shape[0]

    def with_chains(self, chains: Tensor, scores: Tensor) -> "Proposal":
        """The same rows with more chains; longer than the rows are deep, they are cut."""
        depth = self.depth
        return Proposal(
            self.ids,
            self.scores,
            torch.cat([self.chains, chains[:, :depth]]),
            torch.cat([self.chain_scores, scores[:, :depth]]),
            self.edge,
        )


@dataclass(frozen=True, slots=True)
class ScoredTree:
    """Rows in the order of their worth: the first n of them are the best tree of n rows.

    Where there were too few candidates the last rows are empty: they hang below nothing and weigh -inf.
    """

    tokens: Tensor  # [T] int64, the anchor first
    parents: Tensor  # [T] int64
    weights: Tensor  # [T] log probability of the whole path to a row; 0 for the root

    def trimmed(self) -> "ScoredTree":
        """Without empty rows; their number has to come to the host for it."""
        rows = int((self.weights > -torch.inf).sum())
        return ScoredTree(self.tokens[:rows], self.parents[:rows], self.weights[:rows])

    @property
    def tree(self) -> DraftTree:
        return DraftTree(self.tokens, self.parents)


def build_tree(anchor: Tensor, proposal: Proposal, *, nodes: int, spine: float = 1.0) -> ScoredTree:
    """The `nodes` likeliest prefixes below `anchor` [1].

    The path of best children is in as long as its weight is at least `spine`, whatever else there is. A child
    is never worth more than its parent, so the best prefixes form a tree. Shapes depend on `nodes` alone.
    """
    built = tree.build_tree(
        anchor,
        torch.zeros_like(anchor),
        proposal.ids,
        proposal.scores,
        proposal.chains,
        proposal.chain_scores,
        nodes=nodes,
        rows=nodes + 1,
        spine=spine,
        edge=proposal.edge,
    )
    return ScoredTree(built.tokens, built.parents, built.weights)
