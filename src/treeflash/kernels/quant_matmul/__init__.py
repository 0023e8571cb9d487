"""Matrix products with quantised weights."""

from treeflash.kernels.quant_matmul.reference import quant_matmul

__all__ = ["quant_matmul"]
