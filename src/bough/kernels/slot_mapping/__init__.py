"""The slot mapping of a step's rows (KV pages and offsets), and the rows of trees, padded to a size."""

from bough.kernels.runtime.op import op
from bough.kernels.slot_mapping import reference
from bough.kernels.slot_mapping.reference import SlotMapping

ragged_rows = op(reference.ragged_rows, "slot mapping", triton="triton_kernels")
padded_tree = op(reference.padded_tree, "slot mapping", triton="triton_kernels")
slot_mapping = op(reference.slot_mapping, "slot mapping", triton="triton_kernels")
