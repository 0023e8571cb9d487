"""Matrix products with quantised weights."""

from treeflash.kernels.quant_matmul.reference import dense_matmul, quant_matmul

__all__ = ["dense_matmul", "quant_matmul"]
