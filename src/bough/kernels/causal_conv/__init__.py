"""The short causal convolution of the Gated DeltaNet layers, with the norms and gates after it."""

from bough.kernels.causal_conv import reference
from bough.kernels.causal_conv.records import ConvRows, ConvWeights, DeltaBuffers, DeltaHeads
from bough.kernels.causal_conv.reference import chunk_conv, delta_gates, split_heads
from bough.kernels.runtime.op import op

conv_index = op(reference.conv_index, "tree convolution", triton="triton_kernels")
chunk_heads = op(reference.chunk_heads, "prompt convolution", triton="chunk")
tree_conv = op(reference.tree_conv, "tree convolution", cuda="cuda", triton="triton_kernels")


def path_heads(weights: ConvWeights, buffers: DeltaBuffers, rows: ConvRows) -> DeltaHeads:
    """Return the heads of the last tree's uncommitted path as a tree step does; change nothing."""
    batch, taps, heads = len(rows.slots), weights.taps, len(weights.decay)
    inputs, gates = taps.new_empty(batch, 0, len(taps)), taps.new_empty(batch, 0, heads)
    return tree_conv(inputs, gates, gates, weights, buffers, rows)
