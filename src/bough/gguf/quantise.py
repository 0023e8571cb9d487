"""Quantises floats to the tensor types that Bough writes, in plain torch.

The types with super-blocks are fitted in three moves: a search over candidate scales per sub-block with a
least squares fit for each, a search over the neighbours of the rounded sub-block scales, and a refit of the
super-block scales to the integers found. A move is kept only where it lowers the weighted squared error.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from bough.errors import ModelFileError, UnsupportedQuant
from bough.gguf.types import QuantType

# Weights handled at a time: enough to hide torch's cost per call, few enough that intermediates stay in a
# CPU's cache, and below 1 GiB on a GPU.
_SLICE_CPU = 1 << 19
_SLICE_DEVICE = 1 << 24

_HALF_MAX = 65504.0
# Above float32 noise, below the 3e-5 of a sub-block whose integers are all 31 but one.
_SINGULAR = 4e-6

# Candidate scales spread a sub-block over this many levels more or fewer than the format has.
_CANDIDATES = tuple(step / 5 for step in range(-5, 6))
# Steps tried for the codes of (scale, minimum). Opposite steps nearly cancel and win too rarely to pay.
_AFFINE_MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1), (1, 1), (-1, -1))
_SYMMETRIC_MOVES = ((-1, 0), (1, 0))


def quantise(weights: Tensor, type: QuantType) -> Tensor:
    """Encode whole rows: float [..., elements] on any device -> uint8 [..., row_bytes] on the same one."""
    assert weights.is_floating_point(), weights.dtype
    if type not in _ENCODERS:
        offered = ", ".join(offered.name for offered in _ENCODERS)
        raise UnsupportedQuant(f"cannot quantise to {type.name}; offered are {offered}")
    elements = weights.shape[-1]
    if elements % type.block_elements:
        raise UnsupportedQuant(
            f"rows of {elements} weights cannot be {type.name}: {type.block_elements} must divide them",
            hint="use F16 for this tensor, or Q8_0 where 32 divides the row",
        )
    encode, limit = _ENCODERS[type]
    blocks = weights.reshape(-1, type.block_elements)
    out = torch.empty((blocks.shape[0], type.block_bytes), dtype=torch.uint8, device=weights.device)
    step = (_SLICE_CPU if weights.device.type == "cpu" else _SLICE_DEVICE) // type.block_elements
    for start in range(0, blocks.shape[0], step):
        part = blocks[start : start + step].float()
        _check_range(part, type, limit=limit, first=start * type.block_elements, shape=weights.shape)
        out[start : start + step] = encode(part)
    return out.reshape(*weights.shape[:-1], type.row_bytes(elements))


def _check_range(part: Tensor, type: QuantType, *, limit: float, first: int, shape: torch.Size) -> None:
    peak = part.abs().amax().item()
    if isfinite(peak) and peak <= limit:
        return
    flat = part.flatten()
    broken = ~flat.isfinite()
    at = first + int((broken if broken.any() else flat.abs()).to(torch.float32).argmax().item())
    position = []
    for size in reversed(shape):
        position.append(at % size)
        at //= size
    where = f"weight {position[::-1]} of {list(shape)}"
    if isfinite(peak):
        raise UnsupportedQuant(
            f"{where} has magnitude {peak:.6g}, {type.name} holds at most {limit:.6g}",
            hint="keep this tensor in F32",
        )
    value = flat[broken][0].item()
    raise ModelFileError(
        f"{where} is {value}, {type.name} needs finite weights",
        hint="the source weights are damaged: fetch them again",
    )


def _inverse(values: Tensor) -> Tensor:
    """1 / values, and 0 where that is not finite."""
    inverse = 1 / values
    return torch.where(inverse.isfinite(), inverse, 0)


def _half_bytes(values: Tensor) -> Tensor:
    """float32 [blocks, 1] -> the bytes of its float16, uint8 [blocks, 2]."""
    return values.half().view(torch.uint8)


def _float_encoder(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    # a fresh copy, because a view as bytes needs adjacent elements
    return lambda x: x.to(dtype, copy=True, memory_format=torch.contiguous_format).view(torch.uint8)


def _q8_0(x: Tensor) -> Tensor:
    # a tensor as divisor, because a GPU multiplies by the rounded reciprocal of a Python number
    scale = x.abs().amax(1, keepdim=True) / x.new_tensor(127.0)
    scaled = x * _inverse(scale)
    # halves go away from zero here, unlike in torch.round
    magnitude = scaled.abs()
    whole = magnitude.floor()
    q = (whole + (magnitude - whole >= 0.5)).copysign(scaled)
    return torch.cat((_half_bytes(scale), q.to(torch.int8).view(torch.uint8)), dim=1)


def _q4_0(x: Tensor) -> Tensor:
    # the weight of largest magnitude, whatever its sign, becomes -8
    peak = x.gather(1, x.abs().argmax(1, keepdim=True))
    scale = peak / -8
    q = (x * _inverse(scale) + 8.5).to(torch.uint8).clamp_(max=15)
    return torch.cat((_half_bytes(scale), q[:, :16] | (q[:, 16:] << 4)), dim=1)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Super-blocks to encode, x and weights [blocks, subs, width], and the ranges the format can express."""

    x: Tensor
    weights: Tensor
    levels: tuple[int, int]
    codes: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Fit:
    """x ~ scale * scale_codes * q - minimum * minimum_codes, all in float32.

    scale, minimum [blocks, 1, 1], exact in float16; scale_codes, minimum_codes [blocks, subs, 1], integers
    """

    scale: Tensor
    minimum: Tensor
    scale_codes: Tensor
    minimum_codes: Tensor

    def integers(self, blocks: _Blocks) -> Tensor:
        """Return the best q: [blocks, subs, width]."""
        shifted = blocks.x + self.minimum * self.minimum_codes
        return _rounded(shifted, _inverse(self.scale * self.scale_codes), blocks.levels)

    def errors(self, blocks: _Blocks) -> Tensor:
        """Return the weighted squared error of each sub-block with the best q: [blocks, subs, 1]."""
        shifted = blocks.x + self.minimum * self.minimum_codes
        step = self.scale * self.scale_codes
        q = _rounded(shifted, _inverse(step), blocks.levels)
        return shifted.sub_(q.mul_(step)).square_().mul_(blocks.weights).sum(-1, keepdim=True)


def _importance(x: Tensor) -> Tensor:
    """Return the weights of squared errors: higher for large values, independent of the sub-block's scale."""
    return x.abs() * _inverse(x.square().mean(-1, keepdim=True).sqrt_()) + 1


def _rounded(x: Tensor, inverse_scale: Tensor, levels: tuple[int, int]) -> Tensor:
    return (x * inverse_scale).round_().clamp_(*levels)


def _fit_affine(blocks: _Blocks) -> tuple[Tensor, Tensor]:
    """Fit x ~ scale * q - minimum, neither negative, to each sub-block: [blocks, subs, 1] each."""
    x, weights, top = blocks.x, blocks.weights, blocks.levels[1]
    weighted = weights * x
    sum_w, sum_x = weights.sum(-1, keepdim=True), weighted.sum(-1, keepdim=True)
    low = x.amin(-1, keepdim=True).clamp_(max=0)
    inverse_span = _inverse(x.amax(-1, keepdim=True) - low)
    above = x - low
    scale, offset, least = torch.zeros_like(low), torch.zeros_like(low), torch.full_like(low, torch.inf)
    for candidate in _CANDIDATES:
        q = _rounded(above, inverse_span * (top + candidate), blocks.levels)
        weighted_q = weights * q
        sum_q = weighted_q.sum(-1, keepdim=True)
        sum_qq = weighted_q.mul_(q).sum(-1, keepdim=True)
        sum_xq = q.mul_(weighted).sum(-1, keepdim=True)
        # with all integers equal this is rounding noise, and a slope from it would be anything
        determinant = sum_w * sum_qq - sum_q * sum_q
        determinant = torch.where(determinant > _SINGULAR * sum_w * sum_qq, determinant, 0)
        slope = (sum_w * sum_xq - sum_x * sum_q) * _inverse(determinant)
        base = (sum_x - slope * sum_q) / sum_w
        # a minimum can only be subtracted: without one the line goes through zero
        slope = torch.where(base > 0, sum_xq * _inverse(sum_qq), slope).clamp_(min=0)
        base = base.clamp_(max=0)
        error = slope * (slope * sum_qq - 2 * sum_xq + 2 * base * sum_q) + base * (base * sum_w - 2 * sum_x)
        better = error < least
        least = torch.where(better, error, least)
        scale = torch.where(better, slope, scale)
        offset = torch.where(better, base, offset)
    return scale, -offset


def _fit_symmetric(blocks: _Blocks) -> Tensor:
    """Fit x ~ scale * q with a signed scale to each sub-block: [blocks, subs, 1]."""
    x, weights, bottom = blocks.x, blocks.weights, blocks.levels[0]
    weighted = weights * x
    inverse_peak = _inverse(x.gather(-1, x.abs().argmax(-1, keepdim=True)))
    scale, most = torch.zeros_like(inverse_peak), torch.zeros_like(inverse_peak)
    for candidate in _CANDIDATES:
        q = _rounded(x, inverse_peak * (bottom + candidate), blocks.levels)
        sum_xq = (weighted * q).sum(-1, keepdim=True)
        slope = sum_xq * _inverse(q.square_().mul_(weights).sum(-1, keepdim=True))
        explained = slope * sum_xq
        better = explained > most
        most = torch.where(better, explained, most)
        scale = torch.where(better, slope, scale)
    return scale


def _super_scale(scales: Tensor, top: int, codes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return a float16 value whose `top`-fold is the largest sub-block scale, in float32, and all codes."""
    largest = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    half = (largest / top).clamp_(-_HALF_MAX, _HALF_MAX).half()
    # near the smallest float16 the nearest value may be far too small, even zero
    short = half.float().abs() * (abs(top) + 0.5) < largest.abs()
    half = torch.where(short, (half.view(torch.int16) + 1).view(torch.float16), half)
    scale = half.float().clamp_(-_HALF_MAX, _HALF_MAX)
    return scale, (scales * _inverse(scale)).round_().clamp_(*codes)


def _step_codes(blocks: _Blocks, fit: _Fit, moves: tuple[tuple[int, int], ...]) -> _Fit:
    """Return the best of the fit and its neighbours for each sub-block."""
    least = fit.errors(blocks)
    scale_codes, minimum_codes = fit.scale_codes, fit.minimum_codes
    for scale_step, minimum_step in moves:
        trial = replace(
            fit,
            scale_codes=(fit.scale_codes + scale_step).clamp_(*blocks.codes),
            minimum_codes=(fit.minimum_codes + minimum_step).clamp_(*blocks.codes),
        )
        errors = trial.errors(blocks)
        better = errors < least
        least = torch.where(better, errors, least)
        scale_codes = torch.where(better, trial.scale_codes, scale_codes)
        minimum_codes = torch.where(better, trial.minimum_codes, minimum_codes)
    return replace(fit, scale_codes=scale_codes, minimum_codes=minimum_codes)


def _refit_super_scales(blocks: _Blocks, fit: _Fit) -> _Fit:
    """Refit scale and minimum of a super-block to its integers, where that lowers the error."""
    steps = fit.integers(blocks) * fit.scale_codes
    minima = fit.minimum_codes
    weighted = blocks.weights * steps

    def total(values: Tensor) -> Tensor:
        return values.sum((1, 2), keepdim=True)

    steps_steps, steps_minima = total(weighted * steps), total(weighted * minima)
    minima_minima = total(blocks.weights * minima * minima)
    x_steps, x_minima = total(weighted * blocks.x), total(blocks.weights * blocks.x * minima)
    inverse = _inverse(steps_steps * minima_minima - steps_minima * steps_minima)
    scale = (x_steps * minima_minima - x_minima * steps_minima) * inverse
    minimum = (x_steps * steps_minima - x_minima * steps_steps) * inverse
    scale = torch.where(minima_minima == 0, x_steps * _inverse(steps_steps), scale)
    trial = replace(fit, scale=scale.half().float(), minimum=minimum.half().float())
    better = trial.errors(blocks).sum(1, keepdim=True) < fit.errors(blocks).sum(1, keepdim=True)
    return replace(
        fit,
        scale=torch.where(better, trial.scale, fit.scale),
        minimum=torch.where(better, trial.minimum, fit.minimum),
    )


def _refined(blocks: _Blocks, fit: _Fit, moves: tuple[tuple[int, int], ...]) -> _Fit:
    fit = _refit_super_scales(blocks, _step_codes(blocks, fit, moves))
    return _step_codes(blocks, fit, moves)


def _affine(x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return header (scales, minima) and integers of Q4_K and Q5_K: uint8 [blocks, 16], [blocks, 8, 32]."""
    x = x.unflatten(1, (8, 32))
    blocks = _Blocks(x, _importance(x), levels=(0, top), codes=(0, 63))
    scales, minima = _fit_affine(blocks)
    scale, scale_codes = _super_scale(scales, 63, blocks.codes)
    minimum, minimum_codes = _super_scale(minima, 63, blocks.codes)
    fit = _refined(blocks, _Fit(scale, minimum, scale_codes, minimum_codes), _AFFINE_MOVES)
    s, m = fit.scale_codes.to(torch.uint8).flatten(1), fit.minimum_codes.to(torch.uint8).flatten(1)
    header = (
        _half_bytes(fit.scale.flatten(1)),
        _half_bytes(fit.minimum.flatten(1)),
        s[:, :4] | ((s[:, 4:] >> 4) << 6),
        m[:, :4] | ((m[:, 4:] >> 4) << 6),
        (s[:, 4:] & 15) | (m[:, 4:] << 4),
    )
    return torch.cat(header, dim=1), fit.integers(blocks).to(torch.uint8)


def _nibbles_64(q: Tensor) -> Tensor:
    """Pack the low nibbles of each even sub-block with the next: uint8 [blocks, 8, 32] -> [blocks, 128]."""
    pairs = q.unflatten(1, (4, 2)) & 15
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).flatten(1)


def _packed(fields: Tensor, bits: int) -> Tensor:
    """Pack small fields into bytes, the first lowest: uint8 [..., 8 / bits, n] -> [..., n]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=fields.device).unsqueeze(1)
    return (fields << shifts).sum(-2, dtype=torch.uint8)


def _q4_k(x: Tensor) -> Tensor:
    header, q = _affine(x, 15)
    return torch.cat((header, _nibbles_64(q)), dim=1)


def _q5_k(x: Tensor) -> Tensor:
    header, q = _affine(x, 31)
    return torch.cat((header, _packed(q >> 4, 1), _nibbles_64(q)), dim=1)


def _q6_k(x: Tensor) -> Tensor:
    x = x.unflatten(1, (16, 16))
    blocks = _Blocks(x, _importance(x), levels=(-32, 31), codes=(-128, 127))
    scale, codes = _super_scale(_fit_symmetric(blocks), -128, blocks.codes)
    no_minimum = _Fit(scale, torch.zeros_like(scale), codes, torch.zeros_like(codes))
    fit = _refined(blocks, no_minimum, _SYMMETRIC_MOVES)
    # [blocks, halves, quarters of 32, 32]
    q = (fit.integers(blocks) + 32).to(torch.uint8).view(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15) | (q[:, :, 2:] << 4)
    codes = fit.scale_codes.to(torch.int8).view(torch.uint8).flatten(1)
    high = _packed(q >> 4, 2)
    return torch.cat((low.flatten(1), high.flatten(1), codes, _half_bytes(fit.scale.flatten(1))), dim=1)


# encoder of [blocks, elements] and the largest magnitude whose scale float16 can hold
_ENCODERS: dict[QuantType, tuple[Callable[[Tensor], Tensor], float]] = {
    QuantType.F32: (_float_encoder(torch.float32), torch.finfo(torch.float32).max),
    QuantType.F16: (_float_encoder(torch.float16), _HALF_MAX),
    QuantType.BF16: (_float_encoder(torch.bfloat16), torch.finfo(torch.bfloat16).max),
    QuantType.Q8_0: (_q8_0, 127 * _HALF_MAX),
    QuantType.Q4_0: (_q4_0, 8 * _HALF_MAX),
    QuantType.Q4_K: (_q4_k, 63 * _HALF_MAX),
    QuantType.Q5_K: (_q5_k, 63 * _HALF_MAX),
    QuantType.Q6_K: (_q6_k, 31 * 127 * _HALF_MAX),
}
