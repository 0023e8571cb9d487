"""The gated delta rule: prompt chunks, and trees with the commit of the path before them."""

from torch import Tensor

from treeflash.kernels.delta_rule import reference
from treeflash.kernels.delta_rule.reference import advance, chunk_delta

__all__ = ["advance", "chunk_delta", "fold_path", "slot_delta", "tree_delta"]


def tree_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, **rows: Tensor
) -> Tensor:
    """See reference.tree_delta."""
    if q.is_cuda:
        from treeflash.kernels.delta_rule import cuda, triton_kernels

        if cuda.takes(state, q.shape[1]):
            return cuda.tree_delta(q, k, v, g, beta, state, **rows)
        if triton_kernels.takes(state):
            return triton_kernels.tree_delta(q, k, v, g, beta, state, **rows)
    return reference.tree_delta(q, k, v, g, beta, state, **rows)


def slot_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, slots: Tensor
) -> Tensor:
    """See reference.slot_delta."""
    if q.is_cuda:
        from treeflash.kernels.delta_rule import chunk

        if chunk.takes(state):
            return chunk.slot_delta(q, k, v, g, beta, state, slots=slots)
    return reference.slot_delta(q.float(), k.float(), v, g, beta, state, slots=slots)


def fold_path(state: Tensor, weight: Tensor, **rest) -> None:
    """See reference.fold_path."""
    if state.is_cuda:
        from treeflash.kernels.delta_rule import chunk

        if chunk.takes(state):
            return chunk.fold_path(state, weight, **rest)
    return reference.fold_path(state, weight, **rest)
