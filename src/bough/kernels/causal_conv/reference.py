"""The short causal convolution before the delta rule, with the norms and gates after it, in plain torch.

weight [C, K]: tap K-1 multiplies the row itself, tap 0 the row K-1 above it. window [.., K-1, C] holds the
newest inputs before the step, oldest first. Channels: queries, keys, values, head after head.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from bough.kernels.norm_rope.reference import l2_norm

# The l2 norm of queries and keys has its own constant in the trained models, independent of the file's rms
# epsilon.
L2_EPS = 1e-6


def chunk_conv(inputs: Tensor, window: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, C] after SiLU, and the new window, of consecutive inputs [B, T, C]."""
    rows, width = inputs.shape[1], weight.shape[1]
    series = torch.cat([window, inputs], 1)
    taps = torch.stack([series[:, tap : tap + rows] for tap in range(width)], -1)
    return silu((taps * weight).sum(-1)), series[:, rows:]


def chunk_heads(
    inputs: Tensor,
    alpha: Tensor,
    beta: Tensor,
    weight: Tensor,
    decay: Tensor,
    bias: Tensor,
    *,
    window: Tensor,
    tree_inputs: Tensor,
    slots: Tensor,
    path: Tensor,
    count: Tensor,
    key_heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the delta rule's inputs for a chunk that follows the last tree's uncommitted path.

    Shapes as in `tree_conv`: q, k [B, T, Hk, D], v [B, T, Hv, D], g, beta [B, T, Hv]. Advance the windows to
    the end of the chunk.
    """
    dim = weight.shape[0] // (2 * key_heads + alpha.shape[2])
    before = window[slots]
    if path.shape[1]:
        batch = torch.arange(len(slots), device=slots.device)[:, None]
        kept = torch.arange(before.shape[1], device=slots.device) + count[:, None]
        before = torch.cat([before, tree_inputs[slots[:, None], path]], 1)[batch, kept]
    mixed, window[slots] = chunk_conv(inputs.to(window.dtype), before, weight)
    return *split_heads(mixed, key_heads, dim), *delta_gates(alpha, beta, decay, bias)


def conv_index(parents: Tensor, width: int, count: Tensor, path: int, first: Tensor | None = None) -> Tensor:
    """Return the indices in [window, path rows, tree rows] of each row's inputs: [B, path + T, width], oldest
    first.

    parents [B, T]; the tree follows the first `count` [B] of `path` consecutive rows. Ragged rows: parents
    [N], those of sequence s from first[s] to first[s + 1]; the result is [B * path + N, width].
    """
    if first is not None:
        own = (parents[begin:end][None] for begin, end in pairwise(first.tolist()))
        parts = (conv_index(p, width, n, path)[0] for p, n in zip(own, count.split(1), strict=True))
        return torch.cat([*parts, parents.new_zeros(len(parents) - int(first[-1]), width)])
    batch, rows = parents.shape
    chain = torch.arange(-1, path - 1, device=parents.device).expand(batch, -1)
    above = torch.cat([chain, torch.where(parents < 0, count[:, None] - 1, parents + path)], 1)
    at = torch.arange(path + rows, device=parents.device).expand(batch, -1)
    index = [at]
    for _ in range(width - 1):
        # Before the first row the inputs continue backwards through the window.
        at = torch.where(at >= 0, above.gather(1, at.clamp(min=0)), at - 1)
        index.append(at)
    return torch.stack(index[::-1], -1) + width - 1


def delta_gates(alpha: Tensor, beta: Tensor, decay: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return log decay (<= 0) and write strength of alpha, beta [B, T, Hv]; decay (-A), bias [Hv]."""
    x = alpha + bias
    # Not torch's softplus, sigmoid and silu: on a CPU they round the last elements of a tensor differently,
    # so that a row would depend on the number of rows.
    return decay * torch.where(x > 20, x, x.exp().log1p()), _sigmoid(beta)


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def split_heads(mixed: Tensor, key_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k [B, T, Hk, D], of unit length, q scaled, and v [B, T, Hv, D] of mixed [B, T, C]."""
    heads = mixed.unflatten(-1, (-1, dim))
    q, k = l2_norm(heads[:, :, : 2 * key_heads], L2_EPS).chunk(2, 2)
    return q * dim**-0.5, k, heads[:, :, 2 * key_heads :]


def tree_conv(
    inputs: Tensor,
    alpha: Tensor,
    beta: Tensor,
    weight: Tensor,
    decay: Tensor,
    bias: Tensor,
    *,
    window: Tensor,
    tree_inputs: Tensor,
    tree_gates: Tensor,
    slots: Tensor,
    path: Tensor,
    count: Tensor,
    index: Tensor,
    key_heads: int,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the delta rule's inputs for a tree's rows and for the last tree's uncommitted path.

    inputs [B, T, C]; alpha, beta [B, T, Hv]; of all slots: window [slots, K-1, C], tree_inputs [slots, N, C],
    tree_gates [slots, N, 2, Hv]; path [B, P], its first `count` [B] rows; index from `conv_index`.
    Returns q [B, T, Hk, D] and, path first, k [B, P+T, Hk, D], v [B, P+T, Hv, D], g and beta [B, P+T, Hv],
    which are zero after a path. Advances the windows and saves the tree's rows in tree_inputs and tree_gates;
    a tree without rows changes nothing. Ragged rows: inputs, alpha, beta [N, ...], those of sequence s from
    first[s] to first[s + 1]; q [N, ...] and k, v, g, beta [B * P + N, ...].
    """
    if first is not None:
        tensors: dict[str, Any] = {"window": window, "tree_inputs": tree_inputs, "tree_gates": tree_gates}
        found, length = [], path.shape[1]
        for item, (begin, end) in enumerate(pairwise(first.tolist())):
            rows = (x[begin:end][None] for x in (inputs, alpha, beta))
            own = {"slots": slots[item, None], "path": path[item, None], "count": count[item, None]}
            places = index[item * length + begin : (item + 1) * length + end][None]
            rest: dict[str, Any] = {**tensors, **own, "index": places, "key_heads": key_heads}
            found.append(tree_conv(*rows, weight, decay, bias, **rest))
        spare = [part.new_zeros(1, len(inputs) - int(first[-1]), *part.shape[2:]) for part in found[0]]
        q, k, v, g, beta = (torch.cat(parts, 1)[0] for parts in zip(*found, spare, strict=True))
        return q, k, v, g, beta
    rows, length, dim = inputs.shape[1], path.shape[1], weight.shape[0] // (2 * key_heads + alpha.shape[2])
    # Rows are computed from the saved precision, so that a commit reads the same numbers.
    inputs = inputs.to(tree_inputs.dtype)
    g, beta = delta_gates(alpha, beta, decay, bias)
    batch = torch.arange(len(slots), device=slots.device)[:, None]
    series = torch.cat([window[slots], tree_inputs[slots[:, None], path], inputs], 1)
    mixed = (series[batch[..., None], index].float() * weight.T).sum(2)
    mixed = mixed * _sigmoid(mixed)
    q, k, v = split_heads(mixed, key_heads, dim)
    if length:
        gates = tree_gates[slots[:, None], path]
        if int(count.min()) < length:
            beyond = torch.arange(length, device=slots.device) >= count[:, None]
            gates = gates.masked_fill(beyond[..., None, None], 0)
    if length and rows:
        window[slots] = series[batch, torch.arange(window.shape[1], device=slots.device) + count[:, None]]
    tree_inputs[slots, :rows] = inputs
    tree_gates[slots, :rows, 0], tree_gates[slots, :rows, 1] = g, beta
    if length:
        g, beta = torch.cat([gates[:, :, 0], g], 1), torch.cat([gates[:, :, 1], beta], 1)
    return q[:, length:], k, v, g, beta
