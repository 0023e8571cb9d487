"""The short causal convolution of the Gated DeltaNet layers, with the norms and gates behind it."""

from torch import Tensor

from treeflash.kernels.causal_conv import reference
from treeflash.kernels.causal_conv.reference import chunk_conv, delta_gates, split_heads

__all__ = ["chunk_conv", "chunk_heads", "conv_index", "delta_gates", "split_heads", "tree_conv"]


def conv_index(parents: Tensor, width: int, count: Tensor, path: int) -> Tensor:
    if not parents.is_cuda:
        return reference.conv_index(parents, width, count, path)
    from treeflash.kernels.causal_conv import triton_kernels as kernel

    return kernel.conv_index(parents, width, count, path)


def chunk_heads(
    inputs: Tensor, alpha: Tensor, beta: Tensor, weight: Tensor, decay: Tensor, bias: Tensor, **state
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if inputs.is_cuda:
        from treeflash.kernels.causal_conv import chunk
        from treeflash.kernels.causal_conv import triton_kernels as kernel

        if kernel.takes(weight, alpha, state["key_heads"]):
            return chunk.chunk_heads(inputs, alpha, beta, weight, decay, bias, **state)
    return reference.chunk_heads(inputs, alpha, beta, weight, decay, bias, **state)


def tree_conv(
    inputs: Tensor, alpha: Tensor, beta: Tensor, weight: Tensor, decay: Tensor, bias: Tensor, **state
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if inputs.is_cuda:
        from treeflash.kernels.causal_conv import cuda
        from treeflash.kernels.causal_conv import triton_kernels as kernel

        if cuda.takes(inputs, weight, alpha, state["window"], state["key_heads"]):
            return cuda.tree_conv(inputs, alpha, beta, weight, decay, bias, **state)
        if kernel.takes(weight, alpha, state["key_heads"]):
            return kernel.tree_conv(inputs, alpha, beta, weight, decay, bias, **state)
    return reference.tree_conv(inputs, alpha, beta, weight, decay, bias, **state)
