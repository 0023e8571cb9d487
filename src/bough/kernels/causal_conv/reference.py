"""The short causal convolution before the delta rule, with the norms and gates after it, in plain torch.

weight [C, K]: tap K-1 multiplies the row itself, tap 0 the row K-1 above it. window [.., K-1, C] holds the
newest inputs before the step, oldest first. Channels: queries, keys, values, head after head.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu

from bough.kernels.causal_conv.records import ConvRows, ConvWeights, DeltaBuffers, DeltaHeads
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
    inputs: Tensor, alpha: Tensor, beta: Tensor, weights: ConvWeights, buffers: DeltaBuffers, rows: ConvRows
) -> DeltaHeads:
    """Return the delta rule's inputs for a chunk that follows the last tree's uncommitted path.

    inputs [B, T, C]; alpha, beta [B, T, Hv]. Advance the windows to the end of the chunk.
    """
    dim, slots, window = weights.head_dim, rows.slots, buffers.window
    before = window[slots]
    if rows.path.shape[1]:
        batch = torch.arange(len(slots), device=slots.device)[:, None]
        newest = torch.arange(before.shape[1], device=slots.device) + rows.count[:, None]
        before = torch.cat([before, buffers.tree_inputs[slots[:, None], rows.path]], 1)[batch, newest]
    mixed, window[slots] = chunk_conv(inputs.to(window.dtype), before, weights.taps)
    gates = delta_gates(alpha, beta, weights.decay, weights.bias)
    return DeltaHeads(*split_heads(mixed, weights.key_heads, dim), *gates)


def conv_index(parents: Tensor, width: int, count: Tensor, path: int, first: Tensor | None = None) -> Tensor:
    """Return the indices in [window, path rows, tree rows] of each row's inputs: [B, path + T, width], oldest
    first.

    parents [B, T]; the tree follows the first `count` [B] of `path` consecutive rows. Ragged rows: parents
    [N], those of sequence s from first[s] to first[s + 1]; the result is [B * path + N, width].
    """
    if first is not None:
        trees = (parents[begin:end][None] for begin, end in pairwise(first.tolist()))
        parts = (conv_index(p, width, n, path)[0] for p, n in zip(trees, count.split(1), strict=True))
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
    inputs: Tensor, alpha: Tensor, beta: Tensor, weights: ConvWeights, buffers: DeltaBuffers, rows: ConvRows
) -> DeltaHeads:
    """Return the delta rule's inputs for a tree's rows and for the last tree's uncommitted path.

    inputs [B, T, C]; alpha, beta [B, T, Hv]. g and beta are zero after a path. Advances the windows and saves
    the tree's rows in tree_inputs and tree_gates; a tree without rows changes nothing. Ragged rows: inputs,
    alpha, beta [N, ...], those of sequence s from first[s] to first[s + 1]; q [N, ...] and k, v, g, beta
    [B * P + N, ...].
    """
    window, tree_inputs, tree_gates = buffers.window, buffers.tree_inputs, buffers.tree_gates
    slots, path, count, first = rows.slots, rows.path, rows.count, rows.first
    length = path.shape[1]
    if first is not None:
        parts = []
        for item, (begin, end) in enumerate(pairwise(first.tolist())):
            index = rows.index[item * length + begin : (item + 1) * length + end][None]
            alone = ConvRows(slots[item, None], path[item, None], count[item, None], index)
            tree = (x[begin:end][None] for x in (inputs, alpha, beta))
            parts.append(tree_conv(*tree, weights, buffers, alone))
        spare = [part.new_zeros(1, len(inputs) - int(first[-1]), *part.shape[2:]) for part in parts[0]]
        return DeltaHeads(*(torch.cat(part, 1)[0] for part in zip(*parts, spare, strict=True)))
    tree_rows = inputs.shape[1]
    # Rows are computed from the saved precision, so that a commit reads the same numbers.
    inputs = inputs.to(tree_inputs.dtype)
    g, beta = delta_gates(alpha, beta, weights.decay, weights.bias)
    batch = torch.arange(len(slots), device=slots.device)[:, None]
    series = torch.cat([window[slots], tree_inputs[slots[:, None], path], inputs], 1)
    mixed = (series[batch[..., None], rows.index].float() * weights.taps.T).sum(2)
    mixed = mixed * _sigmoid(mixed)
    q, k, v = split_heads(mixed, weights.key_heads, weights.head_dim)
    if length:
        gates = tree_gates[slots[:, None], path]
        if int(count.min()) < length:
            beyond = torch.arange(length, device=slots.device) >= count[:, None]
            gates = gates.masked_fill(beyond[..., None, None], 0)
    if length and tree_rows:
        window[slots] = series[batch, torch.arange(window.shape[1], device=slots.device) + count[:, None]]
    tree_inputs[slots, :tree_rows] = inputs
    tree_gates[slots, :tree_rows, 0], tree_gates[slots, :tree_rows, 1] = g, beta
    if length:
        g, beta = torch.cat([gates[:, :, 0], g], 1), torch.cat([gates[:, :, 1], beta], 1)
    return DeltaHeads(q[:, length:], k, v, g, beta)
