"""The gated delta rule over a chunk (WY form) and over a tree (TreeWY), in plain torch, float32.

Shapes: q, k [B, T, Hk, D], normalised, q scaled; v [B, T, Hv, D]; g (log decay, <= 0) and beta [B, T, Hv];
state [B, Hv, D, D], row = key index. Value head h uses q and k of head h % Hk. One token does:
    S <- exp(g) S;   u = beta (v - k S);   S <- S + k^T u;   o = q S
"""

import torch
from torch import Tensor

CHUNK = 64


def chunk_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, Hv, D] of a run of tokens and the state behind it."""
    tokens = q.shape[1]
    size = min(CHUNK, tokens)
    chunks, pad = -(-tokens // size), -tokens % size
    # Zero rows leave the state as it is: beta = 0 writes nothing, g = 0 does not decay.
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


def tree_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [B, T, Hv, D], writes u [B, T, Hv, D] and log decay [B, T, Hv] of a tree's rows; state is only
    read.

    visible [B, T, T]: row i itself and its ancestors.
    """
    rows, repeats = q.shape[1], v.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    beta = beta.transpose(1, 2)
    total = (visible.to(g.dtype) @ g).transpose(1, 2) if rows > 1 else g.transpose(1, 2)
    grown = total.exp()[..., None]
    both = torch.cat([k, q], 2).repeat(1, repeats, 1, 1) @ state
    stored, read = both[:, :, :rows], both[:, :, rows:]
    writes = beta[..., None] * (v - grown * stored)
    if rows == 1:
        seen = (q * k).sum(-1, keepdim=True).repeat(1, repeats, 1, 1)
        out = grown * read + seen * writes
    else:
        visible = visible[:, None]
        decay = torch.where(visible, total[..., :, None] - total[..., None, :], -torch.inf).exp()
        overlap = (k @ k.mT).repeat(1, repeats, 1, 1)
        solve = (beta[..., None] * overlap * decay).tril(-1)
        writes = torch.linalg.solve_triangular(solve, writes, upper=False, unitriangular=True)
        out = grown * read + ((q @ k.mT).repeat(1, repeats, 1, 1) * decay) @ writes
    return out.transpose(1, 2), writes.transpose(1, 2), total.transpose(1, 2)


def fold(state: Tensor, keys: Tensor, writes: Tensor, decay: Tensor, row: Tensor, accepted: Tensor) -> None:
    """Carries the accepted rows of a tree into `state` [B, Hv, D, D], in place.

    keys [B, N, Hk, D], writes [B, N, Hv, D], decay [B, N, Hv]; row [B] the last accepted row, -1 = none;
    accepted [B, N] bool: that row and its ancestors.
    """
    repeats = writes.shape[2] // keys.shape[2]
    total = decay.gather(1, row.clamp(min=0)[:, None, None].expand(-1, 1, decay.shape[2]))  # [B, 1, Hv]
    weight = torch.where(accepted[..., None], total - decay, -torch.inf).exp()
    # No row at all: the state keeps its weight of one and nothing is added.
    total = torch.where((row >= 0)[:, None, None], total, 0.0)
    left = keys.repeat(1, 1, repeats, 1).permute(0, 2, 3, 1)
    right = (writes * weight[..., None]).transpose(1, 2)
    state.mul_(total[:, 0, :, None, None].exp()).add_(left @ right)
