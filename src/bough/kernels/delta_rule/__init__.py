"""The gated delta rule: prompt chunks, and trees with the commit of the path before them."""

from typing import Any

import torch
from torch import Tensor

from bough.kernels.causal_conv import path_heads
from bough.kernels.delta_rule import reference
from bough.kernels.delta_rule.reference import chunk_delta
from bough.kernels.runtime.backends import runs
from bough.kernels.tree import MAX_ROWS

__all__ = ["chunk_delta", "fold_path", "slot_delta", "tree_delta", "tree_order"]


def tree_order(ancestors: Tensor, first: Tensor | None = None, most: int = MAX_ROWS) -> Tensor:
    """See reference.tree_order; once for all layers of a step. A sequence has `most` rows at most."""
    if not runs("tree delta rule", "triton", ancestors.device):
        return reference.tree_order(ancestors, first)
    from bough.kernels.delta_rule import triton_kernels

    return triton_kernels.tree_order(ancestors, first, most)


def tree_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, **rows: Any
) -> Tensor:
    """See reference.tree_delta; `most`: rows of a sequence, at most.

    Card and head size decide on the backend, never the number of rows.
    """
    if q.is_cuda:
        from bough.kernels.delta_rule import cuda, triton_kernels

        if cuda.takes(state):
            return cuda.tree_delta(q, k, v, g, beta, state, **rows)
        if triton_kernels.takes(state) and runs("tree delta rule", "triton", q.device):
            return triton_kernels.tree_delta(q, k, v, g, beta, state, **rows)
    rows.pop("most", None)
    return reference.tree_delta(q, k, v, g, beta, state, **rows)


def slot_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, slots: Tensor
) -> Tensor:
    """See reference.slot_delta."""
    if q.is_cuda:
        from bough.kernels.delta_rule import chunk

        if chunk.takes(state) and runs("prompt delta rule", "triton", q.device):
            return chunk.slot_delta(q, k, v, g, beta, state, slots=slots)
    return reference.slot_delta(q.float(), k.float(), v, g, beta, state, slots=slots)


def fold_path(state: Tensor, weight: Tensor, *, slots: Tensor, count: Tensor, **saved) -> None:
    """Advance the slots' states over the uncommitted paths of their last trees, as the next tree step would.

    For the arguments see `path_heads`.
    """
    if saved["path"].shape[1]:
        k, v, g, beta = path_heads(weight, slots=slots, count=count, **saved)
        no_rows = torch.empty(len(slots), 0, dtype=torch.int32, device=state.device)
        tree_delta(k[:, :0], k, v, g, beta, state, slots=slots, count=count, order=no_rows)
