"""Matmuls with quantised weights."""

from treeflash.kernels.quant_matmul.layout import (
    ROW_BLOCK,
    Layout,
    PackedWeight,
    empty_packed,
    first_rows,
    has_layout,
    layout_of,
    pack,
    unpack,
)
from treeflash.kernels.quant_matmul.packed import (
    backend,
    expand_weight,
    max_rows,
    pack_rows,
    packed_matmul,
    packed_matmuls,
    partial_matmul,
    prepare,
    supports_partial_sums,
)
from treeflash.kernels.quant_matmul.partial_sums import PartialSums
from treeflash.kernels.quant_matmul.reference import dense_matmul, quant_matmul
from treeflash.kernels.quant_matmul.rows import BUCKETS, PackedRows, empty_rows

__all__ = [
    "BUCKETS",
    "ROW_BLOCK",
    "Layout",
    "PackedRows",
    "PackedWeight",
    "PartialSums",
    "backend",
    "dense_matmul",
    "empty_packed",
    "empty_rows",
    "expand_weight",
    "first_rows",
    "has_layout",
    "layout_of",
    "max_rows",
    "pack",
    "pack_rows",
    "packed_matmul",
    "packed_matmuls",
    "partial_matmul",
    "prepare",
    "quant_matmul",
    "supports_partial_sums",
    "unpack",
]
