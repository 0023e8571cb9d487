"""RMS norm, l2 norm and rotary embedding in plain torch, float32."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] over its last axis."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """x [..., D] to unit length; eps is added to the squared length, as the models were trained."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def rope_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """positions [B, T], frequencies [R/2] to cos and sin [B, T, 1, R/2]."""
    angles = positions[..., None].float() * frequencies
    return angles.cos()[:, :, None], angles.sin()[:, :, None]


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotates the first R dims of x [B, T, H, D]: pairs (j, j + R/2), or (2j, 2j + 1) when interleaved."""
    half = cos.shape[-1]
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = rotated[..., :half], rotated[..., half:]
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned
