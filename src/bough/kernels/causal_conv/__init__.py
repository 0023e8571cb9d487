"""The short causal convolution of the Gated DeltaNet layers, with the norms and gates after it."""

from torch import Tensor

from bough.kernels.causal_conv import reference
from bough.kernels.causal_conv.reference import chunk_conv, delta_gates, split_heads
from bough.kernels.runtime.backends import runs

__all__ = ["chunk_conv", "chunk_heads", "conv_index", "delta_gates", "path_heads", "split_heads", "tree_conv"]


def conv_index(parents: Tensor, width: int, count: Tensor, path: int, first: Tensor | None = None) -> Tensor:
    """See reference.conv_index."""
    if not runs("tree convolution", "triton", parents.device):
        return reference.conv_index(parents, width, count, path, first)
    from bough.kernels.causal_conv import triton_kernels

    return triton_kernels.conv_index(parents, width, count, path, first)


def chunk_heads(
    inputs: Tensor, alpha: Tensor, beta: Tensor, weight: Tensor, decay: Tensor, bias: Tensor, **state
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See reference.chunk_heads."""
    if inputs.is_cuda:
        from bough.kernels.causal_conv import chunk, triton_kernels

        heads = triton_kernels.takes(weight, alpha, state["key_heads"])
        if heads and runs("prompt convolution", "triton", inputs.device):
            return chunk.chunk_heads(inputs, alpha, beta, weight, decay, bias, **state)
    return reference.chunk_heads(inputs, alpha, beta, weight, decay, bias, **state)


def tree_conv(
    inputs: Tensor, alpha: Tensor, beta: Tensor, weight: Tensor, decay: Tensor, bias: Tensor, **state
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See reference.tree_conv."""
    if inputs.is_cuda:
        from bough.kernels.causal_conv import cuda, triton_kernels

        if cuda.takes(inputs, weight, alpha, state["window"], state["key_heads"]):
            return cuda.tree_conv(inputs, alpha, beta, weight, decay, bias, **state)
        heads = triton_kernels.takes(weight, alpha, state["key_heads"])
        if heads and runs("tree convolution", "triton", inputs.device):
            return triton_kernels.tree_conv(inputs, alpha, beta, weight, decay, bias, **state)
    return reference.tree_conv(inputs, alpha, beta, weight, decay, bias, **state)


def path_heads(weight: Tensor, **state) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return k, v, g and beta of the last tree's uncommitted path as a tree step does; change nothing.

    The arguments are those of `tree_conv` for a tree without rows.
    """
    batch, heads = len(state["slots"]), state["tree_gates"].shape[-1]
    inputs, gates = weight.new_empty(batch, 0, len(weight)), weight.new_empty(batch, 0, heads)
    unused = weight.new_empty(heads)
    return tree_conv(inputs, gates, gates, weight, unused, unused, **state)[1:]
