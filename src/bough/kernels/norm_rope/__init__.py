"""Norms, rotary embedding and gates, each fused with its neighbours in a layer.

With `pack` the result is packed for a matmul with tiles, on GPUs only: the CUDA C++ kernels take up to 64
rows, the Triton ones more rows and other cards.
"""

from torch import Tensor

from bough.kernels.norm_rope import reference
from bough.kernels.norm_rope.reference import l2_norm, rope, rope_angles
from bough.kernels.quant_matmul.rows import PackedRows
from bough.kernels.runtime.op import op

rms_norm = op(reference.rms_norm, "norms", triton="triton_kernels")
add_rms_norm = op(reference.add_rms_norm, "norms", cuda="cuda", triton="triton_kernels")
gated_rms_norm = op(reference.gated_rms_norm, "norms", cuda="cuda", triton="triton_kernels")
silu_mul = op(reference.silu_mul, "norms", cuda="cuda", triton="triton_kernels")
head_rope = op(reference.head_rope, "norms", triton="triton_kernels")
cache_heads = op(reference.cache_heads, "KV cache", triton=".kv_cache.triton_kernels")
ring_heads = op(reference.ring_heads, "draft ring", triton="triton_kernels")


def silu_rows(gate: Tensor, up: Tensor) -> PackedRows:
    """Return silu(gate) * up, packed, by one kernel: a row's bits do not depend on the number of rows."""
    from bough.kernels.norm_rope import triton_kernels

    packed = triton_kernels.silu_mul(gate, up, pack=True)
    assert isinstance(packed, PackedRows)
    return packed
