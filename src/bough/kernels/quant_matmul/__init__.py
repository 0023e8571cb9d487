"""Matmuls with quantised weights."""

from bough.kernels.quant_matmul.layout import (
    ROW_BLOCK,
    Layout,
    PackedWeight,
    empty_packed,
    first_rows,
    has_layout,
    layout_of,
    pack,
    unpack,
    with_int8,
)
from bough.kernels.quant_matmul.packed import (
    backend,
    expand_weight,
    max_rows,
    pack_rows,
    packed_matmul,
    packed_matmuls,
    partial_matmul,
    prepare,
    row_scaled_matmul,
    supports_partial_sums,
    supports_row_scales,
)
from bough.kernels.quant_matmul.partial_sums import PartialSums, RowScaled, Unfinished
from bough.kernels.quant_matmul.reference import dense_matmul, quant_matmul
from bough.kernels.quant_matmul.rows import BUCKETS, PackedRows, empty_rows
