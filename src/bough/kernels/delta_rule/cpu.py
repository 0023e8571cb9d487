"""The gated delta rule on a CPU, over a chunk (WY form) and over a tree (depth first), in torch, float32.

A tree is evaluated row by row, by the operations that advance a committed state. So a row's output has the
bits of a root-only step after its path was committed, whatever the tree around it.
"""

from itertools import pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor

from bough.kernels.causal_conv.records import DeltaHeads
from bough.kernels.delta_rule.records import DeltaRows
from bough.kernels.tree import MAX_ROWS

CHUNK = 64


def chunk_delta(heads: DeltaHeads, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, T, Hv, D] of a run of tokens and the state [B, Hv, D, D] after it."""
    tokens = heads.q.shape[1]
    size = min(CHUNK, tokens)
    chunks, pad = -(-tokens // size), -tokens % size
    # Zero rows do not change the state: beta = 0 writes nothing, g = 0 does not decay.
    q, k, v, g, beta = (
        torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, pad)).unflatten(1, (chunks, size))
        for x in heads
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


def slot_delta(heads: DeltaHeads, state: Tensor, slots: Tensor) -> Tensor:
    """Return the outputs [B, T, Hv, D] of a run of tokens; advance the slots' states [slots, Hv, D, D]."""
    exact = heads._replace(q=heads.q.to(state.dtype), k=heads.k.to(state.dtype))
    out, state[slots] = chunk_delta(exact, state[slots])
    return out


class Visit(NamedTuple):
    """One row in the order in which a tree is evaluated, depth first.

    A row reads the current state, its parent's, and advances it if it has children. A level is the place of a
    saved state.
    """

    row: int
    has_children: bool
    save: int | None = None  # level in which the parent's state is saved before this row advances it
    restore: int | None = None  # level from which the parent's state is restored for this row

    def packed(self) -> int:
        """Return the visit as an integer; levels count from 1 there, 0: none."""
        save, restore = (0 if level is None else level + 1 for level in (self.save, self.restore))
        return self.row | save << 8 | restore << 12 | self.has_children << 16

    @classmethod
    def unpack(cls, number: int) -> Self:
        save, restore = (number >> 8 & 15) - 1, (number >> 12 & 15) - 1
        levels = (None if level < 0 else level for level in (save, restore))
        return cls(number & 255, bool(number >> 16), *levels)


def saved_states(rows: int) -> int:
    """Return how many states the order of `rows` rows saves at most.

    The n-th level needs two branches with 2^n - 1 inner rows each, or n levels would not be in use at a time.
    """
    levels = 0
    while (4 << levels) + levels <= rows:
        levels += 1
    return levels


def tree_order(ancestors: Tensor, first: Tensor | None = None, most: int = MAX_ROWS) -> Tensor:
    """Return the packed visits [B, T] int32 of trees of at most `most` rows, in order; see Visit.

    ancestors [B, T]: bit j of row i is set if row j is i or an ancestor of it. Ragged rows: ancestors [N],
    those of sequence s from first[s] to first[s + 1]; rows after the last are padding and have no visit.
    """
    flat, bounds = ancestors.flatten().tolist(), row_bounds(ancestors, first)
    orders = [tree_visits(flat[begin:end]) for begin, end in pairwise(bounds)]
    packed = [visit.packed() for order in orders for visit in order]
    packed += [0] * (len(flat) - len(packed))
    return torch.tensor(packed, dtype=torch.int32, device=ancestors.device).view(ancestors.shape)


def row_bounds(rows: Tensor, first: Tensor | None) -> list[int]:
    """Return where each sequence's rows begin, and the end, of [B, T, ...] or, with `first`, of [N, ...]."""
    return first.tolist() if first is not None else [rows.shape[1] * n for n in range(len(rows) + 1)]


def tree_visits(ancestors: list[int]) -> list[Visit]:
    """Return the visits of a tree whose rows have these ancestor bits.

    Of a row's children those without children come first, then the others, the one with the most inner rows
    (rows with children) below it last: only a state from which several of these start is saved.
    """
    rows = len(ancestors)
    children: list[list[int]] = [[] for _ in range(rows + 1)]  # the last: of the committed text
    for row, bits in enumerate(ancestors):
        children[(bits & ((1 << row) - 1)).bit_length() - 1].append(row)
    inner = [0] * rows
    for row in reversed(range(rows)):
        inner[row] = sum(inner[child] for child in children[row]) + bool(children[row])
    order: list[Visit] = []

    def visit_below(parent: int, level: int) -> None:
        order.extend(Visit(row, False) for row in children[parent] if not inner[row])
        branches = sorted((row for row in children[parent] if inner[row]), key=lambda row: inner[row])
        for row in branches:
            is_first, is_last = row == branches[0], row == branches[-1]
            save = level if is_first and not is_last else None
            order.append(Visit(row, True, save, restore=None if is_first else level))
            visit_below(row, level if is_last else level + 1)

    visit_below(-1, 0)
    return order


def tree_delta(heads: DeltaHeads, state: Tensor, rows: DeltaRows) -> Tensor:
    """Advance the slots' states over their paths, and return the outputs [B, T, Hv, D] of the trees.

    Path rows from `count` on are ignored. state [slots, Hv, D, D]. Ragged rows: q [N, Hk, D], those of
    sequence s from first[s] to first[s + 1]; k, v, g, beta [B * P + N, ...], a sequence's path rows before
    its tree's.
    """
    bounds, batch = row_bounds(heads.q, rows.first), len(rows.slots)
    q, k, v, g, beta = (x.flatten(0, 1) for x in heads) if rows.first is None else heads
    visits = [Visit.unpack(number) for number in rows.order.flatten().tolist()]
    room = (len(k) - len(q)) // batch
    out = torch.zeros(len(q), *v.shape[1:], dtype=v.dtype, device=v.device)
    tables = zip(pairwise(bounds), rows.slots.tolist(), rows.count.tolist(), strict=True)
    for item, ((begin, end), slot, taken) in enumerate(tables):
        part = slice(item * room + begin, (item + 1) * room + end)
        decays, strengths = (x[..., None, None] for x in (g[part].exp(), beta[part]))
        tokens = (_by_value_head(k[part], v), v[part, :, None], decays, strengths)
        for key, value, decay, strength in zip(*(x[:taken].unbind() for x in tokens), strict=True):
            write = strength * (value - decay * torch.bmm(key, state[slot]))
            state[slot].mul_(decay).addcmul_(key.mT, write)
        if end > begin:
            tree = tuple(x[room:] for x in tokens)
            out[begin:end] = _tree(q[begin:end], k[part][room:], tree, state[slot], visits[begin:end])
    return out if rows.first is not None else out.unflatten(0, rows.order.shape)


def _tree(q: Tensor, k: Tensor, tokens: tuple[Tensor, ...], state: Tensor, visits: list[Visit]) -> Tensor:
    """Return the outputs [T, Hv, D] of one tree below the committed state [Hv, D, D].

    tokens: keys and values [T, Hv, 1, D], decays and strengths [T, Hv, 1, 1].
    """
    _, values, decays, strengths = tokens
    stored, read = torch.empty_like(values), torch.empty_like(values)
    rows = (*tokens, _by_value_head(q, values), stored, read)
    by_row = list(zip(*(x.unbind() for x in rows), strict=True))
    saved: dict[int, Tensor] = {}
    shared = True  # the state is committed or saved
    for row, has_children, save, restore in visits:
        key, value, decay, strength, query, row_stored, row_read = by_row[row]
        if restore is not None:
            state, shared = saved[restore], True
        torch.bmm(key, state, out=row_stored)
        torch.bmm(query, state, out=row_read)
        if save is not None:
            saved[save], shared = state, True
        if has_children:
            write = strength * (value - decay * row_stored)
            decayed = state * decay if shared else state.mul_(decay)
            state, shared = decayed.addcmul_(key.mT, write), False
    writes = strengths * (values - decays * stored)
    # q S of a row's own state, from its parent's.
    seen = _by_value_head((q * k).sum(-1, keepdim=True), values)
    return (decays * read + seen * writes)[:, :, 0]


def _by_value_head(x: Tensor, v: Tensor) -> Tensor:
    """Return [T, Hv, 1, N] of x [T, Hk, N]."""
    return x.repeat(1, v.shape[1] // x.shape[1], 1)[:, :, None]
