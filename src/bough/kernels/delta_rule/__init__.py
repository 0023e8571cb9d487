"""The gated delta rule: prompt chunks, and trees with the commit of the path before them."""

import torch

from bough.kernels.causal_conv import ConvRows, ConvWeights, DeltaBuffers, DeltaHeads, path_heads
from bough.kernels.delta_rule import cpu
from bough.kernels.delta_rule.cpu import chunk_delta
from bough.kernels.delta_rule.records import DeltaRows
from bough.kernels.runtime.op import op

tree_order = op(cpu.tree_order, "tree delta rule", triton="triton_kernels")
tree_delta = op(cpu.tree_delta, "tree delta rule", cuda="cuda", triton="triton_kernels")
slot_delta = op(cpu.slot_delta, "prompt delta rule", triton="chunk")


def fold_path(weights: ConvWeights, buffers: DeltaBuffers, rows: ConvRows) -> None:
    """Advance the slots' states over the uncommitted paths of their last trees, as a tree step does."""
    if rows.path.shape[1]:
        heads = path_heads(weights, buffers, rows)
        no_rows = heads.q.new_empty(len(rows.slots), 0, dtype=torch.int32)
        tree_delta(heads, buffers.state, DeltaRows(rows.slots, rows.count, no_rows))
