"""Norms, rotary embedding, gates: each with what stands beside it in a layer, so that it is one kernel.

With `pack` the result comes as the rows that a product with tiles reads; on a GPU only, where up to 64
rows have CUDA kernels of their own and more, or other cards, Triton's.
"""

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from treeflash.kernels.norm_rope import reference
from treeflash.kernels.norm_rope.reference import l2_norm, rope, rope_angles
from treeflash.kernels.quant_matmul.partial_sums import OpenSums
from treeflash.kernels.quant_matmul.rows import PackedRows

__all__ = [
    "add_rms_norm",
    "cache_heads",
    "gated_rms_norm",
    "head_rope",
    "l2_norm",
    "ring_heads",
    "rms_norm",
    "rope",
    "rope_angles",
    "silu_mul",
]


def _of(x: Tensor):
    """The implementation for x's device."""
    if not x.is_cuda:
        return reference
    from treeflash.kernels.norm_rope import triton_kernels as kernel

    return kernel


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _of(x).rms_norm(x, weight, eps)


@overload
def add_rms_norm(
    x: Tensor, add: Tensor | None, weight: Tensor, eps: float, *, pack: Literal[False] = False
) -> tuple[Tensor, Tensor]: ...
@overload
def add_rms_norm(
    x: Tensor, add: Tensor | OpenSums | None, weight: Tensor, eps: float, *, pack: bool
) -> tuple[Tensor, Tensor | PackedRows]: ...
def add_rms_norm(
    x: Tensor, add: Tensor | OpenSums | None, weight: Tensor, eps: float, *, pack: bool = False
) -> tuple[Tensor, Tensor | PackedRows]:
    if pack:
        from treeflash.kernels.norm_rope import cuda
        from treeflash.kernels.norm_rope import triton_kernels as kernel

        if isinstance(add, OpenSums) or cuda.takes(x, add):
            return cuda.add_rms_norm(x, add, weight, eps)
        return kernel.add_rms_norm(x, add, weight, eps, pack=True)
    assert not isinstance(add, OpenSums), "open sums are for rows that are packed"
    return _of(x).add_rms_norm(x, add, weight, eps)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, pack: bool = False
) -> Tensor | PackedRows:
    if pack:
        from treeflash.kernels.norm_rope import cuda
        from treeflash.kernels.norm_rope import triton_kernels as kernel

        if cuda.takes(x.flatten(-2), gate, head=x.shape[-1]):
            return cuda.gated_rms_norm(x, gate, weight, eps)
        return kernel.gated_rms_norm(x, gate, weight, eps, pack=True)
    return _of(x).gated_rms_norm(x, gate, weight, eps)


def silu_mul(gate: Tensor | OpenSums, up: Tensor | OpenSums, *, pack: bool = False) -> Tensor | PackedRows:
    if isinstance(gate, OpenSums) or isinstance(up, OpenSums):
        from treeflash.kernels.norm_rope import cuda

        assert pack, "open sums are for rows that are packed"
        return cuda.silu_mul(gate, up)
    if pack:
        from treeflash.kernels.norm_rope import cuda
        from treeflash.kernels.norm_rope import triton_kernels as kernel

        if cuda.takes(gate, up):
            return cuda.silu_mul(gate, up)
        return kernel.silu_mul(gate, up, pack=True)
    return _of(gate).silu_mul(gate, up)


def head_rope(
    x: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> Tensor:
    return _of(x).head_rope(x, norm, eps, cos, sin, interleaved=interleaved)


def cache_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms: Sequence[Tensor | None],
    eps: float,
    cos: Tensor,
    sin: Tensor,
    **places,
) -> Tensor:
    if k.is_cuda:
        from treeflash.kernels.kv_cache import triton_kernels as kernel

        if kernel.takes(places["keys"]) and kernel.takes(places["values"]):
            return kernel.cache_heads(q, k, v, norms, eps, cos, sin, **places)
    return reference.cache_heads(q, k, v, norms, eps, cos, sin, **places)


def ring_heads(
    k: Tensor, v: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor, **places: Tensor
) -> None:
    if k.is_cuda:
        from treeflash.kernels.norm_rope import ring

        ring.ring_heads(k, v, norm, eps, cos, sin, **places)
    else:
        reference.ring_heads(k, v, norm, eps, cos, sin, **places)
