"""Draft trees: the best tree of a size, and the path of a verified tree that the target accepts.

Rows are in order of worth, the root first, each after its parent. Padding rows have no parent (-1), see only
themselves and have weight -inf; acceptance never reaches them.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from bough.kernels import native
from bough.kernels.tree import reference
from bough.kernels.tree.reference import Correction

MAX_ROWS = 64  # of a tree: the ancestors of a row are the bits of one 64-bit word
_HEADER = 4  # count, next token, last row, its ancestor bits


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The accepted paths of S trees, as named views of one tensor: one copy brings all to the host.

    Rows are numbered within their tree; a sequence without rows has accepted none.
    """

    flat: Tensor  # [S * SIZE] int64

    SIZE = _HEADER + 3 * MAX_ROWS

    @property
    def sequences(self) -> int:
        return len(self.flat) // self.SIZE

    @property
    def counts(self) -> Tensor:
        """[S] accepted rows, the root included."""
        return self._header(0)

    @property
    def next_tokens(self) -> Tensor:
        """[S] the token that the target sampled after the last accepted row."""
        return self._header(1)

    @property
    def last_rows(self) -> Tensor:
        """[S] the last accepted row; -1: none."""
        return self._header(2)

    @property
    def path_bits(self) -> Tensor:
        """[S] the ancestor bits of the last accepted row: the path."""
        return self._header(3)

    @property
    def rows(self) -> Tensor:
        """[S, 64] accepted rows from the root down, then -1."""
        return self._lists()[0]

    @property
    def tokens(self) -> Tensor:
        """[S, 64] tokens of the accepted rows below the root, then the next one: `count` in all, then -1."""
        return self._lists()[1]

    @property
    def source(self) -> Tensor:
        """[S, 64] for each row, the row that replaces it when the accepted path is compacted to the front."""
        return self._lists()[2]

    def paths(self) -> list[tuple[list[int], list[int]]]:
        """Return the accepted rows of each tree and the tokens they decided; on the host."""
        flat, sequences = self.flat.numpy(), self.sequences
        counts = flat[:sequences].tolist()
        lists = flat[_HEADER * sequences :].reshape(3, sequences, MAX_ROWS)
        rows, tokens = lists[:2, :, : max(counts, default=0)].tolist()
        return [(path[:n], ids[:n]) for path, ids, n in zip(rows, tokens, counts, strict=True)]

    def _header(self, field: int) -> Tensor:
        return self.flat[field * self.sequences : (field + 1) * self.sequences]

    def _lists(self) -> Tensor:
        return self.flat[_HEADER * self.sequences :].view(3, self.sequences, MAX_ROWS)


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
    anchors: Tensor,
    ids: Tensor,
    scores: Tensor,
    chains: Tensor,
    chain_scores: Tensor,
    *,
    nodes: int,
    rows: int = MAX_ROWS,
    spine: float = 1.0,
    correction: Correction | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the `nodes` likeliest prefixes below each of anchors [S]: packed trees [S, 4, rows], and weights
    [S, rows].

    ids [S, K, k]: candidates of each depth; scores: their log probabilities, [S, K, k], or [S, K, k + 1, k]
    after each candidate of the depth before, the last row after any other token. chains, chain_scores [S, m,
    K]: whole continuations, ended by -1. The path of best children is included while its weight is at least
    `spine`. A row's weight is the log probability of the path to it.
    """
    parts = (ids, scores, chains, chain_scores)
    if ids.is_cuda:
        from bough.kernels.tree import triton_kernels

        options = {"nodes": nodes, "rows": rows, "spine": spine, "correction": correction}
        return triton_kernels.best_tree(anchors, *(part.contiguous() for part in parts), **options)
    trees = [
        _best_tree(*inputs, nodes=nodes, rows=rows, spine=spine, correction=correction)
        for inputs in zip(anchors.tolist(), *parts, strict=True)
    ]
    if len(trees) == 1:
        packed, weights = trees[0]
        return packed[None], weights[None]
    packed, weights = (torch.stack(part) for part in zip(*trees, strict=True))
    return packed, weights


def _best_tree(
    anchor: int, *parts: Tensor, nodes: int, rows: int, spine: float, correction: Correction | None
) -> tuple[Tensor, Tensor]:
    ids, scores, chains, chain_scores = parts
    calibration = (correction.edges, correction.table, correction.depth_bins) if correction else None
    tree = native.best_tree(anchor, parts, calibration, nodes=nodes, rows=rows, spine=spine)
    if tree is not None:
        return tree
    corrected = correction.applied(scores) if correction else scores
    tokens, parents, weights = reference.best_first(
        anchor, ids, corrected, chains, chain_scores, nodes=nodes, spine=spine
    )
    padding = [-torch.inf] * (rows - len(tokens))
    return pack_tree(tokens, parents, rows=rows), torch.tensor(weights + padding)


def accept_path(
    tokens: Tensor,
    parents: Tensor,
    ancestors: Tensor,
    sampled: Tensor,
    *,
    first: Tensor | None = None,
    slots: Tensor,
    stops: Tensor,
    limits: Tensor,
    counts: Tensor,
) -> Acceptance:
    """Accept the path on which a tree holds what the target sampled; sampled [N], a token after each row.

    Rows first[s] to first[s + 1] are the tree of the sequence in slots [S]; without `first` all rows are one
    tree. A sampled token among its `stops` [slots, 64] ends a path, and so do limits [S] rows, at least one:
    the accepted rows are those that plain decoding would have processed. Their tokens are added to `counts`
    [slots, V].
    """
    if tokens.is_cuda:
        from bough.kernels.tree import triton_kernels

        tables = {"first": first, "slots": slots, "stops": stops, "limits": limits, "counts": counts}
        return Acceptance(triton_kernels.accept_path(tokens, parents, ancestors, sampled, **tables))
    picks, drafted = sampled.tolist(), tokens.tolist()
    bounds = [0, len(drafted)] if first is None else first.tolist()
    parts = zip(pairwise(bounds), slots.tolist(), limits.tolist(), strict=True)
    sequences = len(bounds) - 1
    flat = _nothing_accepted(sequences).copy()
    header, lists = flat[: _HEADER * sequences], flat[_HEADER * sequences :].reshape(3, sequences, MAX_ROWS)
    bits, times = ancestors.numpy(), counts.numpy()
    for item, ((begin, end), slot, limit) in enumerate(parts):
        if end > begin:
            mine, taken, path = drafted[begin:end], picks[begin:end], [0]
            if end > begin + 1:
                above, ends = parents.tolist()[begin:end], stops[slot].tolist()
                path = reference.accept_path(mine, above, taken, stops=ends, limit=limit)
            size, last = len(path), path[-1]
            for row in path:
                times[slot, mine[row]] += 1
            lists[:, item, :size] = path, [taken[row] for row in path], path
            header[item::sequences] = size, taken[last], last, bits[begin + last]
    return Acceptance(torch.from_numpy(flat))


@cache
def _nothing_accepted(sequences: int) -> np.ndarray:
    """Return what an acceptance of no rows holds."""
    flat = np.full(Acceptance.SIZE * sequences, -1)
    flat[:sequences] = 0
    flat[-MAX_ROWS * sequences :] = np.tile(np.arange(MAX_ROWS), sequences)
    return flat
