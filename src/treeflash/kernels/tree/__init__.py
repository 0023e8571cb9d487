"""Draft trees: the best tree of a size, and the path of a verified tree that the target accepts.

Rows are in order of worth, the root first, each after its parent. Padding rows have no parent (-1), see only
themselves and have weight -inf; acceptance never reaches them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treeflash.kernels.tree import reference
from treeflash.kernels.tree.reference import Correction

__all__ = ["MAX_ROWS", "Acceptance", "Correction", "accept_path", "best_tree", "pack_tree"]

MAX_ROWS = 64  # of a tree: the ancestors of a row are the bits of one 64-bit word
_HEADER = 4  # count, next token, last row, its ancestor bits


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The accepted path of a verified tree, as named views of one tensor: one copy brings all to the host."""

    flat: Tensor  # [SIZE] int64

    SIZE = _HEADER + 3 * MAX_ROWS

    @property
    def count(self) -> Tensor:
        """[1] accepted rows, the root included."""
        return self.flat[0:1]

    @property
    def next_token(self) -> Tensor:
        """[1] the token that the target sampled after the last accepted row."""
        return self.flat[1:2]

    @property
    def last_row(self) -> Tensor:
        """[1] the last accepted row."""
        return self.flat[2:3]

    @property
    def path_bits(self) -> Tensor:
        """[1] the ancestor bits of the last accepted row: the path."""
        return self.flat[3:4]

    @property
    def rows(self) -> Tensor:
        """[64] accepted rows from the root down, then -1."""
        return self.flat[_HEADER : _HEADER + MAX_ROWS]

    @property
    def tokens(self) -> Tensor:
        """[64] tokens of the accepted rows below the root, then the next token: `count` in all, then -1."""
        return self.flat[_HEADER + MAX_ROWS : _HEADER + 2 * MAX_ROWS]

    @property
    def source(self) -> Tensor:
        """[64] for each row, the row that replaces it when the accepted path is compacted to the front."""
        return self.flat[_HEADER + 2 * MAX_ROWS :]

    def path(self) -> tuple[list[int], list[int]]:
        """Return the accepted rows and the tokens they decided; on the host."""
        count = int(self.flat[0])
        return self.rows[:count].tolist(), self.tokens[:count].tolist()


def pack_tree(tokens: list[int], parents: list[int], *, rows: int = MAX_ROWS) -> Tensor:
    """Return [4, rows] int64: tokens, parents, ancestor bits and depths; rows beyond the tree are padding."""
    depths, ancestors = [0], [1]
    for row, parent in enumerate(parents[1:], 1):
        depths.append(depths[parent] + 1)
        ancestors.append(ancestors[parent] | 1 << row)
    padding = rows - len(tokens)
    signed = [bits - 2**64 if bits >= 2**63 else bits for bits in ancestors]
    signed += [-(2**63) if row == 63 else 1 << row for row in range(len(tokens), rows)]
    return torch.tensor(
        [tokens + tokens[:1] * padding, parents + [-1] * padding, signed, depths + [0] * padding]
    )


def best_tree(
    anchor: Tensor,
    ids: Tensor,
    scores: Tensor,
    chains: Tensor,
    chain_scores: Tensor,
    *,
    nodes: int,
    rows: int = MAX_ROWS,
    spine: float = 1.0,
    correction: Correction | None = None,
    edge: Callable[[int, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the `nodes` likeliest prefixes below `anchor` [1] as a packed tree [4, rows] and weights [rows].

    ids, scores [K, k]: candidates of each depth with log probabilities; chains, chain_scores [m, K]: whole
    continuations, ended by -1. The path of best children is included while its weight is at least `spine`. A
    row's weight is the log probability of the path to it. `edge(depth, parents)` adds to the scores after
    parent tokens [W]: [W, k]; it is evaluated on the host.
    """
    if ids.is_cuda and edge is None:
        from treeflash.kernels.tree import triton_kernels

        parts = (anchor, ids, scores, chains, chain_scores)
        return triton_kernels.best_tree(*parts, nodes=nodes, rows=rows, spine=spine, correction=correction)
    corrected = correction.applied(scores) if correction else scores
    tokens, parents, weights = reference.best_first(
        int(anchor), ids, corrected, chains, chain_scores, nodes=nodes, spine=spine, edge=edge
    )
    padding = [-torch.inf] * (rows - len(tokens))
    packed = pack_tree(tokens, parents, rows=rows)
    return packed.to(ids.device), torch.tensor(weights + padding, device=ids.device)


def accept_path(
    tokens: Tensor,
    parents: Tensor,
    ancestors: Tensor,
    sampled: Tensor,
    *,
    stops: Tensor,
    limit: Tensor,
    counts: Tensor,
) -> Acceptance:
    """Accept the path on which the tree holds what the target sampled; sampled [T], a token after each row.

    A sampled token among `stops` [S] ends the path, and so do `limit` [1] rows, at least one: the accepted
    rows are those that plain decoding would have processed. Their tokens are added to `counts` [V].
    """
    if tokens.is_cuda:
        from treeflash.kernels.tree import triton_kernels

        flat = triton_kernels.accept_path(
            tokens, parents, ancestors, sampled, stops=stops, limit=limit, counts=counts
        )
        return Acceptance(flat)
    picks, own = sampled.tolist(), tokens.tolist()
    path = reference.accept_path(own, parents.tolist(), picks, stops=stops.tolist(), limit=int(limit))
    times, size = counts.numpy(), len(path)
    for row in path:
        times[own[row]] += 1
    flat = np.full(Acceptance.SIZE, -1)
    rows, decided, source = flat[_HEADER:].reshape(3, MAX_ROWS)
    rows[:size], decided[:size], source[:] = path, [picks[row] for row in path], np.arange(MAX_ROWS)
    source[:size] = path
    flat[:_HEADER] = size, decided[size - 1], path[-1], int(ancestors[path[-1]])
    return Acceptance(torch.from_numpy(flat))
