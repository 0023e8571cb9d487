"""Attention of a step's rows over the paged KV cache, and of a draft block over its KV ring."""

from torch import Tensor

from bough.kernels.attention import reference
from bough.kernels.kv_cache.format import HeadPool
from bough.kernels.runtime.backends import runs

__all__ = ["block_attention", "chunk_attention", "paged_attention"]

MIN_DIM = 16  # of a tensor-core mma


def paged_attention(
    q: Tensor,
    keys: HeadPool,
    values: HeadPool,
    page_table: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None,
    first: Tensor | None = None,
    *,
    window: int | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """See reference.paged_attention."""
    if q.is_cuda and ancestors is not None:
        from bough.kernels.attention import cuda, triton_kernels

        chosen = cuda if cuda.takes(q, keys, values) else triton_kernels
        heads = triton_kernels.takes(keys) and triton_kernels.takes(values)
        if chosen is cuda or (heads and runs("tree attention", "triton", q.device)):
            return chosen.paged_attention(
                q, keys, values, page_table, lengths, ancestors, first, window=window, gate=gate
            )
    return reference.paged_attention(
        q, keys, values, page_table, lengths, ancestors, first, window=window, gate=gate
    )


def chunk_attention(
    q: Tensor,
    keys: HeadPool,
    values: HeadPool,
    page_table: Tensor,
    lengths: Tensor,
    *,
    span: int,
    gate: Tensor | None = None,
) -> Tensor:
    """See reference.paged_attention without ancestors; span: of the longest sequence, rows included."""
    if q.is_cuda:
        from bough.kernels.attention import prefill

        if prefill.takes(keys) and runs("prompt attention", "triton", q.device):
            return prefill.chunk_attention(q, keys, values, page_table, lengths, span=span, gate=gate)
    return reference.paged_attention(q, keys, values, page_table, lengths, None, gate=gate)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    ring_keys: Tensor,
    ring_values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    starts: Tensor,
    *,
    window: int | None,
    causal: bool,
) -> Tensor:
    """See reference.block_attention."""
    if q.is_cuda and q.shape[-1] >= MIN_DIM and runs("draft attention", "triton", q.device):
        from bough.kernels.attention import triton_kernels as chosen
    else:
        chosen = reference
    return chosen.block_attention(
        q, k, v, positions, ring_keys, ring_values, slots, lengths, starts, window=window, causal=causal
    )
