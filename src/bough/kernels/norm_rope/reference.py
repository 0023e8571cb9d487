"""Norms, rotary embedding and gates in plain torch, float32."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from bough.kernels.kv_cache.format import HeadPool, KVRing
from bough.kernels.kv_cache.reference import encode
from bough.kernels.kv_cache.rotation import rotate
from bough.kernels.quant_matmul.partial_sums import Unfinished
from bough.kernels.quant_matmul.rows import PackedRows

_PACKED = "rows are packed, and unfinished ones completed, on GPUs alone"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x [..., D] over its last axis."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: Tensor, add: Tensor | Unfinished | None, weight: Tensor, eps: float, *, pack: bool = False
) -> tuple[Tensor, Tensor | PackedRows]:
    """Return the residual stream x [..., D] plus `add`, which `pack` completes, and its norm."""
    assert not pack and not isinstance(add, Unfinished), _PACKED
    total = x if add is None else x + add
    return total, rms_norm(total, weight, eps)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, pack: bool = False
) -> Tensor | PackedRows:
    """Return x [B, T, H, D] normed by head, times silu of gate [B, T, H * D]: [B, T, H * D]."""
    assert not pack, _PACKED
    return (rms_norm(x, weight, eps) * silu(gate.unflatten(-1, x.shape[-2:]))).flatten(-2)


def silu_mul(
    gate: Tensor | Unfinished, up: Tensor | Unfinished, *, pack: bool = False
) -> Tensor | PackedRows:
    assert not pack and not isinstance(gate, Unfinished) and not isinstance(up, Unfinished), _PACKED
    return silu(gate) * up


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """Return x [..., D] at unit length; eps is added to the squared length, as the models were trained."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def rope_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin [B, T, 1, R/2] of positions [B, T], or [B, T, R/2], and frequencies [R/2]."""
    angles = (positions if positions.ndim == 3 else positions[..., None]) * frequencies
    return angles.cos()[:, :, None], angles.sin()[:, :, None]


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first R dims of x [B, T, H, D]: pairs (j, j + R/2), or (2j, 2j + 1) when interleaved."""
    half = cos.shape[-1]
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = rotated[..., :half], rotated[..., half:]
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def head_rope(
    x: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> Tensor:
    """Return x [B, T, H, D] normed by head if there is a norm [D], then rotated."""
    x = x if norm is None else rms_norm(x, norm, eps)
    return rope(x, cos, sin, interleaved=interleaved)


def cache_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms: Sequence[Tensor | None],
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    keys: HeadPool,
    values: HeadPool,
    pages: Tensor,
    offsets: Tensor,
    interleaved: bool,
) -> Tensor:
    """Write k, normed and rotated, and v [B, T, KV, D] to the KV cache, at (pages, offsets) [B * T].

    keys, values [pages, KV, page, row]; a quantised pool gets the constant rotation of `kv_cache` first.
    Return q [B, T, H, D], normed and rotated; norms: of queries and of keys.
    """
    q, k = (
        head_rope(x, norm, eps, cos, sin, interleaved=interleaved)
        for x, norm in zip((q, k), norms, strict=True)
    )
    for pool, new in ((keys, k.flatten(0, 1)), (values, v.flatten(0, 1))):
        quantised = pool.format.quantised
        parts = encode(rotate(new), pool.format) if quantised else (new.to(pool.codes.dtype),)
        for plane, rows in zip(pool.planes, parts, strict=True):
            plane.transpose(1, 2)[pages, offsets] = rows
    return q


def ring_heads(
    k: Tensor,
    v: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    ring: KVRing,
    positions: Tensor,
    count: Tensor,
) -> None:
    """Write the first `count` [B] of k, normed and rotated, and v [B, T, KV, D], of positions [B, T]."""
    rows, size = k.shape[1], ring.keys.shape[1]
    assert rows <= size, f"{rows} rows, a ring of {size}"
    columns = torch.arange(rows, device=k.device)
    committed = columns < count[:, None]
    places = positions % size
    owners = ring.slots[:, None].expand_as(committed)
    k = head_rope(k, norm, eps, cos, sin, interleaved=False)
    for pool, new in ((ring.keys, k), (ring.values, v)):
        pool[owners[committed], places[committed]] = new[committed].to(pool.dtype)
