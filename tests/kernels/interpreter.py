"""Triton's interpreter with matmuls whose sums have one order.

Its own matmuls are those of NumPy's BLAS, which on some CPUs (Zen 5) adds the products of a row in another
order where the row is alone than where it is one of many. A kernel's rows then seem to depend on each other.
"""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from bough.models.step import Step


def sum_in_order() -> None:
    """Let every `tl.dot` add its products one by one, in the order of the summed dimension."""
    setattr(InterpreterBuilder, "create_dot", _dot)  # noqa: B010


def _dot(_: InterpreterBuilder, a: Any, b: Any, sums: Any, *precision: Any) -> TensorHandle:
    assert a.dtype.primitive_bitwidth > 8 or not a.dtype.is_floating(), a.dtype
    left, right = a.data.astype(sums.data.dtype), b.data.astype(sums.data.dtype)
    total = np.zeros_like(sums.data)
    for k in range(left.shape[-1]):
        total += left[..., :, k, None] * right[..., None, k, :]
    return TensorHandle(total + sums.data, sums.dtype.scalar)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fresh memory holds NaN, so that an element nobody writes is seen."""
    plain = torch.empty

    def empty(*shape, **options) -> Tensor:
        out = plain(*shape, **options)
        return out.fill_(torch.nan) if out.is_floating_point() else out.fill_(1 << 20)

    monkeypatch.setattr(torch, "empty", empty)
    torch.manual_seed(7)
    yield


def close(found: Tensor, wanted: Tensor, tolerance: float = 2e-6) -> None:
    assert found.shape == wanted.shape
    assert bool(found.isfinite().all())
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < tolerance, float(error)


def tree_of(rows: int, batch: int) -> Step:
    choose = random.Random(rows)
    parents = [
        [-1] + [choose.randrange(max(0, row - 5), row) for row in range(1, rows)] for _ in range(batch)
    ]
    zeros = torch.zeros(batch, dtype=torch.int64)
    return Step.tree(
        torch.arange(batch), torch.zeros(batch, rows, dtype=torch.int64), torch.tensor(parents), zeros
    )
