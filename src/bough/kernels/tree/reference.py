"""The best tree of some candidates, and the accepted path of a verified tree, in plain Python."""

import heapq
import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy

from bough.kernels.tree.records import Candidates


@dataclass(slots=True)
class _Node:
    token: int
    parent: int
    depth: int
    weight: float
    chains: list[int]  # that begin with the path to this node
    column: int = 0  # of its token


def best_first(
    anchor: int, candidates: Candidates, *, nodes: int, spine: float
) -> tuple[list[int], list[int], list[float]]:
    """Return tokens, parents and weights of the root and up to `nodes` likeliest prefixes, best first.

    The candidates are those of one sequence. Weights are float32 sums from the root down. Ties: the shallower
    first, then the child of the earlier row, the better score, the earlier column; a chain's token that is no
    candidate of its depth has a column after them.
    """
    ids, scores, chains, chain_scores = candidates
    depths, width = ids.shape
    columns = [ids[d].tolist() + chains[:, d].tolist() for d in range(depths)]
    lines = scores if scores.ndim == 3 else scores[:, None]
    own_scores, own_chains, last = lines.tolist(), chain_scores.tolist(), lines.shape[1] - 1

    def children(node: _Node) -> list[float]:
        """Return the score of every column below a node; -inf: no such child."""
        depth = node.depth
        gains = own_scores[depth][min(node.column, last)] + [-math.inf] * len(chains)
        for chain in node.chains:
            token = columns[depth][width + chain]
            if token >= 0:
                # One column for a token: a candidate's, or that of the first chain that has it.
                home = columns[depth].index(token)
                gains[home] = max(gains[home], own_chains[chain][depth])
        return [min(score, 0.0) for score in gains]

    rows = [_Node(anchor, -1, 0, 0.0, list(range(len(chains))))]
    queue: list[tuple[float, int, int, float, int]] = []  # -weight, depth, parent, -score, column

    def expand(row: int) -> None:
        node = rows[row]
        if node.depth < depths:
            for column, score in enumerate(children(node)):
                if score > -math.inf:
                    weight = _float32(node.weight + score)
                    heapq.heappush(queue, (-weight, node.depth, row, -score, column))

    def child(row: int, column: int, weight: float) -> _Node:
        node = rows[row]
        token = columns[node.depth][column]
        followed = [chain for chain in node.chains if columns[node.depth][width + chain] == token >= 0]
        return _Node(token, row, node.depth + 1, weight, followed, column)

    forced, tail = 0, rows[0]
    while forced < nodes and tail.depth < depths:
        gains = children(tail)
        score = max(gains)
        weight = _float32(tail.weight + score)
        if weight < spine or weight == -math.inf:
            break
        column, depth = gains.index(score), tail.depth
        token = columns[depth][column]
        followed = [chain for chain in tail.chains if chains[chain, depth] == token]
        tail = _Node(token, -1, depth + 1, weight, followed, column)
        forced += 1

    expand(0)
    end = 0  # the row in which the path of best children ends so far
    while queue and len(rows) <= nodes:
        if forced > 0 and nodes - (len(rows) - 1) == forced:
            entry = min(item for item in queue if item[2] == end)
            queue.remove(entry)
            heapq.heapify(queue)
        else:
            entry = heapq.heappop(queue)
        weight, _, row, _, column = entry
        rows.append(child(row, column, -weight))
        expand(len(rows) - 1)
        if row == end and forced > 0:
            forced, end = forced - 1, len(rows) - 1
    return [row.token for row in rows], [row.parent for row in rows], [row.weight for row in rows]


def accept_path(
    tokens: list[int],
    parents: list[int],
    sampled: list[int],
    *,
    stops: Collection[int] = (),
    limit: int | None = None,
) -> list[int]:
    """Return the rows, root first, whose tokens the target sampled; sampled[i] is its token after row i.

    The path depends on the samples alone, never on how the tree was built, so the text is that of plain
    decoding. A sampled token among `stops` ends the path, and so do `limit` rows.
    """
    children = {(parent, token): row for row, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    rows = [0]
    while limit is None or len(rows) < limit:
        token = sampled[rows[-1]]
        child = children.get((rows[-1], token))
        if child is None or token in stops:
            break
        rows.append(child)
    return rows


def _float32(number: float) -> float:
    return float(numpy.float32(number))
