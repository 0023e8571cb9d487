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
    first place in the order, the number of pairs, and the place of its weights: its number.
    """
    order, chunks = expert_ids.flatten().sort(stable=True).indices, []
    for expert, count in zip(*(part.tolist() for part in expert_ids.unique(return_counts=True)), strict=True):
        first = int((expert_ids < expert).sum())
        for done in range(0, count, tokens):
            chunks.append((expert, first + done, min(tokens, count - done), expert))
    return order, torch.tensor(chunks)


def resolve(used: list[int], places: list[int], owners: list[int], stamps: list[int], now: int) -> list:
    """Give the used experts [ascending] places as far as those of others go; return (expert, place) to copy.

    The places of experts that were used least recently are given up first, of those used at once the first
    place. All lists are updated. An expert without a place is read where it is.
    """
    for expert in used:
        if places[expert] >= 0:
            stamps[places[expert]] = now
    free = sorted((stamp, slot) for slot, stamp in enumerate(stamps) if stamp < now)
    missing = [expert for expert in used if places[expert] < 0]
    copies = [(expert, slot) for expert, (_, slot) in zip(missing, free, strict=False)]
    for expert, slot in copies:
        if owners[slot] >= 0:
            places[owners[slot]] = -1
        places[expert], owners[slot], stamps[slot] = slot, expert, now
    return copies


def rounds(chunks: list, places: list[int], at_once: int) -> list[tuple[list, list]]:
    """Return the chunks of each round with the places of their weights, and (expert, place) to copy before.

    Chunks of experts that have a place are in the first round. The others have ~p for place p of the copies.
    """
    missing = [expert for expert in dict.fromkeys(chunk[0] for chunk in chunks) if places[expert] < 0]
    parts = [missing[first : first + at_once] for first in range(0, len(missing), at_once)] or [[]]
    found = []
    for number, part in enumerate(parts):
        mine = [
            (*chunk[:3], ~part.index(chunk[0]) if chunk[0] in part else places[chunk[0]])
            for chunk in chunks
            if chunk[0] in part or (number == 0 and places[chunk[0]] >= 0)
        ]
        found.append((mine, [(expert, place) for place, expert in enumerate(part)]))
    return found


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
