"""The draft tree that one step verifies, and how it is built from a drafter's proposal.

Row 0 is the root, the last sampled token. A child's row comes after its parent's. A chain is a tree without
branches; plain decoding is the tree that has only its root.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from bough.kernels.tree import MAX_ROWS, Candidates, Correction, TreeForm, best_tree, pack_tree

_ROOT = pack_tree([0], [-1]).numpy()  # a root and its padding


@dataclass(frozen=True, slots=True)
class Tree:
    """The first `size` rows of a packed tree, in order of worth where it was built from a proposal."""

    # [4, 64] int64: tokens, parents (-1 for the root), ancestors (bit j set: row j is this row or above it)
    # and depths; rows from `size` on are not part of the tree. Lies on the device where the tree was built.
    packed: Tensor
    size: int

    @classmethod
    def root(cls, token: int) -> Self:
        packed = _ROOT.copy()
        packed[0] = token
        return cls(torch.from_numpy(packed), 1)

    @classmethod
    def roots(cls, tokens: Sequence[int]) -> list[Self]:
        """Return a root for each of some sequences."""
        if len(tokens) == 1:
            return [cls.root(tokens[0])]
        packed = np.tile(_ROOT, (len(tokens), 1, 1))
        packed[:, 0] = np.array(tokens)[:, None]
        return [cls(each, 1) for each in torch.from_numpy(packed).unbind()]

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
class SharedTrees:
    """Trees on the device that share the rows of a step, best rows first.

    How many rows each has is read back with what was accepted. In static buffers, of the last step.
    """

    rows: Tensor  # [4, 64] tokens, parents, ancestors, depths: one tree after the other
    first: Tensor  # [S + 1 or more] first row of each, and the end of the last
    given: Tensor  # [64] the token after each row of a prompt, else -1
    size: int  # rows in all, at most
    most: int  # rows of one tree, at most


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidates for the positions after the anchor; scores are log probabilities, at most 0.

    Of several sequences all tensors have one more dimension, the first. `ids` and `scores` hold k
    candidates for each of K depths. Without `edges` and `given` these are independent of their parents.
    `edges` [K, k + 1, k]: their scores after each candidate of the depth before, in the last row after
    any other token, and for the first depth in the first row. `given` [K, K]: the candidates of a depth
    follow this path alone, padded with -1; chains hold what follows other paths. `chains` are whole
    continuations: a token counts only where all tokens before it on the chain are accepted; -1 ends a
    chain.
    """

    ids: Tensor  # [K, k] int64
    scores: Tensor  # [K, k] float32
    chains: Tensor  # [m, K] int64
    chain_scores: Tensor  # [m, K] float32
    given: Tensor | None = None
    edges: Tensor | None = None

    @classmethod
    def of(cls, ids: Tensor, scores: Tensor) -> Self:
        """Return a proposal without chains."""
        shape = (*ids.shape[:-2], 0, ids.shape[-2])
        return cls(ids, scores, ids.new_empty(shape), scores.new_empty(shape))

    @classmethod
    def stack(cls, proposals: Sequence[Self]) -> Self:
        """Return the proposals of several sequences as one."""

        def stacked(name: str) -> Any:
            parts = [getattr(each, name) for each in proposals]
            return None if parts[0] is None else torch.stack(parts)

        return cls(*(stacked(field.name) for field in fields(cls)))

    def one(self, index: int) -> "Proposal":
        """Return the proposal of one of several sequences."""
        parts = (getattr(self, field.name) for field in fields(self))
        return Proposal(*(part if part is None else part[index] for part in parts))

    @classmethod
    def best_path(cls, ids: Tensor, edges: Tensor) -> Self:
        """Return the path of best children alone, from candidates [K, k] and their edges [K, k + 1, k]."""
        depth, row = len(ids), ids.new_zeros(1)
        tokens, scores = [], []
        for column in range(depth):
            line = edges[column].index_select(0, row)[0]
            row = line.argmax(-1, keepdim=True)
            tokens.append(ids[column].gather(0, row))
            scores.append(line.gather(0, row))
        path, gains = torch.cat(tokens), torch.cat(scores)
        before = torch.arange(depth, device=ids.device)
        given = torch.where(before[:, None] > before, path, -1)
        return cls(path[:, None], gains[:, None], path[None], gains[None], given)

    @property
    def depth(self) -> int:
        return self.ids.shape[-2]

    def with_chains(self, chains: Tensor, scores: Tensor) -> "Proposal":
        """Return the proposal with more chains [m, K], cut to its depth."""
        depth = self.depth
        return Proposal(
            self.ids,
            self.scores,
            torch.cat([self.chains, chains[..., :depth]], -2),
            torch.cat([self.chain_scores, scores[..., :depth]], -2),
            self.given,
            self.edges,
        )

    def resized(self, depth: int) -> "Proposal":
        """Return the proposal for `depth` depths: the others are cut off, or hold no candidates."""
        more = depth - self.depth
        if not more:
            return self

        def sized(part: Tensor, value: float, *, after: int) -> Tensor:
            """`after`: dimensions after that of the depths."""
            return pad(part, (0, 0) * after + (0, more), value=value)

        given, edges = self.given, self.edges
        if given is not None:
            # No text follows a path of -2.
            given = sized(sized(given, -1, after=0), -2, after=1)
        return Proposal(
            sized(self.ids, -1, after=1),
            sized(self.scores, -torch.inf, after=1),
            sized(self.chains, -1, after=0),
            sized(self.chain_scores, -torch.inf, after=0),
            given,
            None if edges is None else sized(edges, -torch.inf, after=2),
        )

    def corrected(self, correction: Correction) -> "Proposal":
        """Return the proposal with calibrated chains; `build_tree` calibrates the candidates."""
        if not self.chains.shape[-2]:
            return self
        by_depth = correction.applied(self.chain_scores.movedim(-1, 0))
        return replace(self, chain_scores=by_depth.movedim(0, -1).contiguous())

    def scores_of(self, chains: Tensor, correction: Correction) -> Tensor:
        """Return the calibrated scores [S, m, K] that candidates give to chains [S, m, K], else -inf.

        For several sequences. Scores that depend on the parent are those after the chain's token before.
        """
        corrected = correction.applied(self.tree_scores().movedim(1, 0)).movedim(0, 1)
        same = (chains[..., None] == self.ids[:, None]) & (chains >= 0)[..., None]  # [S, m, K, k]
        if self.edges is None:
            lines = corrected[:, None]
        else:
            width = self.ids.shape[-1]
            before = torch.where(same.any(-1), same.int().argmax(-1), width)
            before = pad(before[..., :-1], (1, 0))  # of the first depth: the first line
            index = before[..., None, None].expand(-1, -1, -1, 1, width)
            lines = corrected[:, None].expand(-1, chains.shape[1], -1, -1, -1).gather(3, index)[..., 0, :]
        return torch.where(same, lines, -torch.inf).amax(-1)

    def tree_scores(self) -> Tensor:
        """Return the scores that a tree is built from: edges, or [K, k], -inf for what follows one path."""
        if self.edges is not None:
            return self.edges
        if self.given is None:
            return self.scores
        first, deeper = self.scores.tensor_split([1], -2)
        return torch.cat([first, torch.full_like(deeper, -torch.inf)], -2)


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
    trees = build_trees(anchor, Proposal.stack([proposal]), nodes=nodes, spine=spine, correction=correction)
    packed, weights = (part[0] for part in trees)
    return Tree(packed, nodes + 1), weights


def build_trees(
    anchors: Tensor, proposal: Proposal, *, nodes: int, spine: float, correction: Correction | None
) -> tuple[Tensor, Tensor]:
    """Return the packed trees [S, 4, 64] of several sequences, and the weights [S, 64] of their rows."""
    candidates = Candidates(proposal.ids, proposal.tree_scores(), proposal.chains, proposal.chain_scores)
    return best_tree(anchors, candidates, TreeForm(nodes, spine=spine, correction=correction))
