"""Best-first growth of a tree by a head whose scores depend on the whole path, over tensors of fixed shapes.

An expansion is a node whose children were scored. Each round expands a few nodes at once: the end of the path
of best children, and the likeliest others. So after n rounds the n likeliest nodes, at least, are expanded.
Without `GrowthLimits` no number is read back: the growth can be a part of a CUDA graph.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from bough.kernels.tree import MAX_ROWS
from bough.spec.tree import Proposal

# With the lookup's the most that a tree takes: a kernel has a bit for each in a word of 32. They are the
# leaves below the first depth, so that a tree of up to 30 nodes is never cut.
CHAINS = 29


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes [S, W] to be expanded, the next ones in the order of expansions."""

    tokens: Tensor
    depths: Tensor  # the anchor's is 0
    above: Tensor  # [S, W, K] the expansions of the nodes before each, from the anchor down; then any


class PathScorer(Protocol):
    """A head with what it computed of earlier expansions of one call."""

    def __call__(self, nodes: Nodes) -> tuple[Tensor, Tensor]:
        """Return the children of nodes, best first: ids [S, W, c], and log probabilities, -inf for none."""
        ...


@dataclass(frozen=True, slots=True)
class Growth:
    """How far a tree is grown."""

    rounds: int  # after the anchor's
    width: int  # nodes of a round
    depth: int


@dataclass(frozen=True, slots=True)
class GrowthLimits:
    """Where growth ends before that, and rounds are narrower: read on the host, so on a CPU alone."""

    least: float  # probability of the likeliest node that a round is made for,
    beside: float  # and of the others that it expands
    nodes: int  # of the tree: what cannot have a child among these is not expanded
    expansions: int  # in all, after the anchor's

    def likely(self, weights: Tensor, every: Tensor) -> Tensor:
        """Return the weights [S, n] of nodes to expand, -inf for those that are not likely enough."""
        if every.shape[1] >= self.nodes:
            weights = weights.masked_fill(weights <= every.topk(self.nodes, -1).values[:, -1:], -torch.inf)
        ends = weights.amax(1, keepdim=True) < math.log(self.least)
        return weights.masked_fill(ends | (weights < math.log(min(self.beside, self.least))), -torch.inf)


class Expander:
    """One growth: the expansions so far [S, E], and their children [S, E * c]."""

    def __init__(
        self, anchors: Tensor, scorer: PathScorer, growth: Growth, limits: GrowthLimits | None = None
    ):
        """anchors [S]: tokens of the roots."""
        self._scorer, self._growth, self._limits = scorer, growth, limits
        tokens = anchors[:, None]
        self._lineages = tokens.new_zeros(*tokens.shape, growth.depth)  # expansions down to the node itself
        self._tokens = torch.full_like(self._lineages, -1)  # of the path to the node, without the anchor
        self._gains = torch.full(
            self._lineages.shape, -torch.inf, device=anchors.device
        )  # the scores of these
        self._depths = torch.zeros_like(tokens)
        self._sources = torch.full_like(tokens, -1)  # which child each was
        self._spine = [0]  # expansions on the path of best children
        self._ids, self._scores = self._children(Nodes(tokens, self._depths, self._lineages))
        self._width = self._ids.shape[-1]  # children of an expansion
        self._weights = self._scores.flatten(1)  # log probabilities of the paths to the children
        self._taken = torch.zeros_like(self._weights, dtype=torch.bool)
        for _ in range(growth.rounds):
            children, valid = self._next()
            if not children.shape[1]:
                break
            self._expand(children, valid)

    def _children(self, nodes: Nodes) -> tuple[Tensor, Tensor]:
        ids, scores = self._scorer(nodes)
        # A head that fails scores nothing: its children are none.
        return ids, torch.where(scores.isnan(), -torch.inf, scores).clamp(max=0)

    def _next(self) -> tuple[Tensor, Tensor]:
        """Return the children to expand [S, W], and which of them there are."""
        growth, limits, count = self._growth, self._limits, self._growth.width
        deep = (self._depths + 1 >= growth.depth).repeat_interleave(self._width, 1)
        weights = self._weights.masked_fill(self._taken | deep, -torch.inf)
        order = weights.clone()
        if limits is not None:
            order = limits.likely(weights, self._weights)
            count = min(count, limits.expansions + 1 - self._depths.shape[1])
            if not bool((order > -torch.inf).any()):
                count = 0
        # First the best child of the last expansion on the path of best children, while there is one.
        tail = self._spine[-1] * self._width
        order[:, tail] = torch.where(weights[:, tail] > -torch.inf, torch.inf, -torch.inf)
        best = order.topk(count, -1)
        valid = best.values > -torch.inf
        if limits is not None:
            count = int(valid.sum(1).max()) if count else 0
        return best.indices[:, :count], valid[:, :count]

    def _expand(self, children: Tensor, valid: Tensor) -> None:
        growth, width, first = self._growth, self._width, self._depths.shape[1]
        weights = self._weights.gather(1, children)
        self._taken = self._taken.scatter(1, children, True)
        parents = children // width
        tokens = self._ids.flatten(1).gather(1, children)
        # No node of the last depth is expanded; what takes its place has to have a depth that there is.
        depths = (self._depths.gather(1, parents) + 1).clamp(max=growth.depth - 1)
        above = self._of(self._lineages, parents)
        at = torch.arange(growth.depth, device=children.device)
        here = at == depths[..., None] - 1
        gains = self._scores.flatten(1).gather(1, children)
        path = torch.where(here, tokens[..., None], self._of(self._tokens, parents))
        path_gains = torch.where(here, gains[..., None], self._of(self._gains, parents))
        numbers = first + torch.arange(children.shape[1], device=children.device)
        lineages = torch.where(at == depths[..., None], numbers[:, None], above)
        ids, scores = self._children(Nodes(tokens, depths, above))
        self._spine.append(first)
        self._lineages = torch.cat([self._lineages, lineages], 1)
        self._tokens = torch.cat([self._tokens, path], 1)
        self._gains = torch.cat([self._gains, path_gains], 1)
        self._depths = torch.cat([self._depths, depths], 1)
        self._sources = torch.cat([self._sources, torch.where(valid, children, -1)], 1)
        self._ids = torch.cat([self._ids, ids], 1)
        scores = scores.masked_fill(~valid[..., None], -torch.inf)
        self._scores = torch.cat([self._scores, scores], 1)
        self._weights = torch.cat([self._weights, (weights[..., None] + scores).flatten(1)], 1)
        self._taken = pad(self._taken, (0, children.shape[1] * width))

    @staticmethod
    def _of(rows: Tensor, index: Tensor) -> Tensor:
        """Return rows [S, E, K] of expansions [S, W]: [S, W, K]."""
        return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))

    def proposal(self) -> Proposal:
        """Return the first depth's candidates, the likeliest other nodes as chains, and what followed the
        path of best children, to learn from."""
        growth, spine = self._growth, self._spine[: self._growth.depth]
        ids, scores = (
            torch.stack([rows[:, number] for number in spine], 1) for rows in (self._ids, self._scores)
        )
        best, places = ids[..., 0], torch.arange(growth.depth, device=ids.device)
        path, more = places[: len(spine)], growth.depth - len(spine)
        given = torch.where(path[:, None] > places, pad(best, (0, more))[:, None], -1)
        ended = (scores[..., :-1, :1] == -torch.inf).cummax(1).values
        given[:, 1:] = given[:, 1:].masked_fill(ended, -2)
        chains, gains = self._chains()
        missing = (0, 0, 0, more)
        return Proposal(
            pad(ids, missing, value=-1),
            pad(scores, missing, value=-torch.inf),
            chains,
            gains,
            # No text follows a path of -2: depths that were not reached are not learnt from.
            given=pad(given, missing, value=-2),
        )

    def _chains(self) -> tuple[Tensor, Tensor]:
        """Return the leaves of the likeliest nodes below the first depth: chains [S, m, K], and their scores.

        As many of the likeliest nodes as have at most CHAINS leaves.
        """
        width, total = self._width, self._weights.shape[1]
        weights, order = torch.sort(self._weights, dim=-1, descending=True, stable=True)
        order = order[:, : MAX_ROWS - 1]
        parents = order // width
        reached = (weights[:, : MAX_ROWS - 1] > -torch.inf) & (parents > 0)
        # A first child takes the place of its parent as a leaf, if the parent is one of these.
        deeper = self._depths.gather(1, parents) >= 2
        leaves = (reached & ~(deeper & (order % width == 0))).cumsum(1)
        counted = reached & (leaves <= CHAINS)
        # Which expansion each node became; nodes without are one place behind the last.
        became = torch.zeros(len(order), total + 1, dtype=torch.int64, device=order.device)
        sources = torch.where(self._sources < 0, total, self._sources)
        became = became.scatter(
            1, sources, torch.arange(sources.shape[1], device=order.device).expand_as(sources)
        )
        became[:, total] = 0
        there = torch.zeros_like(became, dtype=torch.bool).scatter(1, order, counted)
        number = became.gather(1, order)
        goes_on = (number > 0) & there.gather(1, number * width)
        last = counted & ~goes_on
        place = torch.arange(order.shape[1], 0, -1, device=order.device)
        found = torch.where(last, place, 0).topk(min(CHAINS, order.shape[1]), -1)
        node, source = (part.gather(1, found.indices) for part in (order, parents))
        at = torch.arange(self._growth.depth, device=order.device)
        here = at == self._depths.gather(1, source)[..., None]
        chains, gains = (
            torch.where(here, own.flatten(1).gather(1, node)[..., None], self._of(path, source))
            for own, path in ((self._ids, self._tokens), (self._scores, self._gains))
        )
        absent = (found.values == 0)[..., None]
        more = (0, 0, 0, CHAINS - chains.shape[1])
        chains, gains = chains.masked_fill(absent, -1), gains.masked_fill(absent, -torch.inf)
        return pad(chains, more, value=-1), pad(gains, more, value=-torch.inf)
