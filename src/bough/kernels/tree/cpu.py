"""Trees on a CPU: built by native code where it can, else by the reference; accepted in integers."""

from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from bough.kernels.native.library import NativeProposal, find_library
from bough.kernels.tree import reference
from bough.kernels.tree.records import HEADER, MAX_ROWS, Acceptance, Candidates, TreeForm


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


def best_tree(anchors: Tensor, candidates: Candidates, form: TreeForm) -> tuple[Tensor, Tensor]:
    """Return the likeliest prefixes below each of anchors [S]: packed trees [S, 4, rows], weights [S, rows].

    A row's weight is the log probability of the path to it.
    """
    trees = []
    for anchor, *parts in zip(anchors.tolist(), *candidates, strict=True):
        tree = native_tree(anchor, Candidates(*parts), form)
        trees.append(tree or _plain_tree(anchor, Candidates(*parts), form))
    packed, weights = (
        part[0][None] if len(part) == 1 else torch.stack(part) for part in zip(*trees, strict=True)
    )
    return packed, weights


def _plain_tree(anchor: int, candidates: Candidates, form: TreeForm) -> tuple[Tensor, Tensor]:
    if form.correction is not None:
        candidates = candidates._replace(scores=form.correction.applied(candidates.scores))
    tokens, parents, weights = reference.best_first(anchor, candidates, nodes=form.nodes, spine=form.spine)
    padding = [-torch.inf] * (form.rows - len(tokens))
    return pack_tree(tokens, parents, rows=form.rows), torch.tensor(weights + padding)


def native_tree(anchor: int, candidates: Candidates, form: TreeForm) -> tuple[Tensor, Tensor] | None:
    """Return the tree of one sequence from native code; None: not of these."""
    functions, _ = find_library()
    if functions is None:
        return None
    ids, scores, chains, chain_scores = (part.contiguous() for part in candidates)
    (depths, width), correction = ids.shape, form.correction
    if scores.dtype != torch.float32 or chain_scores.dtype != torch.float32:
        return None
    if correction is not None and correction.depth_bins.shape[0] < depths:
        return None
    proposal = NativeProposal(
        anchor=anchor,
        depths=depths,
        width=width,
        lines=1 if scores.ndim == 2 else scores.shape[1],
        chain_count=chains.shape[0],
        nodes=form.nodes,
        rows=form.rows,
        spine=form.spine,
        ids=ids.data_ptr(),
        scores=scores.data_ptr(),
        chains=chains.data_ptr(),
        chain_scores=chain_scores.data_ptr(),
    )
    if correction is not None:
        edges, table, bins = correction.edges, correction.table, correction.depth_bins
        proposal.edge_count, proposal.edges = edges.shape[0], edges.data_ptr()
        proposal.table, proposal.depth_bins = table.data_ptr(), bins.data_ptr()
    packed, weights = torch.empty(4, form.rows, dtype=torch.int64), torch.empty(form.rows)
    done = functions.tf_best_tree(proposal, packed.data_ptr(), weights.data_ptr())
    return (packed, weights) if done else None


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
    picks, drafted = sampled.tolist(), tokens.tolist()
    bounds = [0, len(drafted)] if first is None else first.tolist()
    parts = zip(pairwise(bounds), slots.tolist(), limits.tolist(), strict=True)
    sequences = len(bounds) - 1
    flat = _nothing_accepted(sequences).copy()
    header, lists = flat[: HEADER * sequences], flat[HEADER * sequences :].reshape(3, sequences, MAX_ROWS)
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
