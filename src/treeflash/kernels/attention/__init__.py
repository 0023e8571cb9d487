"""Attention of a step's rows over the paged cache."""

from treeflash.kernels.attention.reference import paged_attention

__all__ = ["paged_attention"]
