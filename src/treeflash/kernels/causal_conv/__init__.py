"""The short causal convolution of the Gated DeltaNet layers."""

from treeflash.kernels.causal_conv.reference import chunk_conv, conv_index, tree_conv

__all__ = ["chunk_conv", "conv_index", "tree_conv"]
