"""Attention of a step's rows over the paged cache, and of a draft block over its ring of context."""

from treeflash.kernels.attention.reference import block_attention, paged_attention

__all__ = ["block_attention", "paged_attention"]
