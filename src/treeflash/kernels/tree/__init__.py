"""Trees of candidates: the best one of a size, and the path of a verified one that the target agrees with.

A tree's rows come in order of worth, the root first, each behind its parent. Rows that are only padding hang
below nothing (parent -1), see themselves alone and weigh -inf; no walk reaches them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treeflash.kernels.tree import reference
from treeflash.kernels.tree.reference import Correction

__all__ = ["MAX_ROWS", "Correction", "TreeRows", "Walked", "build_tree", "walk_tree"]

MAX_ROWS = 64  # of a tree: the ancestors of a row are the bits of one 64-bit word
ROWS = MAX_ROWS


@dataclass(frozen=True, slots=True)
class TreeRows:
    """[rows] each."""

    tokens: Tensor  # int64, the anchor first
    parents: Tensor  # int64, -1 for the root and padding
    weights: Tensor  # float32, log probability of the whole path to a row; 0 for the root
    ancestors: Tensor  # int64, bit j set: row j is this row or above it
    positions: Tensor  # int64, absolute


@dataclass(frozen=True, slots=True)
class Walked:
    """What a walk decided, as views of one tensor: one copy brings all of it to the host."""

    flat: Tensor  # int64

    @property
    def count(self) -> Tensor:
        """[1] accepted rows, the root included."""
        return self.flat[0:1]

    @property
    def next_token(self) -> Tensor:
        """[1] what the target says behind the last of them."""
        return self.flat[1:2]

    @property
    def last(self) -> Tensor:
        """[1] the last accepted row."""
        return self.flat[2:3]

    @property
    def bits(self) -> Tensor:
        """[1] its ancestors, itself included: the path."""
        return self.flat[3:4]

    @property
    def rows(self) -> Tensor:
        """[64] accepted rows from the root down, then -1."""
        return self.flat[4 : 4 + ROWS]

    @property
    def decided(self) -> Tensor:
        """[64] tokens of the accepted rows below the root, then the next one: `count` in all, then -1."""
        return self.flat[4 + ROWS : 4 + 2 * ROWS]

    @property
    def source(self) -> Tensor:
        """[64] the accepted rows, then each row itself: what belongs in each place if only the path stays."""
        return self.flat[4 + 2 * ROWS :]


def build_tree(
    anchor: Tensor,
    position: Tensor,
    ids: Tensor,
    scores: Tensor,
    chains: Tensor,
    chain_scores: Tensor,
    *,
    nodes: int,
    rows: int,
    spine: float = 1.0,
    correction: Correction | None = None,
    edge: Callable[[int, Tensor], Tensor] | None = None,
) -> TreeRows:
    """The `nodes` likeliest prefixes below `anchor` [1], which stands at `position` [1], padded to `rows`.

    ids, scores [K, k]: candidates of each depth with log probabilities; chains, chain_scores [m, K]: whole
    continuations, -1 ends one early. The path of best children is in while its weight is at least `spine`.
    `edge(depth, parents)` adds to the scores behind parent tokens [W]: [W, k]; it is asked from the host.
    """
    if ids.is_cuda and edge is None:
        from treeflash.kernels.tree import triton_kernels as kernel

        parts = (anchor, position, ids, scores, chains, chain_scores)
        built = kernel.build(*parts, nodes=nodes, rows=rows, spine=spine, correction=correction)
        return TreeRows(*built)
    corrected = correction.applied(scores) if correction else scores
    tokens, parents, weights = reference.best_first(
        int(anchor), ids, corrected, chains, chain_scores, nodes=nodes, spine=spine, edge=edge
    )
    depths, ancestors = [0], [1]
    for row, parent in enumerate(parents[1:], 1):
        depths.append(depths[parent] + 1)
        ancestors.append(ancestors[parent] | 1 << row)
    for row in range(len(tokens), rows):
        tokens.append(tokens[0])
        parents.append(-1)
        weights.append(-torch.inf)
        depths.append(0)
        ancestors.append(1 << row)
    signed = [bits - 2**64 if bits >= 2**63 else bits for bits in ancestors]
    integers = torch.tensor([tokens, parents, signed, depths], device=ids.device)
    return TreeRows(
        integers[0],
        integers[1],
        torch.tensor(weights, device=ids.device),
        integers[2],
        integers[3] + position,
    )


def walk_tree(
    tokens: Tensor,
    parents: Tensor,
    ancestors: Tensor,
    chosen: Tensor,
    *,
    stops: Tensor,
    room: Tensor,
    written: Tensor | None = None,
) -> Walked:
    """Follows the target's own choices from the root; chosen [T] is the token it draws behind each row.

    A choice among `stops` [S] ends the walk, and so do `room` [1] rows, at least one: then what is processed
    is what plain decoding would have processed. `written` [V] counts the accepted rows' tokens.
    """
    if tokens.is_cuda:
        from treeflash.kernels.tree import triton_kernels as kernel

        flat = kernel.walk(tokens, parents, ancestors, chosen, stops=stops, room=room, written=written)
        return Walked(flat)
    picks = chosen.tolist()
    path = reference.walk(tokens.tolist(), parents.tolist(), picks, stops=stops.tolist(), room=int(room))
    if written is not None:
        accepted = tokens[path]
        written.index_add_(0, accepted, torch.ones(len(path), device=written.device))
    spare = [-1] * (ROWS - len(path))
    drawn = [picks[row] for row in path]
    source = path + list(range(len(path), ROWS))
    header = [len(path), drawn[-1], path[-1], int(ancestors[path[-1]])]
    return Walked(torch.tensor(header + path + spare + drawn + spare + source))
