"""The draft tree that one step verifies, and how it is built from a drafter's proposal.

Row 0 is the root, the last sampled token. A child's row comes after its parent's. A chain is a tree without
branches; plain decoding is the tree that has only its root.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from treeflash.kernels.tree import MAX_ROWS, Correction, best_tree, pack_tree

_ROOT = pack_tree([0], [-1])  # a root and its padding


@dataclass(frozen=True, slots=True)
class Tree:
    """The first `size` rows of a packed tree, in order of worth where it was built from a proposal."""

    # [4, 64] int64: tokens, parents (-1 for the root), ancestors (bit j set: row j is this row or above it)
    # and depths; rows from `size` on are not part of the tree. Lies on the device where the tree was built.
    packed: Tensor
    size: int

    @classmethod
    def root(cls, token: int) -> Self:
        packed = _ROOT.clone()
        packed[0] = token
        return cls(packed, 1)

    @classmethod
    def chain(cls, tokens: list[int]) -> Self:
        return cls.of(tokens, list(range(-1, len(tokens) - 1)))

    @classmethod
    def of(cls, tokens: list[int], parents: list[int]) -> Self:
        assert len(tokens) <= MAX_ROWS, f"{len(tokens)} rows, at most {MAX_ROWS}"
        assert parents[0] == -1 and all(0 <= parent < row for row, parent in enumerate(parents) if row)
        return cls(pack_tree(tokens, parents), len(tokens))

    @property
    def tokens(self) -> Tensor:
        """[size] int64."""
        return self.packed[0, : self.size]

    @property
    def parents(self) -> Tensor:
        """[size] int64, -1 for the root."""
        return self.packed[1, : self.size]

    def lists(self) -> tuple[list[int], list[int]]:
        """Return tokens and parents on the host."""
        tokens, parents = self.packed[:2, : self.size].tolist()
        return tokens, parents


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidates for the positions after the anchor; scores are log probabilities, at most 0.

    `ids` and `scores` hold k candidates for each of K depths, independent of their parents. `chains` are
    whole continuations: a token counts only where all tokens before it on the chain are accepted; -1 ends a
    chain.
    `edge(depth, parents)` adds to a candidate's score after each of the parent tokens [W]: [W, k].
    """

    ids: Tensor  # [K, k] int64
    scores: Tensor  # [K, k] float32
    chains: Tensor  # [m, K] int64
    chain_scores: Tensor  # [m, K] float32
    edge: Callable[[int, Tensor], Tensor] | None = None

    @classmethod
    def of(cls, ids: Tensor, scores: Tensor) -> Self:
        """Return a proposal without chains."""
        depth = ids.shape[0]
        return cls(ids, scores, ids.new_empty(0, depth), scores.new_empty(0, depth))

    @property
    def depth(self) -> int:
        return self.ids.shape[0]

    def with_chains(self, chains: Tensor, scores: Tensor) -> "Proposal":
        """Return the proposal with more chains [m, K], cut to its depth."""
        depth = self.depth
        return Proposal(
            self.ids,
            self.scores,
            torch.cat([self.chains, chains[:, :depth]]),
            torch.cat([self.chain_scores, scores[:, :depth]]),
            self.edge,
        )


def build_tree(
    anchor: Tensor,
    proposal: Proposal,
    *,
    nodes: int,
    spine: float = 1.0,
    correction: Correction | None = None,
) -> tuple[Tree, Tensor]:
    """Return the tree of the `nodes` likeliest prefixes below `anchor` [1], and the weight [64] of each row.

    A row's weight is the log probability of the path to it, so the first n rows are the best tree of n rows.
    The path of best children is included while its weight is at least `spine`. With too few candidates the
    last rows are padding: they have no parent and weight -inf. Shapes depend on `nodes` alone, so a CUDA
    graph can hold the call.
    """
    packed, weights = best_tree(
        anchor,
        proposal.ids,
        proposal.scores,
        proposal.chains,
        proposal.chain_scores,
        nodes=nodes,
        spine=spine,
        correction=correction,
        edge=proposal.edge,
    )
    return Tree(packed, nodes + 1), weights
