"""Routed experts: which experts each row takes, their matmuls, and the sum of their outputs.

On a GPU nothing is read back, so that a step can be captured as a CUDA graph, and a row's results have the
same bits alone and among other rows. On a CPU the reference runs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bough.kernels.experts.cache import ExpertCache
from bough.kernels.experts.stack import ExpertStack, Routing, padded, stack_shape
from bough.kernels.quant_matmul.layout import Layout
from bough.kernels.quant_matmul.rows import BUCKETS, PackedRows
from bough.kernels.runtime.backends import runs


def route_rows(
    x: Tensor, router: Tensor, gate: Tensor, *, used: int, layouts: Iterable[Layout]
) -> tuple[PackedRows, Tensor, Routing]:
    """Return x [M, width] packed for matmuls, the logits [M, E + 1], the shared gate's last, and the routing.

    router [E, width], gate [width]; `layouts`: of the stacks that are multiplied next. On GPUs only.
    """
    from bough.kernels.experts import triton_kernels

    packed, logits = triton_kernels.router(x, router, gate)
    tokens = triton_kernels.TOKENS
    if runs("experts", "cuda", x.device):
        from bough.kernels.experts import cuda
        from bough.kernels.runtime.device import card_of

        tokens = cuda.chunk_tokens(card_of(x.device), layouts, len(x))
    return packed, logits, triton_kernels.route(logits, used, tokens)


def placed(routing: Routing, cache: ExpertCache, stacks: Sequence[ExpertStack]) -> Routing:
    """Return the routing with the places of its experts, all of which are in host memory.

    A step's experts are copied to the places of those that were used least recently. A prompt uses nearly
    all of them and evicts none: it reads those that have no place in rounds. On GPUs only.
    """
    from bough.kernels.experts import cache_kernels

    if len(routing.chosen) > BUCKETS[-1]:
        return replace(routing, rounds=cache_kernels.rounds(routing, cache))
    cache_kernels.resolve(routing, cache)
    for stack in stacks:
        cache_kernels.copy(stack.cold, stack.data, cache.copies)
    return routing


def expert_matmul(x: PackedRows, stack: ExpertStack, routing: Routing) -> Tensor:
    """Return float32 [pairs, N]: row p * rows // pairs of x times the matrix of pair p's expert."""
    assert x.columns == stack.columns and routing.pairs % x.rows == 0, (x.columns, x.rows, routing.pairs)
    out = torch.empty(routing.pairs, stack.rows, device=x.data.device)
    if not routing.rounds:
        _matmul(x, stack, routing, stack.cold, out)
    for part in routing.rounds:
        from bough.kernels.experts import cache_kernels

        size = len(part.copies.pairs) * stack.expert_bytes
        cold = part.stage[:size].view(-1, *stack.data.shape[1:])
        cache_kernels.copy(stack.cold, cold, part.copies)
        _matmul(x, stack, replace(routing, chunks=part.chunks, count=part.count), cold, out)
    return out


def _matmul(x: PackedRows, stack: ExpertStack, routing: Routing, cold: Tensor, out: Tensor) -> None:
    """Multiply; `cold`: where the experts are that have no place, which may be the host's pinned memory."""
    if runs("experts", "cuda", out.device):
        from bough.kernels.experts import cuda

        cuda.matmul(x, stack, routing, cold, out)
    else:
        from bough.kernels.experts import triton_kernels

        triton_kernels.matmul(x, stack, routing, cold, out)


def combine(shared: Tensor, logits: Tensor, outputs: Tensor, weights: Tensor) -> Tensor:
    """Return the gated shared output plus the experts': see reference.combine. On GPUs only."""
    from bough.kernels.experts import triton_kernels

    return triton_kernels.combine(shared, logits, outputs, weights)
