"""The gated delta rule: prompt chunks, trees, and the commit of a tree's path."""

from treeflash.kernels.gated_delta.reference import chunk_delta, fold, tree_delta

__all__ = ["chunk_delta", "fold", "tree_delta"]
