"""Encoding of a planned tensor: noise, scaled copies of the small tensor, constants."""

import zlib
from types import MappingProxyType

import numpy as np
import torch

from bough.errors import UnsupportedModel, UnsupportedQuant
from bough.gguf.quants import dequantise
from bough.gguf.types import QuantType
from bough.models.weights import TensorSource
from workshop.grow.plan import Constant, Span, TensorPlan

# Offsets of a block's float16 scales; every weight is linear in them, and zero bytes are zero weights.
_FACTORS = MappingProxyType(
    {
        QuantType.Q4_0: (0,),
        QuantType.Q4_1: (0, 2),
        QuantType.Q5_0: (0,),
        QuantType.Q5_1: (0, 2),
        QuantType.Q8_0: (0,),
        QuantType.Q2_K: (80, 82),
        QuantType.Q3_K: (108,),
        QuantType.Q4_K: (0, 2),
        QuantType.Q5_K: (0, 2),
        QuantType.Q6_K: (208,),
        QuantType.IQ4_NL: (0,),
        QuantType.IQ4_XS: (0,),
        QuantType.IQ3_S: (0,),
        QuantType.IQ3_XXS: (0,),
        QuantType.IQ2_S: (0,),
        QuantType.IQ2_XS: (0,),
        QuantType.IQ2_XXS: (0,),
        QuantType.IQ1_S: (0,),
    }
)
_FLOATS = MappingProxyType(
    {QuantType.F32: torch.float32, QuantType.F16: torch.float16, QuantType.BF16: torch.bfloat16}
)
# How to encode a block whose first weight is non-zero and all others zero: the offset of the byte that is
# multiplied by the scale, that byte's limit, and further bytes (start, stop, value) to set.
_SINGLES = MappingProxyType(
    {
        QuantType.Q8_0: (2, 127, ()),
        QuantType.Q4_K: (4, 63, ((16, 17, 1),)),
        QuantType.Q5_K: (4, 63, ((48, 49, 1),)),
        # the first sub-block's codes decode to zero, its first one to one
        QuantType.Q6_K: (192, 127, ((128, 144, 2), (0, 1, 1))),
    }
)
# Random weights' standard deviation: with rows of 5120 to 17408 a matmul keeps its input's variance.
_SPREAD = 0.014
_POOL_BYTES = 1 << 23


class Noise:
    """A pool of random blocks per type; a tensor reads it cyclically from an offset of its own."""

    def __init__(self, seed: int = 0):
        self._seed = seed
        self._pools: dict[QuantType, np.ndarray] = {}

    def prepare(self, type: QuantType) -> None:
        """Create the pool of a type; required before `fill`, which is thread-safe afterwards."""
        if type not in self._pools:
            self._pools[type] = _random_blocks(type, np.random.default_rng((self._seed, int(type))))

    def fill(self, out: np.ndarray, type: QuantType, name: str, offset: int) -> None:
        """Fill uint8 [n] with whole blocks, from a tensor's byte `offset`; deterministic in the name."""
        pool = self._pools[type]
        start = zlib.crc32(f"{self._seed} {name}".encode()) * type.block_bytes + offset
        done = 0
        while done < len(out):
            index = (start + done) % len(pool)
            count = min(len(out) - done, len(pool) - index)
            out[done : done + count] = pool[index : index + count]
            done += count


def build(
    plan: TensorPlan, rows: range, source: TensorSource, noise: Noise, buffer: np.ndarray
) -> np.ndarray:
    """Encode some rows of the tensor [rows, row bytes] into the first bytes of `buffer`."""
    row_bytes = plan.info.row_bytes
    flat = buffer[: len(rows) * row_bytes]
    out = flat.reshape(-1, row_bytes)
    if plan.fill is None:
        noise.fill(flat, plan.type, plan.name, rows.start * row_bytes)
    elif plan.fill == 0:
        flat[:] = 0
    else:
        assert plan.type is QuantType.F32, plan
        flat.view(np.float32)[:] = plan.fill
    for start, stop in plan.zero:
        out[:, _bytes(plan.type, start) : _bytes(plan.type, stop)] = 0
    for span in plan.rows:
        _copy_rows(plan, source, out, span, rows)
    if plan.constant is not None:
        _write_constant(plan.constant, plan.type, out, rows)
    return out


def check_fit(plan: TensorPlan, source: TensorSource) -> None:
    """Raise if a span is not whole blocks or a constant cannot be encoded in the tensor's type."""
    block = plan.type.block_elements
    if plan.shape[-1] % block:
        raise UnsupportedModel(
            f"{plan.name}: rows of {plan.shape[-1]} weights, {plan.type.name} needs a multiple of {block}",
            "choose a shape whose sizes are multiples of 256",
        )
    if plan.source is None:
        return
    source.require_tensor(plan.source)
    for span in plan.columns:
        if span.small % block or span.large % block or span.count % block:
            raise UnsupportedModel(
                f"{plan.name}: columns {span.small} to {span.small + span.count} move to {span.large}, "
                f"{plan.type.name} needs multiples of {block}",
                "choose a shape whose sizes are multiples of 256",
            )
    if plan.constant is not None and plan.type not in _FLOATS and plan.type not in _SINGLES:
        supported = ", ".join(kind.name for kind in (*_FLOATS, *_SINGLES))
        raise UnsupportedQuant(f"{plan.source} is {plan.type.name}, needed for growing: one of {supported}")


def _copy_rows(plan: TensorPlan, source: TensorSource, out: np.ndarray, span: Span, rows: range) -> None:
    """Copy the part of a span of the small tensor's rows that falls within `rows` into `out`."""
    first, last = max(span.large, rows.start), min(span.large + span.count, rows.stop)
    if plan.source is None or first >= last:
        return
    info = source.require_tensor(plan.source)
    shift = span.small - span.large
    packed = source.raw(plan.source).reshape(-1, info.row_bytes)[first + shift : last + shift]
    for columns in plan.columns:
        data = packed[:, _section(info.type, columns.small, columns)]
        if info.type is not plan.type:
            # norms and other vectors are always float32 in the grown file
            assert plan.type is QuantType.F32, plan
            floats = dequantise(torch.from_numpy(data.copy()), info.type).contiguous()
            data = floats.view(torch.uint8).numpy()
        target = out[first - rows.start : last - rows.start, _section(plan.type, columns.large, columns)]
        target[:] = _scaled(data, plan.type, plan.factor, plan.source)


def _write_constant(constant: Constant, type: QuantType, out: np.ndarray, rows: range) -> None:
    first, last = max(constant.rows.start, rows.start), min(constant.rows.stop, rows.stop)
    if first < last:
        start = _bytes(type, constant.column)
        block = np.frombuffer(single(type, constant.value), np.uint8)
        out[first - rows.start : last - rows.start, start : start + len(block)] = block


def single(type: QuantType, value: float) -> bytes:
    """Return a block whose first weight is the nearest encodable value to `value` and all others zero."""
    if type in _FLOATS:
        return bytes(torch.tensor([value], dtype=_FLOATS[type]).view(torch.uint8).tolist())
    offset, limit, further = _SINGLES[type]
    steps = np.arange(1, limit + 1)
    with np.errstate(over="ignore"):
        factors = (value / steps).astype(np.float16)
    best = int(np.abs(factors.astype(np.float64) * steps - value).argmin())
    block = np.zeros(type.block_bytes, np.uint8)
    for start, stop, code in further:
        block[start:stop] = code
    block[offset] = steps[best]
    first = _FACTORS[type][0]
    block[first : first + 2] = factors[best : best + 1].view(np.uint8)
    return block.tobytes()


def _scaled(packed: np.ndarray, type: QuantType, factor: float, name: str) -> np.ndarray:
    """Multiply rows of whole blocks by `factor`; exact for a power of two without overflow."""
    if factor == 1:
        return packed
    if type in _FLOATS:
        values = torch.from_numpy(packed.copy()).view(_FLOATS[type])
        scaled = (values.double() * factor).to(values.dtype)
        if not scaled.isfinite().all():
            raise UnsupportedModel(f"{name}: a weight times {factor:g} does not fit in {type.name}")
        return scaled.view(torch.uint8).numpy()
    blocks = packed.reshape(-1, type.block_bytes).copy()
    if type is QuantType.MXFP4:
        exponents = blocks[:, 0].astype(np.int64) + round(np.log2(factor))
        if exponents.max() > 254:
            raise UnsupportedModel(f"{name}: a block's exponent times {factor:g} does not fit in MXFP4")
        blocks[:, 0] = exponents
        return blocks.reshape(packed.shape)
    for offset in _factors(type):
        halves = np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16)
        with np.errstate(over="ignore"):
            scaled_halves = (halves.astype(np.float32) * factor).astype(np.float16)
        if not np.isfinite(scaled_halves).all():
            raise UnsupportedModel(f"{name}: a block's scale times {factor:g} does not fit in float16")
        blocks[:, offset : offset + 2] = scaled_halves.view(np.uint8)
    return blocks.reshape(packed.shape)


def _random_blocks(type: QuantType, generator: np.random.Generator) -> np.ndarray:
    """Return blocks of random zero-mean weights, flat."""
    # an odd number of blocks, so that rows of a power of two blocks do not repeat
    count = _POOL_BYTES // type.block_bytes | 1
    if type in _FLOATS:
        values = torch.from_numpy(generator.standard_normal(count, np.float32) * _SPREAD)
        return values.to(_FLOATS[type]).view(torch.uint8).numpy()
    blocks = np.frombuffer(generator.bytes(count * type.block_bytes), np.uint8)
    blocks = blocks.reshape(count, type.block_bytes).copy()
    if type is QuantType.MXFP4:
        blocks[:, 0] = 120  # times codes of about 5
        return blocks.reshape(-1)
    sample, offsets = blocks[:4096].copy(), _factors(type)
    factors = [1.0, 0.0]
    if len(offsets) == 2:
        _set_factors(sample, offsets, [0.0, 1.0])
        unit = _weights(sample, type).mean()
        _set_factors(sample, offsets, factors)
        factors[1] = float(-_weights(sample, type).mean() / unit)
    _set_factors(sample, offsets, factors)
    weights = _weights(sample, type)
    size = _SPREAD / float(weights.std())
    _set_factors(blocks, offsets, [size * factor for factor in factors])
    return blocks.reshape(-1)


def _factors(type: QuantType) -> tuple[int, ...]:
    if type not in _FACTORS:
        raise UnsupportedQuant(f"{type.name} weights cannot be grown", "take a file of another quantisation")
    return _FACTORS[type]


def _weights(blocks: np.ndarray, type: QuantType) -> torch.Tensor:
    return dequantise(torch.from_numpy(blocks), type)


def _set_factors(blocks: np.ndarray, offsets: tuple[int, ...], values: list[float]) -> None:
    for offset, value in zip(offsets, values, strict=False):
        blocks[:, offset : offset + 2] = np.array([value], np.float16).view(np.uint8)


def _bytes(type: QuantType, elements: int) -> int:
    return type.row_bytes(elements)


def _section(type: QuantType, start: int, span: Span) -> slice:
    return slice(_bytes(type, start), _bytes(type, start + span.count))
