"""Matrix products with quantised weights."""

from treeflash.kernels.quant_matmul.layout import (
    Layout,
    PackedWeight,
    empty_packed,
    has_layout,
    layout_of,
    pack,
    unpack,
)
from treeflash.kernels.quant_matmul.packed import (
    backend,
    can_stay_open,
    expand_weight,
    max_rows,
    open_product,
    pack_rows,
    packed_matmul,
    packed_products,
    prepare,
)
from treeflash.kernels.quant_matmul.partial_sums import OpenSums
from treeflash.kernels.quant_matmul.reference import dense_matmul, quant_matmul
from treeflash.kernels.quant_matmul.rows import BUCKETS, PackedRows, empty_rows

__all__ = [
    "BUCKETS",
    "Layout",
    "OpenSums",
    "PackedRows",
    "PackedWeight",
    "backend",
    "can_stay_open",
    "dense_matmul",
    "empty_packed",
    "empty_rows",
    "expand_weight",
    "has_layout",
    "layout_of",
    "max_rows",
    "open_product",
    "pack",
    "pack_rows",
    "packed_matmul",
    "packed_products",
    "prepare",
    "quant_matmul",
    "unpack",
]
