"""The gated delta rule over a chunk (WY form) and over a tree (TreeWY), in plain torch, float32.

Shapes: q, k [B, T, Hk, D], normalised, q scaled; v [B, T, Hv, D]; g (log decay, <= 0) and beta [B, T, Hv];
state [B, Hv, D, D], row = key index. Value head h uses q and k of head h % Hk. One token does:
    S <- exp(g) S;   u = beta (v - k S);   S <- S + k^T u;   o = q S
"""

import torch
from torch import Tensor

from treeflash.kernels.causal_conv.reference import chunk_conv, split_heads

CHUNK = 64


def chunk_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, T, Hv, D] of a run of tokens and the state after it."""
    tokens = q.shape[1]
    size = min(CHUNK, tokens)
    chunks, pad = -(-tokens // size), -tokens % size
    # Zero rows do not change the state: beta = 0 writes nothing, g = 0 does not decay.
    q, k, v, g, beta = (
        torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, pad)).unflatten(1, (chunks, size))
        for x in (q, k, v, g, beta)
    )
    repeats = v.shape[3] // k.shape[3]
    q, k, v = (x.transpose(2, 3) for x in (q, k, v))  # [B, chunks, H, size, D]
    beta, total = beta.transpose(2, 3), g.transpose(2, 3).cumsum(-1)
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    decay = torch.where(lower, total[..., :, None] - total[..., None, :], -torch.inf).exp()
    overlap = (k @ k.mT).repeat(1, 1, repeats, 1, 1)
    attention = (q @ k.mT).repeat(1, 1, repeats, 1, 1) * decay
    q, k = (x.repeat(1, 1, repeats, 1, 1) for x in (q, k))
    solve = (beta[..., None] * overlap * decay).tril(-1)
    grown = total.exp()
    sides = torch.cat([beta[..., None] * v, (beta * grown)[..., None] * k], -1)
    sides = torch.linalg.solve_triangular(solve, sides, upper=False, unitriangular=True)
    fresh, erase = sides[..., : v.shape[-1]], sides[..., v.shape[-1] :]
    tail = (total[..., -1:] - total).exp()
    outputs = []
    for c in range(chunks):
        writes = fresh[:, c] - erase[:, c] @ state
        outputs.append((q[:, c] * grown[:, c, ..., None]) @ state + attention[:, c] @ writes)
        carried = (k[:, c] * tail[:, c, ..., None]).mT @ writes
        state = state * grown[:, c, :, -1, None, None] + carried
    return torch.cat(outputs, 2).transpose(1, 2)[:, :tokens], state


def slot_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, slots: Tensor
) -> Tensor:
    """Return the outputs [B, T, Hv, D] of a run of tokens; advance the slots' states [slots, Hv, D, D]."""
    out, state[slots] = chunk_delta(q, k, v, g, beta, state[slots])
    return out


def fold_path(
    state: Tensor,
    weight: Tensor,
    *,
    window: Tensor,
    tree_inputs: Tensor,
    tree_gates: Tensor,
    slots: Tensor,
    path: Tensor,
    count: Tensor,
    key_heads: int,
) -> None:
    """Advance the slots' states over the uncommitted paths of their last trees, see tree_conv."""
    if not path.shape[1]:
        return
    inputs, gates = tree_inputs[slots[:, None], path], tree_gates[slots[:, None], path]
    beyond = (torch.arange(path.shape[1], device=slots.device) >= count[:, None])[..., None]
    mixed, _ = chunk_conv(inputs.masked_fill(beyond, 0), window[slots], weight)
    _, k, v = split_heads(mixed, key_heads, state.shape[-1])
    # Beyond a shorter path: no decay, no writes.
    committed = state[slots]
    advance(committed, k, v, *gates.masked_fill(beyond[..., None], 0).unbind(2))
    state[slots] = committed


def advance(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Advance `state` over a run of tokens, in place; a row with g = beta = 0 changes nothing."""
    if k.shape[1] > 1:
        state.copy_(chunk_delta(k, k, v, g, beta, state)[1])
        return
    k = k.transpose(1, 2).repeat(1, v.shape[2] // k.shape[2], 1, 1)  # [B, Hv, 1, D]
    v, beta, decay = v.transpose(1, 2), beta.transpose(1, 2)[..., None], g.transpose(1, 2)[..., None].exp()
    state.mul_(decay)
    writes = beta * (v - k @ state)
    state.flatten(0, 1).baddbmm_(k.flatten(0, 1).mT, writes.flatten(0, 1))


def tree_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    slots: Tensor,
    count: Tensor,
    ancestors: Tensor,
) -> Tensor:
    """Advance the slots' states over their paths, and return the outputs [B, T, Hv, D] of the trees.

    q [B, T, Hk, D]; k, v, g, beta hold P path rows before the T tree rows; path rows from `count` [B] on are
    ignored. state [slots, Hv, D, D]; ancestors [B, T]: bit j of row i is set if row j is i or an ancestor.
    """
    path = k.shape[1] - q.shape[1]
    lone = len(slots) == 1
    first = int(slots[0]) if lone else 0
    # A view of a single sequence's state, which is large.
    committed = state[first : first + 1] if lone else state[slots]
    if path:
        if bool((count < path).any()):
            beyond = torch.arange(k.shape[1], device=k.device) - count[:, None]
            beyond = ((beyond >= 0) & (beyond < path - count[:, None]))[..., None]
            g, beta = g.masked_fill(beyond, 0), beta.masked_fill(beyond, 0)
            k, v = k.masked_fill(beyond[..., None], 0), v.masked_fill(beyond[..., None], 0)
        advance(committed, *(x[:, :path] for x in (k, v, g, beta)))
        if not lone:
            state[slots] = committed
    return _tree(q, *(x[:, path:] for x in (k, v, g, beta)), committed, ancestors)


def _tree(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ancestors: Tensor
) -> Tensor:
    rows, repeats = q.shape[1], v.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    beta = beta.transpose(1, 2)
    visible = ((ancestors[..., None] >> torch.arange(rows, device=q.device)) & 1).bool() if rows > 1 else None
    total = g.transpose(1, 2) if visible is None else (visible.to(g.dtype) @ g).transpose(1, 2)
    grown = total.exp()[..., None]
    both = torch.cat([k, q], 2).repeat(1, repeats, 1, 1) @ state
    stored, read = both[:, :, :rows], both[:, :, rows:]
    writes = beta[..., None] * (v - grown * stored)
    if visible is None:
        seen = (q * k).sum(-1, keepdim=True).repeat(1, repeats, 1, 1)
        out = grown * read + seen * writes
    else:
        ratio = total[..., :, None] - total[..., None, :]
        decay = torch.where(visible[:, None], ratio, -torch.inf).exp()
        overlap = (k @ k.mT).repeat(1, repeats, 1, 1)
        solve = (beta[..., None] * overlap * decay).tril(-1)
        writes = torch.linalg.solve_triangular(solve, writes, upper=False, unitriangular=True)
        out = grown * read + ((q @ k.mT).repeat(1, repeats, 1, 1) * decay) @ writes
    return out.transpose(1, 2)
