"""Routed experts in plain torch: the specification of the kernels."""

import torch
from torch import Tensor


def route(logits: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """Return the weights and the experts of each row, [M, used], best first, from logits [M, E].

    Of equal logits the lower number is first. The weights are the softmax over the chosen logits, which is
    that over all of them, renormalised.
    """
    best, order = logits.sort(dim=-1, descending=True, stable=True)
    weights = (best[:, :used] - best[:, :1]).exp()
    return weights / weights.sum(-1, keepdim=True), order[:, :used]


def grouped(expert_ids: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the pairs (row, rank) of chosen [M, k] in order of their experts, and the chunks of them.

    A pair's number is row * k + rank. A chunk [4] is at most `tokens` pairs of one expert: the expert, the
    first place in the order, the number of pairs, 0.
    """
    order, chunks = expert_ids.flatten().sort(stable=True).indices, []
    for expert, count in zip(*(part.tolist() for part in expert_ids.unique(return_counts=True)), strict=True):
        first = int((expert_ids < expert).sum())
        for done in range(0, count, tokens):
            chunks.append((expert, first + done, min(tokens, count - done), 0))
    return order, torch.tensor(chunks)


def expert_matmul(x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """Return [M * k, N]: row p * R // (M * k) of x [R, K] times weights [E, N, K] of pair p's expert."""
    flat = expert_ids.flatten()
    out = x.new_empty(len(flat), weights.shape[1])
    rows = torch.arange(len(flat), device=x.device) * len(x) // len(flat)
    for expert in flat.unique().tolist():
        pairs = (flat == expert).nonzero()[:, 0]
        out[pairs] = x[rows[pairs]] @ weights[expert].T
    return out


def combine(shared: Tensor, gate: Tensor, outputs: Tensor, weights: Tensor) -> Tensor:
    """Return the gated shared output [M, width] plus the experts' [M, k, width], in order of their ranks.

    gate [M]: its logits; weights [M, k].
    """
    total = shared * gate.sigmoid()[:, None]
    for output, weight in zip(outputs.unbind(1), weights.unbind(1), strict=True):
        total = total + output * weight[:, None]
    return total
