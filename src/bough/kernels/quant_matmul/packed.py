"""Matmuls of any number of rows with matrices in tiles; picks the backend and the kernel."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from bough.kernels.quant_matmul import int8
from bough.kernels.quant_matmul.int8 import empty_int8
from bough.kernels.quant_matmul.layout import ROW_BLOCK, Layout, PackedWeight, unpack
from bough.kernels.quant_matmul.partial_sums import PartialSums, RowScaled
from bough.kernels.quant_matmul.rows import BUCKETS, PackedRows
from bough.kernels.runtime.backends import Backend, runs

_SLICE = 1 << 26  # weights expanded at a time for many rows: 128 MiB of float16
_INT8_SLICE = 1 << 27  # the same in int8


def backend(device: torch.device) -> Backend:
    """Return what computes matmuls there: the CUDA C++ kernels, the Triton ones, or plain torch on a CPU."""
    if device.type == "cpu":
        return "torch"
    return "cuda" if runs("matmul", "cuda", device) else "triton"


def _numbered(device: torch.device) -> torch.device:
    """Return the device with its index, as tensors name it, so that caches hold one entry a device."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _kernels(device: torch.device) -> ModuleType:
    if backend(device) == "cuda":
        from bough.kernels.quant_matmul import cuda

        return cuda
    from bough.kernels.quant_matmul import triton_kernels

    return triton_kernels


def prepare(layouts: Iterable[Layout], device: torch.device, buckets: Iterable[int] = BUCKETS) -> None:
    """Compile and load the kernels for these layouts and buckets, so that no step has to wait for it."""
    device = _numbered(device)
    if backend(device) == "cuda":
        from bough.kernels.quant_matmul import cuda

        tilings = cuda.tilings_of(device)
        cuda.prepare(layouts, {bucket: tilings[bucket] for bucket in buckets}, device)


def max_rows(layout: Layout, device: torch.device) -> int:
    """Return the largest bucket whose kernel fits on this card; more rows up to 64 are several launches."""
    device = _numbered(device)
    if backend(device) != "cuda":
        return BUCKETS[-1]
    from bough.kernels.quant_matmul import cuda
    from bough.kernels.runtime.device import card_of

    return cuda.max_rows(card_of(device), layout)


def pack_rows(x: Tensor) -> PackedRows:
    """Return x [M, K] float, M > 0, as matmuls read it; packed once where several matrices read it."""
    assert x.ndim == 2 and len(x), tuple(x.shape)
    x = x.float()
    if x.stride(1) != 1:
        x = x.contiguous()
    return _kernels(x.device).pack_rows(x)


def packed_matmul(x: Tensor | PackedRows, weight: PackedWeight, out: Tensor | None = None) -> Tensor:
    """Return x [M, K] times weight [N, K], transposed: float32 [M, N], in `out` (any row stride) if given.

    Up to 64 rows are multiplied as float16 weights and float16 rows with float32 sums, whose order does not
    depend on M: a row's result does not depend on the other rows. Matmuls on one device run in one stream.
    """
    columns = x.columns if isinstance(x, PackedRows) else x.shape[1]
    rows = x.rows if isinstance(x, PackedRows) else x.shape[0]
    assert columns == weight.columns, (columns, weight.columns)
    if out is None:
        out = torch.empty(rows, weight.rows, device=weight.data.device)
    assert out.dtype == torch.float32 and out.shape == (rows, weight.rows) and out.stride(1) == 1, out.shape
    if isinstance(x, Tensor):
        if not rows:
            return out
        if weight.data.device.type == "cpu":
            return out.copy_(x.float() @ unpack(weight).T)
        x = pack_rows(x)
    if x.bucket is None:
        _many_rows(x, weight, out)
    elif _fits(x, weight):
        _kernels(out.device).matmul(x, weight, out)
    else:  # a card with little shared memory
        limit = max_rows(weight.layout, weight.data.device)
        for part, target in zip(x.split(limit), out.split(limit), strict=True):
            _kernels(out.device).matmul(part, weight, target)
    return out


def packed_matmuls(
    x: Tensor | PackedRows, weights: Sequence[PackedWeight], out: Tensor | None = None
) -> Tensor:
    """Return x [M, K] times several matrices that read the same x, concatenated: float32 [M, total N].

    In `out` if given. More than 64 rows are rounded to int8 for the rows of a matrix that say so.
    """
    sizes, device = [weight.rows for weight in weights], weights[0].data.device
    rows = x.rows if isinstance(x, PackedRows) else len(x)
    if out is None:
        out = torch.empty(rows, sum(sizes), device=device)
    if not rows:
        return out
    if isinstance(x, Tensor) and device.type != "cpu":
        x = pack_rows(x)
    outs = out.split(sizes, 1)
    fits = isinstance(x, PackedRows) and all(_fits(x, weight) for weight in weights)
    if isinstance(x, PackedRows) and fits and backend(device) == "cuda":
        assert all(x.columns == weight.columns for weight in weights), (x.columns, weights[0].columns)
        from bough.kernels.quant_matmul import cuda

        cuda.matmuls(x, weights, outs)
        return out
    if rows > BUCKETS[-1] and any(weight.int8_rows for weight in weights):
        _int8_matmuls(x, weights, outs)
        return out
    for weight, part in zip(weights, outs, strict=True):
        packed_matmul(x, weight, part)
    return out


def supports_partial_sums(x: PackedRows, weight: PackedWeight) -> bool:
    """Return whether `partial_matmul` takes them: one launch of the CUDA kernels, columns in fours."""
    device = weight.data.device
    summed = runs("matmul", "cuda", device) and runs("norms", "cuda", device)
    return _fits(x, weight) and weight.rows % 4 == 0 and summed


def _fits(x: PackedRows, weight: PackedWeight) -> bool:
    """Return whether one launch for at most 64 rows multiplies them."""
    return x.bucket is not None and x.bucket <= max_rows(weight.layout, weight.data.device)


def partial_matmul(x: PackedRows, weight: PackedWeight) -> PartialSums:
    """Return x times weight, transposed, as split-K partial sums for a kernel with a fused reduction."""
    assert x.columns == weight.columns, (x.columns, weight.columns)
    assert supports_partial_sums(x, weight), (x.rows, weight.rows)
    from bough.kernels.quant_matmul import cuda

    return cuda.partial_matmul(x, weight)


def supports_row_scales(x: PackedRows, weight: PackedWeight) -> bool:
    """Return whether `row_scaled_matmul` takes them: more than 64 rows, in 16 bits."""
    return x.bucket is None and not weight.int8_rows


def row_scaled_matmul(x: PackedRows, weight: PackedWeight) -> RowScaled:
    """Return x times weight, transposed, for a kernel that applies the row scales."""
    assert x.columns == weight.columns, (x.columns, weight.columns)
    out = torch.empty(x.rows, weight.rows, device=weight.data.device)
    _unscaled_rows(x, weight, out)
    return RowScaled(out, x.scale * weight.expand_scale)


def expand_weight(weight: PackedWeight, first: int, out: Tensor) -> None:
    """Write rows from `first` on as float16 to out [rows, padded columns]; `expand_scale` restores them."""
    assert first % ROW_BLOCK == 0 and len(out) % ROW_BLOCK == 0 and out.is_contiguous(), (first, out.shape)
    assert out.shape[1] == weight.padded_columns and out.dtype == torch.float16, (out.shape, out.dtype)
    _kernels(out.device).expand(weight, first, out)


def _int8_matmuls(x: Tensor | PackedRows, weights: Sequence[PackedWeight], outs: Sequence[Tensor]) -> None:
    """Multiply the first `int8_rows` of each matrix in int8, its other rows as ever.

    For 8,192 rows of a 27B (24.4e9 weights, 16.8 GB in Q4_K_M) requantising to a scratch reads 16.8 GB and
    writes 24.4, 10 ms of an H200's memory; decoding inside the matmul would repeat it for each of the 64
    blocks of 128 rows. Rounding x once for all matrices that read it takes 3 bytes a value: 12 ms in all.
    """
    ops = _int8(outs[0].device)
    rows = ops.quantise_rows(x)
    for weight, out in zip(weights, outs, strict=True):
        first = weight.int8_rows
        step = max(ROW_BLOCK, _INT8_SLICE // weight.padded_columns // ROW_BLOCK * ROW_BLOCK)
        space = empty_int8(min(step, first), weight.padded_columns, out.device)
        for start in range(0, first, step):
            part = replace(space, rows=min(step, first - start))
            ops.requantise(weight, start, part)
            ops.matmul(rows, part, out[:, start : start + part.rows])
        if first < weight.rows:
            _exact_rest(x, weight, out[:, first:], first)


def _int8(device: torch.device) -> ModuleType:
    """Return what rounds and multiplies in int8 there."""
    if device.type == "cpu":
        return int8
    from bough.kernels.quant_matmul import int8_kernels

    return int8_kernels


def _exact_rest(x: Tensor | PackedRows, weight: PackedWeight, out: Tensor, first: int) -> None:
    """Multiply the rows of the matrix from `first` on."""
    if isinstance(x, Tensor):
        out.copy_(x.float() @ unpack(weight)[first:].T)
    else:
        _many_rows(x, weight, out, first)


def _many_rows(x: PackedRows, weight: PackedWeight, out: Tensor, begin: int = 0) -> None:
    """Multiply with the rows of the matrix from `begin` on."""
    _unscaled_rows(x, weight, out, begin)
    from bough.kernels.quant_matmul import triton_kernels

    triton_kernels.scale_rows(out, x.scale * weight.expand_scale)


def _unscaled_rows(x: PackedRows, weight: PackedWeight, out: Tensor, begin: int = 0) -> None:
    """Expand a slice of the matrix at a time, for a dense matmul whose rows have still to be scaled."""
    step = max(ROW_BLOCK, _SLICE // weight.padded_columns // ROW_BLOCK * ROW_BLOCK)
    space = torch.empty(
        min(step, weight.padded_rows - begin), weight.padded_columns, dtype=torch.float16, device=out.device
    )
    for first in range(begin, weight.rows, step):
        part = space[: min(step, weight.padded_rows - first)]
        expand_weight(weight, first, part)
        count, at = min(step, weight.rows - first), first - begin
        torch.mm(x.data, part[:count].T, out_dtype=torch.float32, out=out[:, at : at + count])
