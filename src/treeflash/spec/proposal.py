"""What proposers say might follow, and the best tree that it makes. Plain tensors of fixed shapes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

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

    The likeliest of each depth is in as long as its weight is at least `spine`, whatever else there is.

    A child is never worth more than its parent, so the best prefixes form a tree. Depth by depth
    the best `nodes` of (frontier x candidates) are kept, which loses none of them; a sort picks among all.
    Shapes depend on `nodes` and the proposal's shape alone.
    """
    device = anchor.device
    weight, token = torch.zeros(1, device=device), anchor
    place = torch.full((1,), -1, device=device)  # of the frontier among all nodes; -1 is the root
    on_chain = torch.ones(len(proposal.chains), 1, dtype=torch.bool, device=device)
    on_spine = torch.ones(1, dtype=torch.bool, device=device)
    found: list[tuple[Tensor, ...]] = []
    count = 0
    for depth in range(proposal.depth):
        own, tokens = _candidates(proposal, depth, token, on_chain)
        kept = (weight[:, None] + own).flatten().topk(min(nodes, own.numel()))
        parent = kept.indices // own.shape[1]
        weight, token = kept.values, tokens.expand_as(own).reshape(-1)[kept.indices]
        on_chain = on_chain[:, parent] & (proposal.chains[:, depth, None] == token)
        numbers = torch.arange(len(weight), device=device)
        on_spine = on_spine[parent] & (numbers == 0)
        found.append((weight, token, place[parent], on_spine & (weight >= spine)))
        place = numbers + count
        count += len(weight)
    weight, token, parent, forced = (torch.cat(parts) for parts in zip(*found, strict=True))
    # Stable sorts over nodes in order of depth: of equal weights the shallower comes first.
    order = torch.where(forced, 1.0, weight).argsort(descending=True, stable=True)[:nodes]
    order = order[weight[order].argsort(descending=True, stable=True)]
    weight, token, parent = weight[order], token[order], parent[order]
    row = torch.zeros(count + 1, dtype=torch.int64, device=device)  # the last entry is place -1, the root
    row[order] = torch.arange(1, len(order) + 1, device=device)
    alive = weight > -torch.inf
    return ScoredTree(
        tokens=torch.cat([anchor, torch.where(alive, token, anchor)]),
        parents=torch.cat([torch.full_like(anchor, -1), torch.where(alive, row[parent], -1)]),
        weights=torch.cat([weight.new_zeros(1), weight]),
    )


def _candidates(proposal: Proposal, depth: int, parents: Tensor, on_chain: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [W, k + m] of the candidates and chain tokens below every frontier node; tokens [1, k + m]."""
    ids, scores = proposal.ids[depth], proposal.scores[depth].expand(len(parents), -1)
    if proposal.edge is not None:
        scores = scores + proposal.edge(depth, parents)
    chain = proposal.chains[:, depth]
    if not len(chain):
        return scores.clamp(max=0), ids[None]
    follows = on_chain & (chain >= 0)[:, None]  # [m, W]
    chained = torch.where(follows, proposal.chain_scores[:, depth, None], -torch.inf)
    # A chain's token that is a candidate anyway, or another chain's, counts once, with the better score.
    same = chain[:, None] == ids  # [m, k]
    best = torch.where(same[:, None], chained[..., None], -torch.inf).amax(0)  # [W, k]
    scores = torch.maximum(scores, best)
    twin = chain[:, None] == chain  # [m, m]
    chained = torch.where(twin[..., None], chained[None], -torch.inf).amax(1)
    repeated = same.any(1) | twin.tril(-1).any(1)
    chained = chained.masked_fill(repeated[:, None], -torch.inf)
    return torch.cat([scores, chained.T], 1).clamp(max=0), torch.cat([ids, chain])[None]
