"""Norms, rotary embedding and gates, each fused with its neighbours in a layer.

With `pack` the result is packed for a matmul with tiles, on GPUs only: the CUDA C++ kernels take up to 64
rows, the Triton ones more rows and other cards.
"""

from typing import Literal, overload

from torch import Tensor

from bough.kernels.norm_rope import reference
from bough.kernels.norm_rope.reference import l2_norm, rope, rope_angles
from bough.kernels.quant_matmul.partial_sums import PartialSums, RowScaled, Unfinished
from bough.kernels.quant_matmul.rows import PackedRows
from bough.kernels.runtime.op import op

rms_norm = op(reference.rms_norm, "norms", triton="triton_kernels")
head_rope = op(reference.head_rope, "norms", triton="triton_kernels")
cache_heads = op(reference.cache_heads, "KV cache", triton=".kv_cache.triton_kernels")
ring_heads = op(reference.ring_heads, "draft ring", triton="ring")
_add_rms_norm = op(reference.add_rms_norm, "norms", triton="triton_kernels")
_gated_rms_norm = op(reference.gated_rms_norm, "norms", triton="triton_kernels")
_silu_mul = op(reference.silu_mul, "norms", triton="triton_kernels")


@overload
def add_rms_norm(
    x: Tensor, add: Tensor | None, weight: Tensor, eps: float, *, pack: Literal[False] = False
) -> tuple[Tensor, Tensor]: ...
@overload
def add_rms_norm(
    x: Tensor, add: Tensor | Unfinished | None, weight: Tensor, eps: float, *, pack: bool
) -> tuple[Tensor, Tensor | PackedRows]: ...
def add_rms_norm(
    x: Tensor, add: Tensor | Unfinished | None, weight: Tensor, eps: float, *, pack: bool = False
) -> tuple[Tensor, Tensor | PackedRows]:
    """See reference.add_rms_norm."""
    if pack:
        from bough.kernels.norm_rope import cuda, triton_kernels

        if not isinstance(add, RowScaled) and (isinstance(add, PartialSums) or cuda.takes(x, add)):
            return cuda.add_rms_norm(x, add, weight, eps)
        return triton_kernels.add_rms_norm(x, add, weight, eps, pack=True)
    assert not isinstance(add, Unfinished), "partial sums need `pack`"
    return _add_rms_norm(x, add, weight, eps)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, pack: bool = False
) -> Tensor | PackedRows:
    """See reference.gated_rms_norm."""
    if pack:
        from bough.kernels.norm_rope import cuda, triton_kernels

        if cuda.takes(x.flatten(-2), gate, head=x.shape[-1]):
            return cuda.gated_rms_norm(x, gate, weight, eps)
        return triton_kernels.gated_rms_norm(x, gate, weight, eps, pack=True)
    return _gated_rms_norm(x, gate, weight, eps)


def silu_mul(
    gate: Tensor | Unfinished, up: Tensor | Unfinished, *, pack: bool = False
) -> Tensor | PackedRows:
    """See reference.silu_mul."""
    if not pack:
        assert not isinstance(gate, Unfinished) and not isinstance(up, Unfinished), "they need `pack`"
        return _silu_mul(gate, up)
    from bough.kernels.norm_rope import cuda, triton_kernels

    if isinstance(gate, RowScaled) or isinstance(up, RowScaled):
        assert isinstance(gate, RowScaled) and isinstance(up, RowScaled), "one of them has row scales"
        return triton_kernels.silu_mul(gate, up, pack=True)
    if isinstance(gate, PartialSums) or isinstance(up, PartialSums) or cuda.takes(gate, up):
        return cuda.silu_mul(gate, up)
    return triton_kernels.silu_mul(gate, up, pack=True)


def silu_rows(gate: Tensor, up: Tensor) -> PackedRows:
    """Return the same, packed, by one kernel for any number of rows: a row's bits do not depend on it."""
    from bough.kernels.norm_rope import triton_kernels

    packed = triton_kernels.silu_mul(gate, up, pack=True)
    assert isinstance(packed, PackedRows)
    return packed
