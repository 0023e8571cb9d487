"""Comparisons of tensors, memory filled with NaN, and functions captured as CUDA graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from bough.kernels.quant_matmul import PackedRows, pack_rows

T = TypeVar("T")


@contextmanager
def nan_filled_memory() -> Iterator[None]:
    """Make `torch.empty` return NaN, or a large integer, so that an element that no kernel writes shows."""
    plain = torch.empty

    def empty(*shape, **options) -> Tensor:
        out = plain(*shape, **options)
        return out.fill_(torch.nan) if out.is_floating_point() else out.fill_(1 << 20)

    torch.empty = empty
    try:
        yield
    finally:
        torch.empty = plain


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the relative RMS error, infinity where `found` has a NaN."""
    if not bool(found.isfinite().all()):
        return float("inf")
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def worst_row_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of a row [R, N], infinity where `found` has a NaN."""
    if not bool(found.isfinite().all()):
        return float("inf")
    return float(((found.double() - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-300)).max())


def assert_close(found: Tensor, expected: Tensor, *, tolerance: float, name: str = "") -> None:
    assert found.shape == expected.shape, f"{name} {tuple(found.shape)}, expected {tuple(expected.shape)}"
    error = relative_error(found, expected)
    assert error < tolerance, f"{name} relative error {error:.2e}, at most {tolerance:.0e}"


def assert_same_bits(found: Tensor, expected: Tensor, name: str = "") -> None:
    assert torch.equal(found, expected), f"{name} differs in {int((found != expected).sum())} elements"


def assert_packed_rows(found: PackedRows, floats: Tensor, name: str = "") -> None:
    """Compare rows that a kernel packed with `pack_rows` of the reference's floats [1, R, K]."""
    expected = pack_rows(floats.flatten(0, 1))
    data = [x.halves() for x in (found, expected)]
    assert_close(data[0], data[1], tolerance=1e-3, name=f"{name} rows")
    assert_close(found.scale, expected.scale, tolerance=1e-9, name=f"{name} scales")


def captured(function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Run a function once eagerly, capture it as a CUDA graph, and return the graph and its outputs."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph, out
